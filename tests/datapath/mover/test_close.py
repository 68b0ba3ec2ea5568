"""A mover ends by `close`, in order and in time, or when a program forgets to close it."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest

from kvgrpc.core.events import PostingEnded
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Disconnected
from kvgrpc.errors import Unavailable
from tests.datapath.loopback import Faults
from tests.datapath.movers import AT_SOURCE, WHOLE, Held, Rank, held_rank, until, with_held
from tests.datapath.peers import DEADLINE_S

DONE, FAILED = PostingState.DONE, PostingState.FAILED


def test_close_lets_postings_end_within_its_deadline(linked: Rank) -> None:
    for i in range(20):
        linked.post(f"{i}", "p", WHOLE)
    assert linked.mover.close(DEADLINE_S)
    assert all(linked.next(PostingEnded).done for _ in range(20))


def test_close_cuts_postings_short_at_its_deadline_and_reports_each(linked: Rank, faults: Faults) -> None:
    faults.end = threading.Event()
    linked.post("a", "p", WHOLE)
    linked.post("b", "p", WHOLE)
    linked.mover.disconnect("p")
    assert linked.mover.close(0.01)
    ended = [linked.next(PostingEnded) for _ in range(2)]
    assert [e.posting_id for e in ended] == ["a", "b"]
    assert [(e.done, e.quiesced) for e in ended] == [(False, True)] * 2
    assert linked.next(Disconnected) == Disconnected("p", peer_rank=0)


def test_close_says_what_is_not_proved_when_a_path_does_not_close(caplog: pytest.LogCaptureFixture) -> None:
    held = Held()
    rank = held_rank(held)
    rank.post("a", "h", WHOLE)
    rank.mover.disconnect("h")
    held.break_at = "close"
    assert not rank.mover.close(0.01)
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.quiesced) == (False, False)
    assert "close is broken" in rank.next(Disconnected).error
    assert not held.remote_closed
    assert "close is broken" in caplog.text


def test_a_path_is_closed_after_its_links() -> None:
    order: list[str] = []
    held = Held()
    rank = held_rank(held)
    held.step = order.append  # type: ignore[method-assign,assignment]
    assert rank.mover.close(0.0)
    assert order == ["remote close", "close"]


def test_an_answer_after_close_connects_no_peer() -> None:
    held = Held(waits=True)
    rank = with_held(held)
    rank.mover.connect("h", RankEndpoint(0), ("held",))
    until(lambda: held.asked)
    assert rank.mover.close(0.0)
    rank.not_mapped()
    assert held.closed
    assert not held.connected


def test_close_ends_a_connect_that_still_waits() -> None:
    held = Held(waits=True)
    rank = with_held(held)
    rank.mover.connect("slow", RankEndpoint(0), ["held", "loopback"])
    assert rank.mover.close(0.0)
    assert rank.not_mapped().peer == "slow"


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
    calls: list[Callable[[], object]] = [
        partial(linked.post, "a", "p", WHOLE),
        partial(linked.mover.connect, "p", AT_SOURCE, ["loopback"]),
        partial(linked.mover.offer, "k"),
        partial(linked.mover.disconnect, "p"),
        partial(linked.mover.expect, "a"),
        partial(linked.mover.unexpect, "a"),
    ]
    for call in calls:
        with pytest.raises(Unavailable):
            call()


def test_a_mover_that_was_never_started_closes_its_paths() -> None:
    held = Held()
    memory = PrivateMemory.of(bytearray(64))
    assert Mover(0, memory, [held], print).close(0.0)
    assert held.closed


FORGETS_TO_CLOSE = """
import signal, sys, threading
import numpy as np
from kvgrpc.core.actions import Post
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.paths.shm import ShmPath

signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell has it ignored
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
    mover.post(Post(0, str(i), "p", whole, "t"))
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
