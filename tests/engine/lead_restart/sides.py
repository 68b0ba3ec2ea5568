"""An engine with one rank and a lead of its own, and helpers that kill the lead and check the engine's events."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout
from kvgrpc.engine import BlocksReturned, Engine, Event, Failed, Push, Rank, Received, Reservation, Reserved, content
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.errors import Reason
from tests.engine.support import WAIT_S, ended, new_key, tokens
from tests.service.engines import READY_S, wait_until

LAYERS, BLOCKS, LAYER_BYTES = 2, 128, 1 << 19
"""Shape of the pool. Each block has 1 MiB, so that a transfer of all blocks can be killed in its middle."""
LAYOUT = uniform_layout(Group("full", GroupKind.FULL_ATTENTION, LAYERS, 16, BLOCKS, 64, 128, "float16"), LAYER_BYTES)
PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
CACHED = [100, 101, 127]
SLOW_BYTES_PER_S = 4e6
SLOW = ("--bandwidth-limit-bytes-per-s", str(SLOW_BYTES_PER_S))
MODES = ("shm", "cma", "nixl")
Sides = Callable[..., "Side"]
"""Returns the engine that was launched with these arguments, and launches it at first use."""


def slow(mode: str) -> Any:
    """Returns a parameter for a mode that runs with the slow tests only."""
    return pytest.param(mode, marks=pytest.mark.slow)


class Side:
    """An engine with one rank, and its view of the pool, shape [layers, blocks, bytes]."""

    def __init__(self, engine: Engine, rank: Rank, view: NDArray[np.uint8]) -> None:
        self.engine, self.rank, self.view = engine, rank, view

    def fill(self, blocks: Sequence[int], seed: int) -> NDArray[np.uint8]:
        made = np.random.default_rng(seed).integers(0, 256, (LAYERS, len(blocks), LAYER_BYTES), dtype=np.uint8)
        self.view[:, list(blocks)] = made
        return made

    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self.view[:, list(blocks)].copy()

    def until(self, done: Callable[[list[Event]], bool], timeout_s: float = WAIT_S) -> list[Event]:
        events: list[Event] = []

        def look() -> bool:
            events.extend(self.engine.poll(0.05))
            return done(events)

        wait_until(look, timeout_s, lambda: events)
        return events

    def until_it_lives_after(self, incarnation: int) -> list[Event]:
        """Polls until the engine begins its next life, for which a lead process starts."""
        return self.until(lambda _: self.engine.incarnation != incarnation, READY_S)

    def close(self) -> None:
        self.engine.close()
        self.rank.close()


def shared(engine: Engine) -> Side:
    rank = Rank(engine.ticket)
    return Side(engine, rank, rank.memory.reshape(LAYERS, BLOCKS, LAYER_BYTES))


def launched(mode: str, *flags: str, private: bool | None = None, relaunches: int = 100) -> Side:
    """Launches an engine with a lead of its own and one data path. Memory is shared for shm, else private."""
    flags = ("--data-paths", mode, *flags)
    private = mode != "shm" if private is None else private
    engine = Engine.launch(pool=LAYOUT, private_memory=private, flags=flags, relaunches=relaunches)
    if not private:
        return shared(engine)
    view = np.zeros((LAYERS, BLOCKS, LAYER_BYTES), dtype=np.uint8)
    limit = SLOW_BYTES_PER_S if SLOW[0] in flags else None
    rank = Rank(engine.ticket, 0, list(view), data_paths=(mode,), bandwidth_limit_bytes_per_s=limit)
    return Side(engine, rank, view)


def kill(side: Side) -> None:
    """Kills the lead with SIGKILL and waits for its end."""
    assert side.engine._lead is not None
    pidfd = os.pidfd_open(side.engine._lead.pid)
    os.kill(side.engine._lead.pid, signal.SIGKILL)
    assert ended(pidfd)
    os.close(pidfd)


def replaced(side: Side, *handles: Handle) -> list[Event]:
    """Kills the lead and returns the events up to the engine's next life. Each handle is over by then: it has one
    Failed followed by one BlocksReturned.
    """
    before = side.engine.incarnation
    kill(side)
    events = side.until_it_lives_after(before)
    check_ends(events, handles)
    return events


def poll_on(engine: Engine, events: list[Event]) -> None:
    """Polls until poll raises."""
    while True:
        events += engine.poll(WAIT_S)


def check_ends(events: Sequence[Event], handles: Sequence[Handle]) -> None:
    """Checks that each handle has one Failed, then one BlocksReturned, and that no other handle has an event."""
    for handle in handles:
        assert handle.over
        told = [event for event in events if event.transfer is handle]
        failed, returned = (event for event in told if isinstance(event, Failed | BlocksReturned | Received))
        assert isinstance(failed, Failed), told
        assert failed.reason is Reason.ENGINE_LOST
        assert isinstance(returned, BlocksReturned), told
    known = {id(handle) for handle in handles}
    assert [event for event in events if id(event.transfer) not in known] == []


def move(source: Side, destination: Side, blocks: Sequence[int], into: Sequence[int]) -> None:
    """Pulls blocks until both sides are over, and checks that the bytes are exact."""
    handover = source.engine.finished_blocks(blocks, content(PROMPT), transfer_key=new_key())
    source.engine.flush()
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(into)
    events = destination.until(lambda _: pull.over)
    assert isinstance(events[-1], Received), events
    source.until(lambda _: handover.over)
    assert np.array_equal(destination.read(into), source.read(blocks))


def check_serves(side: Side, peer: Side) -> None:
    """Checks that the engine serves and pulls in its new life."""
    side.fill([40, 41, 42], seed=40)
    move(side, peer, [40, 41, 42], [40, 41, 42])
    peer.fill([50, 51, 52], seed=50)
    move(peer, side, [50, 51, 52], [50, 51, 52])


def begun(source: Side, destination: Side, blocks: list[int], prompt: list[int]) -> tuple[Push, Reservation]:
    """Returns both ends of a push into these blocks, after registering its destination."""
    key = new_key()
    target = destination.engine.reserve(blocks, content(prompt), transfer_key=key)
    destination.until(lambda events: Reserved(target) in events)
    push = source.engine.push(content(prompt), transfer_key=key)
    push.register(target.grant)
    return push, target
