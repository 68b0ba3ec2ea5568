"""The mover: its reports, their order, and its reaction to failures.

Most tests use ranks in this process, whose faults the test controls (`loopback.Faults`), so that nothing depends on
timing. Waits have a deadline that is reached only when a test fails.
"""

import logging
import queue
import threading
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.events import EndpointOffered, PeerMapped, PostingEnded
from kvgrpc.core.values.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.host.process_socket import ProcessSocket
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.paths.cma import CmaPath
from kvgrpc.datapath.paths.shm import ShmPath
from kvgrpc.datapath.reports import Disconnected, Report
from kvgrpc.errors import AlreadyExists
from tests.datapath.loopback import Faults, LoopbackPath
from tests.datapath.movers import AT_SOURCE, NBYTES, WHOLE, Held, Rank, held_rank, post_of, with_held
from tests.datapath.peers import DEADLINE_S, GUARD, Case, ProcessPeer, content, runs_of, shared

DONE, FAILED = PostingState.DONE, PostingState.FAILED


def test_a_posting_moves_its_bytes_and_says_how_many_and_how_long(linked: Rank) -> None:
    linked.post("a", "p", runs_of((10, 20, 1000), (5000, 6000, 24)))
    ended = linked.next(PostingEnded)
    assert (ended.posting_id, ended.done, ended.nbytes, ended.message) == ("a", True, 1024, "")
    assert ended.quiesced
    assert 0 < ended.post_s <= ended.wire_s < DEADLINE_S
    assert np.array_equal(linked.bytes[20:1020], content(1, NBYTES)[10:1010])
    assert int((linked.bytes != GUARD).sum()) <= 1024


def test_a_posting_without_runs_ends_done(linked: Rank) -> None:
    linked.post("a", "p", runs_of())
    assert linked.next(PostingEnded).done


def test_reports_come_in_order_of_postings_that_run_one_after_the_other(linked: Rank) -> None:
    for i in range(200):
        linked.post(f"{i}", "p", runs_of((i, i, 100)))
    assert [linked.next(PostingEnded).posting_id for _ in range(200)] == [f"{i}" for i in range(200)]


def test_reports_come_from_one_thread_one_at_a_time(source: LoopbackPath) -> None:
    threads = set()
    ended = threading.Event()

    def report(_: Report) -> None:
        threads.add(threading.current_thread().name)
        ended.set()

    memory = PrivateMemory.of(bytearray(NBYTES))
    mover = Mover(3, memory, [LoopbackPath(memory, "own")], report)
    mover.start()
    mover.connect("p", AT_SOURCE, ["loopback"])
    mover.post(post_of("a", "p", WHOLE))
    assert mover.close(DEADLINE_S)
    assert threads == {"kvgrpc-mover-3"}


def test_calls_return_at_once_while_the_data_path_is_held(linked: Rank, faults: Faults) -> None:
    faults.begin = threading.Event()  # set below: a call that waited for it would never end
    for i in range(100):
        linked.post(f"{i}", "p", runs_of((0, i, 1)))
        linked.mover.expect(f"{i}")
        linked.mover.unexpect(f"{i}")
    linked.mover.disconnect("p")
    assert linked.reports.empty()
    faults.begin.set()
    assert all(linked.next(PostingEnded).done for _ in range(100))
    assert linked.next(Disconnected) == Disconnected("p", peer_rank=0)


def test_a_run_out_of_range_fails_the_posting_and_touches_nothing(linked: Rank) -> None:
    for bad in ((NBYTES, 0, 1), (0, NBYTES, 1), (-1, 0, 1), (0, 0, -1)):
        linked.post("a", "p", runs_of((0, 0, 4096), bad))
        ended = linked.next(PostingEnded)
        assert (ended.done, ended.nbytes, ended.wire_s) == (False, 0, 0.0)
        assert ended.message
        assert ended.quiesced
    assert (linked.bytes == GUARD).all()


def test_a_posting_to_a_peer_that_is_not_connected_fails(rank: Rank) -> None:
    rank.post("a", "nobody", WHOLE)
    assert rank.next(PostingEnded) == PostingEnded(
        "a", False, message="rank 0 of the peer nobody is not connected", own_at_rest=True
    )


def test_a_posting_that_breaks_on_the_way_fails_and_the_next_one_works(linked: Rank, faults: Faults) -> None:
    faults.fail_after_bytes = 1
    linked.post("a", "p", WHOLE)
    ended = linked.next(PostingEnded)
    assert (ended.done, ended.nbytes, ended.quiesced) == (False, 0, True)
    assert "told to fail" in ended.message
    faults.fail_after_bytes = None
    faults.fail_post = "told to refuse"
    linked.post("a", "p", WHOLE)
    assert linked.next(PostingEnded).message == "told to refuse"
    faults.fail_post = ""
    linked.post("a", "p", WHOLE)
    assert linked.next(PostingEnded).done


def test_a_name_is_free_again_when_its_end_is_reported_and_not_before(linked: Rank, faults: Faults) -> None:
    faults.end = threading.Event()
    linked.post("a", "p", WHOLE)
    with pytest.raises(AlreadyExists):
        linked.post("a", "p", WHOLE)
    faults.end.set()
    assert linked.next(PostingEnded).done
    linked.post("a", "p", WHOLE)
    assert linked.next(PostingEnded).done


def test_a_disconnect_waits_for_the_last_posting(linked: Rank, faults: Faults) -> None:
    faults.end = threading.Event()
    linked.post("a", "p", WHOLE)
    linked.mover.disconnect("p")
    linked.post("b", "p", WHOLE)  # the name no longer means a peer
    refused = linked.next(PostingEnded)
    assert (refused.posting_id, refused.done) == ("b", False)
    faults.end.set()
    assert linked.next(PostingEnded).posting_id == "a"
    assert linked.next(Disconnected) == Disconnected("p", peer_rank=0)


def test_a_peer_is_connected_again_while_its_old_link_still_moves(linked: Rank, faults: Faults) -> None:
    faults.end = threading.Event()
    linked.post("old", "p", WHOLE)
    linked.mover.disconnect("p")
    assert linked.connect("p", AT_SOURCE).data_path == "loopback"
    linked.post("new", "p", WHOLE)
    faults.end.set()
    assert linked.next(PostingEnded).posting_id == "old"
    assert linked.next(Disconnected).peer == "p"
    assert linked.next(PostingEnded).posting_id == "new"


def test_every_disconnect_is_answered(rank: Rank) -> None:
    rank.mover.disconnect("nobody")
    assert rank.next(Disconnected) == Disconnected("nobody")


def test_a_connected_peer_is_not_connected_twice(linked: Rank) -> None:
    linked.mover.connect("p", AT_SOURCE, ["loopback"], 2)
    failed = linked.not_mapped()
    ((path, reason),) = failed.rejected
    assert failed.attempt == 2
    assert path == "loopback"
    assert "disconnect it first" in reason
    linked.post("a", "p", WHOLE)
    assert linked.next(PostingEnded).done


class ShmAndCma:
    """A path object that offers a pool by both shm and cma."""

    needs_polling = False

    def __init__(self, memory: SharedMemory, _: str) -> None:
        socket = ProcessSocket()
        self._paths = ShmPath(memory, socket=socket), CmaPath(memory, socket=socket)

    def offer(self, endpoint: RankEndpoint) -> RankEndpoint:
        for path in self._paths:
            endpoint = path.offer(endpoint)
        return endpoint

    def close(self) -> None:
        for path in self._paths:
            path.close()


def test_paths_are_tried_in_the_order_allowed_and_refusals_are_told() -> None:
    """shm and cma both reach the pool; the first allowed one wins."""
    both: Any = ShmAndCma
    owner = ProcessPeer(Case("both", both, shared, shared), 4, (NBYTES,))
    offered = owner.endpoint()
    reader = Rank(lambda memory: [ShmPath(memory), CmaPath(memory)])
    first = reader.connect("best", offered)
    assert (first.data_path, first.rejected) == ("shm", ())
    assert "mapped" in first.why
    again = reader.connect("token used", offered)
    assert again.data_path == "cma"
    assert [path for path, _ in again.rejected] == ["shm", "window"]
    assert "used" in again.rejected[0][1]
    reader.mover.connect("other order", owner.endpoint(), ["nixl", "cma", "shm"])
    other = reader.mapped()
    assert other.data_path == "cma"
    assert other.rejected == (("nixl", "this rank has no such data path"),)
    for peer in ("best", "token used", "other order"):
        reader.bytes[:] = GUARD
        reader.post(peer, peer, WHOLE)
        assert reader.next(PostingEnded).done
        assert np.array_equal(reader.bytes, content(4, NBYTES))
    reader.mover.connect("nothing allowed", offered, [])
    assert reader.not_mapped() == PeerMapped(1, "nothing allowed", "", "")
    reader.mover.connect("nowhere", RankEndpoint(0), ["shm", "cma"])
    assert [path for path, _ in reader.not_mapped().rejected] == ["shm", "cma"]
    assert reader.mover.close(1.0)
    owner.close()


def test_an_offer_leaves_out_what_cannot_be_reached_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank = Rank(lambda memory: [ShmPath(memory), LoopbackPath(memory, "own")])
    rank.mover.offer("k")
    offered = rank.next(EndpointOffered)
    assert offered.endpoint == RankEndpoint(1, loopback=LoopbackEndpoint("own", NBYTES))
    (line,) = caplog.messages
    assert line.startswith("shm is not offered to k: ")
    assert "pool" in line
    assert rank.mover.close(0.0)


def test_a_connect_that_waits_for_its_peer_keeps_no_posting_waiting(source: LoopbackPath) -> None:
    held = Held(waits=True)
    rank = with_held(held)
    rank.mover.connect("slow", AT_SOURCE, ["held", "loopback"])
    rank.connect("p", AT_SOURCE)
    rank.post("a", "p", WHOLE)
    assert rank.next(PostingEnded).done
    held.release.set()
    assert rank.mapped().peer == "slow"
    assert rank.mover.close(0.0)


def test_a_disconnect_cancels_a_connect_that_still_waits_and_answers_name_their_attempts(source: LoopbackPath) -> None:
    held = Held(waits=True)
    rank = with_held(held)
    rank.mover.connect("slow", AT_SOURCE, ["held", "loopback"], 1)
    rank.mover.disconnect("slow")
    rank.mover.connect("slow", AT_SOURCE, ["loopback"], 2)
    assert rank.not_mapped().attempt == 1
    assert rank.next(Disconnected).peer == "slow"
    connected = rank.mapped()
    assert (connected.peer, connected.attempt) == ("slow", 2)
    held.release.set()
    assert rank.mover.close(DEADLINE_S)
    assert rank.reports.empty()


def test_what_a_peer_was_offered_is_withdrawn_when_its_life_is_over_and_not_before() -> None:
    held = Held()
    rank = with_held(held)
    rank.mover.disconnect("let go", watch=True)
    rank.mover.disconnect("over", gone=True)
    for _ in range(2):
        rank.next(Disconnected)
    assert held.withdrawn == ["over"]
    assert rank.mover.close(0.0)


@pytest.mark.parametrize("step", ["offer", "connect", "read", "poll", "progress", "remote close"])
def test_an_exception_stops_one_path_alone(source: LoopbackPath, step: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    held = Held()
    rank = held_rank(held)
    rank.connect("p", AT_SOURCE)
    held.break_at = step
    rank.mover.offer("k")
    rank.next(EndpointOffered)
    assert ("held is not offered to k" in caplog.text) == (step == "offer")
    rank.mover.connect("h2", AT_SOURCE, ["held", "loopback"])
    assert (rank.mapped().data_path == "loopback") == (step == "connect")
    rank.post("bad", "h", WHOLE)
    if step in {"read", "poll"}:
        ended = rank.next(PostingEnded)
        assert (ended.posting_id, ended.done, ended.quiesced) == ("bad", False, False)
        assert "is broken" in ended.message
    rank.post("good", "p", WHOLE)
    ended = rank.next(PostingEnded)
    assert (ended.posting_id, ended.done, ended.nbytes) == ("good", True, NBYTES)
    if step not in {"read", "poll"}:
        held.state = DONE
        assert rank.next(PostingEnded).done
    rank.mover.disconnect("h")
    disconnected = rank.next(Disconnected)
    assert (disconnected.error != "") == (step in {"read", "poll", "remote close"})
    assert held.remote_closed == (disconnected.error == "")
    held.break_at = ""
    assert rank.mover.close(0.0)
    assert "is broken" in caplog.text


def test_an_owner_that_refuses_a_report_stops_no_mover(source: LoopbackPath, caplog: pytest.LogCaptureFixture) -> None:
    seen: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def report(report: Report) -> None:
        seen.put(report)
        raise ValueError("the owner's own mistake")

    memory = PrivateMemory.of(bytearray(NBYTES))
    mover = Mover(0, memory, [LoopbackPath(memory, "own")], report)
    mover.start()
    mover.connect("p", AT_SOURCE, ["loopback"])
    mover.post(post_of("a", "p", WHOLE))
    assert isinstance(seen.get(timeout=DEADLINE_S), PeerMapped)
    assert isinstance(seen.get(timeout=DEADLINE_S), PostingEnded)
    assert mover.close(0.0)
    assert "own mistake" in caplog.text


def test_a_failure_that_the_library_reports_is_passed_on() -> None:
    held = Held()
    rank = held_rank(held)
    rank.post("a", "h", WHOLE)
    held.state = FAILED
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.message, ended.quiesced) == (False, "failed as told", True)
    assert rank.mover.close(0.0)
