"""The mover: what it reports, in which order, and what it does when things go wrong.

Most tests use ranks in this process, whose faults the test controls (`loopback.Faults`), so that
nothing depends on timing. Waits have a deadline that is only reached when a test fails.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from kvgrpc.core.descriptors import Runs
from kvgrpc.core.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.datapath.base import DataPath, Posting, PostingState, Remote
from kvgrpc.datapath.cma import CmaPath
from kvgrpc.datapath.loopback import Faults, LoopbackPath
from kvgrpc.datapath.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.mover import BEST_FIRST, Mover
from kvgrpc.datapath.reports import (
    Connected,
    ConnectFailed,
    Disconnected,
    Offered,
    PostingEnded,
    Report,
)
from kvgrpc.datapath.shm import ShmPath
from kvgrpc.errors import AlreadyExists, InvalidRequest, Unavailable

from tests.datapath.peers import DEADLINE_S, GUARD, Bytes, content, runs_of

NBYTES = 1 << 20
DONE, FAILED, PENDING = PostingState.DONE, PostingState.FAILED, PostingState.PENDING
Kind = TypeVar("Kind", bound=Report)


class Rank:
    """A mover with its memory, and its reports as they come."""

    def __init__(self, paths: Callable[[PrivateMemory], list[DataPath]], **options: float) -> None:
        self.bytes: Bytes = np.full(NBYTES, GUARD, dtype=np.uint8)
        memory = PrivateMemory.of(self.bytes)
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.mover = Mover(1, memory, paths(memory), self.reports.put, **options)
        self.mover.start()

    def next(self, kind: type[Kind]) -> Kind:
        report = self.reports.get(timeout=DEADLINE_S)
        assert isinstance(report, kind), report
        return report

    def connect(self, peer: str, endpoint: RankEndpoint) -> Connected:
        self.mover.connect(peer, endpoint, BEST_FIRST)
        return self.next(Connected)


@pytest.fixture
def source() -> Iterator[LoopbackPath]:
    """A peer named "source" in this process, full of known bytes."""
    path = LoopbackPath(PrivateMemory.of(content(1, NBYTES)), "source")
    yield path
    path.close()


AT_SOURCE = RankEndpoint(0, loopback=LoopbackEndpoint("source", NBYTES))


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def rank(source: LoopbackPath, faults: Faults) -> Iterator[Rank]:
    rank = Rank(lambda memory: [LoopbackPath(memory, "own", faults)])
    yield rank
    assert rank.mover.close(0.0)


@pytest.fixture
def linked(rank: Rank) -> Rank:
    rank.connect("p", AT_SOURCE)
    return rank


WHOLE = runs_of((0, 0, NBYTES))


def test_a_posting_moves_its_bytes_and_says_how_many_and_how_long(linked: Rank) -> None:
    linked.mover.post("a", "p", runs_of((10, 20, 1000), (5000, 6000, 24)))
    ended = linked.next(PostingEnded)
    assert (ended.posting, ended.state, ended.nbytes, ended.error) == ("a", DONE, 1024, "")
    assert ended.quiesced
    assert 0 < ended.wire_s < DEADLINE_S
    assert np.array_equal(linked.bytes[20:1020], content(1, NBYTES)[10:1010])
    assert int((linked.bytes != GUARD).sum()) <= 1024


def test_a_posting_without_runs_ends_done(linked: Rank) -> None:
    linked.mover.post("a", "p", runs_of())
    assert linked.next(PostingEnded).state is DONE


def test_reports_come_in_order_of_postings_that_run_one_after_the_other(linked: Rank) -> None:
    for i in range(200):
        linked.mover.post(f"{i}", "p", runs_of((i, i, 100)))
    assert [linked.next(PostingEnded).posting for _ in range(200)] == [f"{i}" for i in range(200)]


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
    mover.post("a", "p", WHOLE)
    assert mover.close(DEADLINE_S)
    assert threads == {"kvgrpc-mover-3"}


def test_calls_return_at_once_while_the_data_path_is_held(linked: Rank, faults: Faults) -> None:
    faults.begin = threading.Event()
    began = time.monotonic()
    for i in range(100):
        linked.mover.post(f"{i}", "p", runs_of((0, i, 1)))
        linked.mover.expect(f"{i}")
        linked.mover.unexpect(f"{i}")
    linked.mover.disconnect("p")
    assert time.monotonic() - began < 1.0
    assert linked.reports.empty()
    faults.begin.set()
    assert {linked.next(PostingEnded).state for _ in range(100)} == {DONE}
    assert linked.next(Disconnected) == Disconnected("p")


def test_a_run_out_of_range_fails_the_posting_and_touches_nothing(linked: Rank) -> None:
    for bad in ((NBYTES, 0, 1), (0, NBYTES, 1), (-1, 0, 1), (0, 0, -1)):
        linked.mover.post("a", "p", runs_of((0, 0, 4096), bad))
        ended = linked.next(PostingEnded)
        assert (ended.state, ended.nbytes, ended.wire_s) == (FAILED, 0, 0.0)
        assert ended.error
        assert ended.quiesced
    assert (linked.bytes == GUARD).all()


def test_a_posting_to_a_peer_that_is_not_connected_fails(rank: Rank) -> None:
    rank.mover.post("a", "nobody", WHOLE)
    assert rank.next(PostingEnded) == PostingEnded(
        "a", FAILED, 0, 0.0, "the peer nobody is not connected"
    )


def test_a_posting_that_breaks_on_the_way_fails_and_the_next_one_works(
    linked: Rank, faults: Faults
) -> None:
    faults.fail_after_bytes = 1
    linked.mover.post("a", "p", WHOLE)
    ended = linked.next(PostingEnded)
    assert (ended.state, ended.nbytes, ended.quiesced) == (FAILED, 0, True)
    assert "told to fail" in ended.error
    faults.fail_after_bytes = None
    faults.fail_read = "told to refuse"
    linked.mover.post("a", "p", WHOLE)
    assert linked.next(PostingEnded).error == "told to refuse"
    faults.fail_read = ""
    linked.mover.post("a", "p", WHOLE)
    assert linked.next(PostingEnded).state is DONE


def test_a_name_is_free_again_when_its_end_is_reported_and_not_before(
    linked: Rank, faults: Faults
) -> None:
    faults.end = threading.Event()
    linked.mover.post("a", "p", WHOLE)
    with pytest.raises(AlreadyExists):
        linked.mover.post("a", "p", WHOLE)
    faults.end.set()
    assert linked.next(PostingEnded).state is DONE
    linked.mover.post("a", "p", WHOLE)
    assert linked.next(PostingEnded).state is DONE


def test_a_disconnect_waits_for_the_last_posting(linked: Rank, faults: Faults) -> None:
    faults.end = threading.Event()
    linked.mover.post("a", "p", WHOLE)
    linked.mover.disconnect("p")
    linked.mover.post("b", "p", WHOLE)  # the name means nobody any more
    refused = linked.next(PostingEnded)
    assert (refused.posting, refused.state) == ("b", FAILED)
    faults.end.set()
    assert linked.next(PostingEnded).posting == "a"
    assert linked.next(Disconnected) == Disconnected("p")


def test_a_peer_is_connected_again_while_its_old_link_still_moves(
    linked: Rank, faults: Faults
) -> None:
    faults.end = threading.Event()
    linked.mover.post("old", "p", WHOLE)
    linked.mover.disconnect("p")
    assert linked.connect("p", AT_SOURCE).path == "loopback"
    linked.mover.post("new", "p", WHOLE)
    faults.end.set()
    assert linked.next(PostingEnded).posting == "old"
    assert linked.next(Disconnected).peer == "p"
    assert linked.next(PostingEnded).posting == "new"


def test_every_disconnect_is_answered(rank: Rank) -> None:
    rank.mover.disconnect("nobody")
    assert rank.next(Disconnected) == Disconnected("nobody")


def test_a_connected_peer_is_not_connected_twice(linked: Rank) -> None:
    linked.mover.connect("p", AT_SOURCE, ["loopback"])
    ((path, reason),) = linked.next(ConnectFailed).rejected
    assert path == "loopback"
    assert "disconnect it first" in reason
    linked.mover.post("a", "p", WHOLE)
    assert linked.next(PostingEnded).state is DONE


def test_paths_are_tried_in_the_order_allowed_and_refusals_are_told() -> None:
    """shm and cma both reach the pool; what is allowed first wins."""
    pool = SharedMemory.create(NBYTES)
    pool.as_numpy()[:] = content(4, NBYTES)
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    owner = Mover(0, pool, [ShmPath(pool), CmaPath(pool)], reports.put)
    owner.start()
    owner.offer("k")
    offered = reports.get(timeout=DEADLINE_S)
    assert isinstance(offered, Offered)
    assert (offered.key, offered.endpoint.rank, offered.left_out) == ("k", 0, ())
    reader = Rank(lambda memory: [ShmPath(memory), CmaPath(memory)])
    first = reader.connect("best", offered.endpoint)
    assert (first.path, first.rejected) == ("shm", ())
    assert "mapped" in first.why
    again = reader.connect("token used", offered.endpoint)
    assert again.path == "cma"
    assert [path for path, _ in again.rejected] == ["shm"]
    assert "used" in again.rejected[0][1]
    reader.mover.connect("other order", offered.endpoint, ["nixl", "cma", "shm"])
    other = reader.next(Connected)
    assert other.path == "cma"
    assert other.rejected == (("nixl", "this rank has no such data path"),)
    for peer in ("best", "token used", "other order"):
        reader.bytes[:] = GUARD
        reader.mover.post(peer, peer, WHOLE)
        assert reader.next(PostingEnded).state is DONE
        assert np.array_equal(reader.bytes, content(4, NBYTES))
    reader.mover.connect("nothing allowed", offered.endpoint, [])
    assert reader.next(ConnectFailed) == ConnectFailed("nothing allowed", ())
    reader.mover.connect("nowhere", RankEndpoint(0), ["shm", "cma"])
    assert [path for path, _ in reader.next(ConnectFailed).rejected] == ["shm", "cma"]
    assert reader.mover.close(1.0)
    assert owner.close(1.0)
    pool.close()


def test_an_offer_names_what_it_leaves_out() -> None:
    rank = Rank(lambda memory: [ShmPath(memory), LoopbackPath(memory, "own")])
    rank.mover.offer("k")
    offered = rank.next(Offered)
    assert offered.endpoint == RankEndpoint(1, loopback=LoopbackEndpoint("own", NBYTES))
    ((path, reason),) = offered.left_out
    assert path == "shm"
    assert "pool" in reason
    assert rank.mover.close(0.0)


class Held:
    """Somebody else's data path, of which a test decides what it does. Needs polling."""

    name = "held"
    needs_polling = True

    def __init__(self, waits: bool = False) -> None:
        self.connect_waits = waits
        self.release = threading.Event()
        self.state = PENDING
        self.turns = 0
        self.looks = 0
        self.wakes: list[Callable[[], None]] = []
        self.break_at = ""
        self.closed = self.remote_closed = False

    def step(self, name: str) -> None:
        if self.break_at == name:
            raise RuntimeError(f"{name} is broken")

    def offer(self, endpoint: RankEndpoint) -> RankEndpoint:
        self.step("offer")
        return endpoint

    def connect(self, endpoint: RankEndpoint) -> Remote:
        self.step("connect")
        if self.connect_waits:
            self.release.wait(DEADLINE_S)
        return HeldRemote(self)

    def progress(self) -> None:
        self.turns += 1
        self.step("progress")

    def close(self) -> None:
        self.step("close")
        self.closed = True


class HeldRemote:
    why = "held by the test"

    def __init__(self, path: Held) -> None:
        self.path = path

    def read(self, runs: Runs, wake: Callable[[], None]) -> Posting:
        self.path.step("read")
        self.path.wakes.append(wake)
        return HeldPosting(self.path)

    def close(self) -> None:
        self.path.step("remote close")
        self.path.remote_closed = True


class HeldPosting:
    error = "failed as told"

    def __init__(self, path: Held) -> None:
        self.path = path

    def poll(self) -> PostingState:
        self.path.looks += 1
        self.path.step("poll")
        return self.path.state


def with_held(held: Held) -> Rank:
    return Rank(lambda memory: [held, LoopbackPath(memory, "own")])


def held_rank(held: Held) -> Rank:
    rank = with_held(held)
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    rank.next(Connected)
    return rank


def test_a_connect_that_waits_for_its_peer_keeps_no_posting_waiting(source: LoopbackPath) -> None:
    held = Held(waits=True)
    rank = with_held(held)
    rank.mover.connect("slow", AT_SOURCE, ["held", "loopback"])
    rank.connect("p", AT_SOURCE)
    rank.mover.post("a", "p", WHOLE)
    assert rank.next(PostingEnded).state is DONE
    held.release.set()
    assert rank.next(Connected).peer == "slow"
    assert rank.mover.close(0.0)


def test_a_disconnect_cancels_a_connect_that_still_waits(source: LoopbackPath) -> None:
    held = Held(waits=True)
    rank = with_held(held)
    rank.mover.connect("slow", AT_SOURCE, ["held", "loopback"])
    rank.mover.disconnect("slow")
    assert rank.next(ConnectFailed).peer == "slow"
    assert rank.next(Disconnected).peer == "slow"
    held.release.set()
    assert rank.mover.close(DEADLINE_S)
    assert rank.reports.empty()


@pytest.mark.parametrize("step", ["offer", "connect", "read", "poll", "progress", "remote close"])
def test_an_exception_in_a_data_path_never_stops_the_others(
    source: LoopbackPath, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()
    rank = held_rank(held)
    rank.connect("p", AT_SOURCE)
    held.break_at = step
    rank.mover.offer("k")
    assert (rank.next(Offered).left_out != ()) == (step == "offer")
    rank.mover.connect("h2", AT_SOURCE, ["held", "loopback"])
    assert (rank.next(Connected).path == "loopback") == (step == "connect")
    rank.mover.post("bad", "h", WHOLE)
    if step in {"read", "poll"}:
        ended = rank.next(PostingEnded)
        assert (ended.posting, ended.state, ended.quiesced) == ("bad", FAILED, False)
        assert "is broken" in ended.error
    rank.mover.post("good", "p", WHOLE)
    assert rank.next(PostingEnded) == replace(rank_done(), wire_s=pytest.approx(0, abs=DEADLINE_S))
    if step not in {"read", "poll"}:
        held.state = DONE
        assert rank.next(PostingEnded).state is DONE
    rank.mover.disconnect("h")
    disconnected = rank.next(Disconnected)
    assert (disconnected.error != "") == (step in {"read", "poll", "remote close"})
    assert held.remote_closed == (disconnected.error == "")
    held.break_at = ""
    assert rank.mover.close(0.0)
    assert "is broken" in caplog.text


def rank_done() -> PostingEnded:
    return PostingEnded("good", DONE, NBYTES, 0.0, "")


def test_an_owner_that_cannot_take_a_report_does_not_stop_the_mover(
    source: LoopbackPath, caplog: pytest.LogCaptureFixture
) -> None:
    seen: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def report(report: Report) -> None:
        seen.put(report)
        raise ValueError("the owner's own mistake")

    memory = PrivateMemory.of(bytearray(NBYTES))
    mover = Mover(0, memory, [LoopbackPath(memory, "own")], report)
    mover.start()
    mover.connect("p", AT_SOURCE, ["loopback"])
    mover.post("a", "p", WHOLE)
    assert isinstance(seen.get(timeout=DEADLINE_S), Connected)
    assert isinstance(seen.get(timeout=DEADLINE_S), PostingEnded)
    assert mover.close(0.0)
    assert "own mistake" in caplog.text


def test_a_failure_that_the_library_reports_is_passed_on() -> None:
    held = Held()
    rank = held_rank(held)
    rank.mover.post("a", "h", WHOLE)
    held.state = FAILED
    ended = rank.next(PostingEnded)
    assert (ended.state, ended.error, ended.quiesced) == (FAILED, "failed as told", True)
    assert rank.mover.close(0.0)


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread; fails when it does not happen."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.001)


def cpu_s(mover: Mover) -> float:
    assert mover._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(mover._thread.ident))


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
    rank.mover.offer("everything before is done")
    rank.next(Offered)
    turns = held.turns
    threading.Event().wait(0.05)
    assert held.turns == turns
    assert rank.mover.close(0.0)


def test_a_posting_that_is_polled_gets_turns_until_it_ends() -> None:
    held = Held()
    rank = held_rank(held)
    rank.mover.post("a", "h", WHOLE)
    until(lambda: held.turns > 10 and held.looks > 10)
    held.state = DONE
    assert rank.next(PostingEnded).state is DONE
    assert rank.mover.close(0.0)


def test_an_idle_mover_costs_nothing(linked: Rank) -> None:
    linked.mover.post("a", "p", WHOLE)
    linked.next(PostingEnded)
    before = cpu_s(linked.mover)
    threading.Event().wait(0.3)
    assert cpu_s(linked.mover) - before < 0.003


def test_waiting_for_a_polled_posting_leaves_most_of_a_core_to_others() -> None:
    held = Held()
    rank = held_rank(held)
    rank.mover.post("a", "h", WHOLE)
    until(lambda: held.turns > 10)
    before, began = cpu_s(rank.mover), time.monotonic()
    threading.Event().wait(0.5)
    assert (cpu_s(rank.mover) - before) / (time.monotonic() - began) < 0.3
    assert rank.mover.close(0.0)


def test_progress_age_is_zero_when_idle_and_grows_while_a_posting_is_stuck(
    linked: Rank, faults: Faults
) -> None:
    assert linked.mover.progress_age_s() == 0.0
    faults.end = threading.Event()
    linked.mover.post("a", "p", WHOLE)
    until(lambda: linked.mover.progress_age_s() > 0.05)
    faults.end.set()
    linked.next(PostingEnded)
    until(lambda: linked.mover.progress_age_s() == 0.0)


def test_progress_age_grows_while_a_library_does_not_return() -> None:
    held = Held(waits=True)
    held.connect_waits = True
    rank = with_held(held)
    held.connect_waits = False
    held.connect = lambda endpoint: held.release.wait(DEADLINE_S) and HeldRemote(held)  # type: ignore
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    until(lambda: rank.mover.progress_age_s() > 0.05)
    held.release.set()
    rank.next(Connected)
    assert rank.mover.close(0.0)


def test_a_bandwidth_limit_is_not_exceeded(source: LoopbackPath) -> None:
    limit = 8 * NBYTES
    rank = Rank(lambda m: [LoopbackPath(m, "own")], bandwidth_limit_bytes_per_s=limit)
    rank.connect("p", AT_SOURCE)
    began = time.monotonic()
    rank.mover.post("a", "p", WHOLE)
    rank.mover.post("b", "p", runs_of(*((i * 4096, i * 4096, 4096) for i in range(256))))
    assert {rank.next(PostingEnded).posting for _ in range(2)} == {"a", "b"}
    elapsed = time.monotonic() - began
    assert 2 * NBYTES / elapsed <= limit
    assert np.array_equal(rank.bytes, content(1, NBYTES))
    assert rank.mover.close(0.0)


def test_postings_share_a_bandwidth_limit_so_that_a_short_one_passes_a_long_one(
    source: LoopbackPath,
) -> None:
    rank = Rank(lambda m: [LoopbackPath(m, "own")], bandwidth_limit_bytes_per_s=4 * NBYTES)
    rank.connect("p", AT_SOURCE)
    rank.mover.post("long", "p", WHOLE)
    rank.mover.post("short", "p", runs_of((0, 0, 4096)))
    assert [rank.next(PostingEnded).posting for _ in range(2)] == ["short", "long"]
    assert rank.mover.close(0.0)


def test_under_a_limit_all_runs_are_checked_before_the_first_byte(source: LoopbackPath) -> None:
    rank = Rank(lambda m: [LoopbackPath(m, "own")], bandwidth_limit_bytes_per_s=1e9)
    rank.connect("p", AT_SOURCE)
    for bad in ((NBYTES, 0, 1), (0, NBYTES, 1)):
        rank.mover.post("a", "p", runs_of((0, 0, NBYTES), bad))
        assert rank.next(PostingEnded).state is FAILED
    rank.mover.post("a", "p", runs_of())
    assert rank.next(PostingEnded).state is DONE
    assert (rank.bytes == GUARD).all()
    assert rank.mover.close(0.0)


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_bandwidth_limit_that_moves_nothing_is_refused(limit: float) -> None:
    memory = PrivateMemory.of(bytearray(64))
    with pytest.raises(InvalidRequest):
        Mover(0, memory, [], print, bandwidth_limit_bytes_per_s=limit)


def test_close_lets_postings_end_within_its_deadline(linked: Rank) -> None:
    for i in range(20):
        linked.mover.post(f"{i}", "p", WHOLE)
    assert linked.mover.close(DEADLINE_S)
    assert [linked.next(PostingEnded).state for _ in range(20)] == [DONE] * 20


def test_close_cuts_postings_short_at_its_deadline_and_reports_each(
    linked: Rank, faults: Faults
) -> None:
    faults.end = threading.Event()
    linked.mover.post("a", "p", WHOLE)
    linked.mover.post("b", "p", WHOLE)
    linked.mover.disconnect("p")
    assert linked.mover.close(0.01)
    ended = [linked.next(PostingEnded) for _ in range(2)]
    assert [e.posting for e in ended] == ["a", "b"]
    assert [(e.state, e.quiesced) for e in ended] == [(FAILED, True)] * 2
    assert linked.next(Disconnected) == Disconnected("p")


def test_close_says_what_is_not_proved_when_a_path_does_not_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = Held()
    rank = held_rank(held)
    rank.mover.post("a", "h", WHOLE)
    rank.mover.disconnect("h")
    held.break_at = "close"
    assert rank.mover.close(0.01)
    ended = rank.next(PostingEnded)
    assert (ended.state, ended.quiesced) == (FAILED, False)
    assert "close is broken" in rank.next(Disconnected).error
    assert not held.remote_closed
    assert "close is broken" in caplog.text


def test_a_path_is_closed_after_its_links() -> None:
    order = []
    held = Held()
    rank = held_rank(held)
    held.step = order.append  # type: ignore[method-assign,assignment]
    assert rank.mover.close(0.0)
    assert order == ["remote close", "close"]


def test_close_ends_a_connect_that_still_waits() -> None:
    held = Held(waits=True)
    rank = with_held(held)
    rank.mover.connect("slow", RankEndpoint(0), ["held", "loopback"])
    assert rank.mover.close(0.0)
    assert rank.next(ConnectFailed).peer == "slow"
    held.release.set()


def test_close_returns_though_a_library_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgrpc.datapath.mover._STUCK_S", 0.05)
    release = threading.Event()
    held = Held()
    rank = with_held(held)
    held.close = release.wait  # type: ignore[method-assign,assignment]
    assert not rank.mover.close(0.0)
    release.set()
    assert rank.mover.close(DEADLINE_S)


def test_close_is_idempotent_and_later_calls_are_refused(linked: Rank) -> None:
    assert linked.mover.close(0.0)
    assert linked.mover.close(0.0)
    for call in (
        lambda: linked.mover.post("a", "p", WHOLE),
        lambda: linked.mover.connect("p", AT_SOURCE, ["loopback"]),
        lambda: linked.mover.offer("k"),
        lambda: linked.mover.disconnect("p"),
        lambda: linked.mover.expect("a"),
    ):
        with pytest.raises(Unavailable):
            call()


def test_a_mover_that_was_never_started_closes_its_paths() -> None:
    held = Held()
    memory = PrivateMemory.of(bytearray(64))
    assert Mover(0, memory, [held], print).close(0.0)
    assert held.closed


FORGETS_TO_CLOSE = """
import sys, threading
import numpy as np
from kvgrpc.core.descriptors import Runs
from kvgrpc.core.endpoints import RankEndpoint
from kvgrpc.datapath.loopback import LoopbackPath
from kvgrpc.datapath.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.shm import ShmPath

SIZE = 64 << 20
pool, own = SharedMemory.create(SIZE), PrivateMemory.of(bytearray(SIZE))
source, path = ShmPath(pool), ShmPath(own)
connected = threading.Event()
mover = Mover(0, own, [path], lambda report: connected.set())
mover.start()
mover.connect("p", source.offer(RankEndpoint(0)), ["shm"])
connected.wait(20)
whole = Runs(np.array([0]), np.array([0]), np.array([SIZE]))
for i in range(200):
    mover.post(str(i), "p", whole)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_a_program_that_ends_while_bytes_move_ends_cleanly(end: str, code: int) -> None:
    script = FORGETS_TO_CLOSE.format(end=end)
    child = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    assert child.returncode == code, child.stderr
    assert "Fatal" not in child.stderr
