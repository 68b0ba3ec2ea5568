"""Movers of sources and targets: postings that write, and the end of a peer's writes."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import EndpointOffered, PostingEnded, ProcessEnded, Rekeyed
from kvgrpc.core.values.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.reports import Disconnected
from tests.datapath.loopback import Faults, LoopbackPath
from tests.datapath.movers import AT_SOURCE, NBYTES, WHOLE, Held, HeldWritten, Rank, held_rank, until
from tests.datapath.peers import DEADLINE_S, GUARD, Bytes, content, expected, runs_of

DONE, FAILED, UNPROVED = PostingState.DONE, PostingState.FAILED, PostingState.UNPROVED
WRITE = Operation.WRITE
KEY = "source"  # the key to which AT_SOURCE leads


@pytest.fixture
def peer() -> Iterator[Bytes]:
    """Yields the memory of a peer in this process."""
    memory = content(1, NBYTES)
    path = LoopbackPath(PrivateMemory.of(memory), KEY)
    yield memory
    path.close()


@pytest.mark.parametrize("limit", [{}, {"bandwidth_limit_bytes_per_s": 64.0 * NBYTES}], ids=["at once", "in slices"])
def test_a_write_moves_the_own_bytes_into_the_peer_s_memory_and_no_others(peer: Bytes, limit: dict[str, Any]) -> None:
    rank = Rank(lambda memory: [LoopbackPath(memory, "own")], **limit)
    rank.bytes[:] = content(2, NBYTES)
    runs = runs_of((10, 20, 300_000), (400_000, 999_999, 24))
    before = peer.copy()
    rank.connect("p", AT_SOURCE)
    rank.post("a", "p", runs, WRITE)
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.nbytes, ended.quiesced) == (True, 300_024, True)
    assert np.array_equal(peer, expected(before, content(2, NBYTES), runs))
    assert np.array_equal(rank.bytes, content(2, NBYTES))
    assert rank.mover.close(0.0)


def test_a_run_out_of_range_of_either_side_fails_the_write_and_touches_nothing(linked: Rank) -> None:
    for bad in ((NBYTES, 0, 1), (0, NBYTES, 1), (-1, 0, 1), (0, 0, -1)):
        linked.post("a", "p", runs_of((0, 0, 4096), bad), WRITE)
        ended = linked.next(PostingEnded)
        assert (ended.done, ended.nbytes, ended.wire_s, ended.quiesced) == (False, 0, 0.0, True)
    linked.post("a", "p", WHOLE)
    linked.next(PostingEnded)
    assert np.array_equal(linked.bytes, content(1, NBYTES))


def test_a_write_by_a_path_on_which_only_the_destination_moves_fails_before_anything_starts() -> None:
    held = Held()
    rank = held_rank(held)
    rank.post("a", "h", WHOLE, WRITE)
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.wire_s, ended.quiesced) == (False, 0.0, True)
    assert "by held no rank writes another's memory" in ended.message
    assert not held.wakes
    assert rank.mover.close(0.0)


def test_a_write_that_breaks_on_the_way_fails_and_the_next_one_works(linked: Rank, faults: Faults) -> None:
    faults.fail_after_bytes = 1
    linked.post("a", "p", WHOLE, WRITE)
    ended = linked.next(PostingEnded)
    assert (ended.done, ended.quiesced) == (False, True)
    faults.fail_after_bytes = None
    linked.post("a", "p", WHOLE, WRITE)
    assert linked.next(PostingEnded).done


def test_an_end_that_leaves_bytes_on_their_way_is_a_failure_that_is_not_quiesced_and_closes_all_the_same() -> None:
    held = HeldWritten()
    held.state = UNPROVED
    rank = held_rank(held)
    rank.post("a", "h", WHOLE, WRITE)
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.message, ended.quiesced) == (False, "failed as told", False)
    rank.mover.disconnect("h")
    assert rank.next(Disconnected).error == "bytes of a write may still land in the peer's memory"
    assert held.remote_closed
    assert rank.mover.close(0.0)


# ---- the target


def test_a_rekey_ends_postings_and_peers_and_says_so_after_them() -> None:
    held = HeldWritten()
    rank = held_rank(held)
    rank.post("a", "h", WHOLE)
    rank.mover.rekey()
    ended = rank.next(PostingEnded)
    assert (ended.posting_id, ended.done, ended.quiesced) == ("a", False, True)
    assert rank.next(Disconnected) == Disconnected("h", peer_rank=0)
    assert rank.next(Rekeyed) == Rekeyed(1)
    assert held.rekeyed == 1
    rank.post("a", "h", WHOLE)
    assert rank.next(PostingEnded).message == "rank 0 of the peer h is not connected"
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    rank.mapped()
    rank.mover.offer("again")
    rank.next(EndpointOffered)
    assert rank.mover.close(0.0)


def test_a_rekey_after_which_a_peer_may_still_write_says_why() -> None:
    held = HeldWritten()
    held.late_writes = "nobody knows"
    rank = held_rank(held)
    rank.mover.rekey()
    rank.next(Disconnected)
    assert rank.next(Rekeyed) == Rekeyed(1, "nobody knows")
    assert rank.mover.close(0.0)


def test_a_rekey_that_breaks_proves_nothing_and_the_mover_goes_on() -> None:
    held = HeldWritten()
    held.break_at = "rekey"
    rank = held_rank(held)
    rank.post("a", "h", WHOLE)
    rank.mover.rekey()
    assert not rank.next(PostingEnded).quiesced
    rank.next(Disconnected)
    assert rank.next(Rekeyed).message == "held could not be re-keyed: rekey is broken"
    rank.mover.offer("still there")
    rank.next(EndpointOffered)
    assert rank.mover.close(0.0)


def test_a_read_that_was_lost_ends_for_good_with_the_path_that_lost_it() -> None:
    held = HeldWritten()
    held.break_at = "poll"
    rank = held_rank(held)
    rank.post("a", "h", WHOLE)
    assert not rank.next(PostingEnded).quiesced
    held.break_at = ""
    rank.mover.rekey()
    rank.next(Disconnected)
    ended = rank.next(PostingEnded)
    assert (ended.posting_id, ended.done, ended.quiesced) == ("a", False, True)
    rank.next(Rekeyed)
    rank.mover.rekey()
    rank.next(Rekeyed)
    assert rank.mover.close(0.0)


@pytest.mark.parametrize("drained", [True, False])
def test_the_end_of_a_peer_s_process_is_told_once_also_after_it_was_disconnected(drained: bool) -> None:
    held = HeldWritten()
    held.ends_with_process = drained
    rank = held_rank(held)
    rank.mover.await_end("h")
    rank.mover.disconnect("h", watch=True)
    rank.next(Disconnected)
    (process,) = held.processes
    assert not process.closed
    rank.mover.await_end("h")
    process.ended = True
    assert rank.next(ProcessEnded) == ProcessEnded(1, "h", drained)
    assert process.closed
    assert rank.mover.close(0.0)


def test_the_end_of_a_disconnected_peer_is_not_waited_for() -> None:
    held = HeldWritten()
    rank = held_rank(held)
    rank.mover.await_end("h")
    rank.mover.disconnect("h")
    rank.next(Disconnected)
    assert held.processes[0].closed
    assert rank.mover.close(0.0)


def test_the_end_of_a_process_is_seen_however_much_else_there_is_to_do() -> None:
    held = HeldWritten()
    rank = held_rank(held)
    rank.mover.await_end("h")
    held.processes[0].ended = True
    deadline = time.monotonic() + DEADLINE_S
    report: object = None
    while not isinstance(report, ProcessEnded):
        rank.mover.offer("x")
        report = rank.reports.get()
        assert time.monotonic() < deadline
    assert rank.mover.close(0.0)


def test_of_a_peer_that_connects_again_the_newest_process_is_waited_for() -> None:
    held = HeldWritten()
    rank = held_rank(held)
    rank.mover.await_end("h")
    rank.mover.disconnect("h", watch=True)
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    rank.mover.await_end("h")
    rank.next(Disconnected)
    rank.mapped()
    rank.mover.disconnect("h", watch=True)
    rank.next(Disconnected)
    first, second = held.processes
    assert first.closed
    second.ended = True
    assert rank.next(ProcessEnded).peer == "h"
    assert rank.mover.close(0.0)


def test_a_peer_that_is_not_connected_or_cannot_be_seen_has_no_reported_end(linked: Rank) -> None:
    linked.mover.await_end("nobody")
    linked.mover.await_end("p")
    linked.mover.disconnect("p")
    linked.next(Disconnected)
    assert linked.mover.close(0.0)


def test_processes_are_let_go_of_when_the_mover_closes() -> None:
    held = HeldWritten()
    rank = held_rank(held)
    rank.mover.await_end("h")
    rank.mover.disconnect("h", watch=True)
    rank.next(Disconnected)
    assert rank.mover.close(0.0)
    assert held.processes[0].closed


def test_after_a_rekey_no_posting_that_it_ended_counts_as_one_without_progress() -> None:
    rank = held_rank(HeldWritten())
    rank.post("a", "h", WHOLE)
    rank.mover.rekey()
    for kind in (PostingEnded, Disconnected, Rekeyed):
        rank.next(kind)
    until(lambda: rank.mover.progress_age_s() == 0.0)
    assert rank.mover.close(0.0)


def test_a_write_that_was_lost_has_ended_here_after_a_rekey_and_may_land_at_the_peer_all_the_same() -> None:
    held = HeldWritten()
    rank = held_rank(held)
    rank.post("a", "h", WHOLE, WRITE)
    held.break_at = "poll"
    lost = rank.next(PostingEnded)
    assert (lost.quiesced, lost.own_at_rest) == (False, False)
    rank.mover.rekey()
    rank.next(Disconnected)
    found = rank.next(PostingEnded)
    assert (found.posting_id, found.quiesced, found.own_at_rest) == ("a", False, True)
    rank.next(Rekeyed)
    assert rank.mover.close(0.0)


def test_a_rekey_leaves_paths_alone_by_which_no_peer_writes() -> None:
    rank = held_rank(Held())
    rank.mover.rekey()
    assert rank.next(Rekeyed) == Rekeyed(1)
    rank.post("a", "h", WHOLE)
    assert rank.mover.close(0.0)
    assert rank.next(PostingEnded).message == "the mover was closed before the posting ended"


def test_after_a_rekey_no_write_of_before_lands_and_a_new_connection_writes(linked: Rank, faults: Faults) -> None:
    target = Rank(lambda memory: [LoopbackPath(memory, "target")])
    at_target = RankEndpoint(0, loopback=LoopbackEndpoint("target", NBYTES))
    linked.connect("t", at_target)
    faults.begin = threading.Event()
    linked.post("a", "t", WHOLE, WRITE)
    target.mover.rekey()
    assert target.next(Rekeyed) == Rekeyed(1)
    faults.begin.set()
    assert linked.next(PostingEnded).done is False
    linked.post("b", "t", WHOLE, WRITE)
    assert "is gone" in linked.next(PostingEnded).message
    assert (target.bytes == GUARD).all()
    linked.mover.disconnect("t")
    linked.next(Disconnected)
    linked.bytes[:] = content(2, NBYTES)
    linked.connect("t", at_target)
    linked.post("c", "t", WHOLE, WRITE)
    assert linked.next(PostingEnded).done
    assert np.array_equal(target.bytes, content(2, NBYTES))
    assert target.mover.close(0.0)


@pytest.mark.parametrize(
    ("operation", "late", "at_rest"),
    [(WRITE, "nobody knows", False), (WRITE, "", True), (Operation.READ, "nobody knows", True)],
)
def test_memory_is_at_rest_after_close_unless_a_write_is_late(operation: Operation, late: str, at_rest: bool) -> None:
    held = HeldWritten()
    held.late_writes = late
    rank = held_rank(held)
    rank.mover.expect("over", WRITE)
    rank.mover.unexpect("over")
    rank.mover.expect("open", operation)
    assert rank.mover.close(0.0) is at_rest
    assert (rank.bytes == GUARD).all()
