"""Turns that a mover gives its data paths, their cost, and the age of a posting's last progress."""

import threading
import time

from kvgrpc.core.events import EndpointOffered, PostingEnded
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.mover import Mover
from tests.datapath.loopback import Faults
from tests.datapath.movers import WHOLE, Held, Rank, held_rank, until, with_held

DONE, FAILED = PostingState.DONE, PostingState.FAILED


def cpu_s(mover: Mover) -> float:
    assert mover._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(mover._thread.ident))


def between_turns_s(mover: Mover) -> float | None:
    """Returns its thread's wait after a second without events, in seconds; None if it waits until something happens."""
    return mover._wait_s(time.monotonic() + 1.0)


def test_paths_get_turns_while_an_access_is_expected_and_none_afterwards() -> None:
    held = Held()
    rank = with_held(held)
    for access in ("a", "b", "a"):
        rank.mover.expect(access)
    until(lambda: held.turns > 10)
    rank.mover.unexpect("a")
    turns = held.turns
    until(lambda: held.turns > turns + 10)
    rank.mover.unexpect("b")
    rank.mover.unexpect("b")
    rank.mover.connect("nobody", RankEndpoint(1), [])
    rank.not_mapped()  # all earlier commands are done
    turns = held.turns
    threading.Event().wait(0.05)
    assert held.turns == turns
    assert rank.mover.close(0.0)


def test_peers_that_need_no_turns_for_their_bytes_get_few_while_nothing_moves_here() -> None:
    """Turns are still given, since a new peer of that kind connects by them."""
    held = Held()
    held.peers_need_turns = False
    rank = held_rank(held)
    assert between_turns_s(rank.mover) is None
    rank.mover.expect("a")
    until(lambda: held.turns > 0)
    alone = between_turns_s(rank.mover)
    held.peers_need_turns = True
    needed = between_turns_s(rank.mover)
    held.peers_need_turns = False
    rank.post("p", "h", WHOLE)
    until(lambda: held.looks > 0)
    with_posting = between_turns_s(rank.mover)
    assert alone is not None
    assert needed == with_posting
    assert needed is not None
    assert 0 < 5 * needed < alone
    held.state = DONE
    assert rank.next(PostingEnded).done
    assert between_turns_s(rank.mover) == alone
    assert rank.mover.close(0.0)


def test_a_peer_that_reads_on_after_its_access_ended_is_helped_to_its_end() -> None:
    held = Held()
    rank = with_held(held)
    rank.mover.offer("a peer may connect from now on, and never says when it has read its last byte")
    rank.next(EndpointOffered)
    turns, used, began = held.turns, cpu_s(rank.mover), time.monotonic()
    until(lambda: held.turns > turns + 10)
    assert cpu_s(rank.mover) - used < 0.1 * (time.monotonic() - began)
    assert rank.mover.close(0.0)


def test_a_posting_that_is_polled_gets_turns_until_it_ends() -> None:
    held = Held()
    rank = held_rank(held)
    rank.post("a", "h", WHOLE)
    until(lambda: held.turns > 10 and held.looks > 10)
    held.state = DONE
    assert rank.next(PostingEnded).done
    assert rank.mover.close(0.0)


def test_an_idle_mover_costs_nothing(linked: Rank) -> None:
    linked.post("a", "p", WHOLE)
    linked.next(PostingEnded)
    before, began = cpu_s(linked.mover), time.monotonic()
    threading.Event().wait(0.3)
    assert cpu_s(linked.mover) - before < 0.01 * (time.monotonic() - began)


def test_waiting_for_a_polled_posting_leaves_most_of_a_core_to_others() -> None:
    held = Held()
    rank = held_rank(held)
    rank.post("a", "h", WHOLE)
    until(lambda: held.turns > 10)
    before, began = cpu_s(rank.mover), time.monotonic()
    threading.Event().wait(0.5)
    assert (cpu_s(rank.mover) - before) / (time.monotonic() - began) < 0.3
    assert rank.mover.close(0.0)


def test_progress_age_is_zero_when_idle_and_grows_while_a_posting_is_stuck(linked: Rank, faults: Faults) -> None:
    assert linked.mover.progress_age_s() == 0.0
    faults.end = threading.Event()
    linked.post("a", "p", WHOLE)
    until(lambda: linked.mover.progress_age_s() > 0.05)
    faults.end.set()
    linked.next(PostingEnded)
    until(lambda: linked.mover.progress_age_s() == 0.0)


def test_progress_age_grows_while_a_library_does_not_return() -> None:
    held = Held(hangs=True)
    rank = with_held(held)
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    until(lambda: rank.mover.progress_age_s() > 0.05)
    held.release.set()
    rank.mapped()
    assert rank.mover.close(0.0)
