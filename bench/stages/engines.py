"""Two engines in this process, each attached to a server of its own: a push as schedulers see it, over sessions."""

import contextlib
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

import numpy as np

from bench.plan import BLOCK_TOKENS, environment_of, path_of
from bench.stages.memory import fill, lists
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.engine import BlocksReturned, Content, Engine, Failed, LayersReceived, Rank, Received, Reserved, content
from kvgrpc.engine.transfers.events import Event
from kvgrpc.engine.transfers.pushes import Push
from kvgrpc.errors import InternalError, Reason

_EVENT_S = 60.0
"""Timeout for an event, in seconds: longer than any push of a run takes."""
_E = TypeVar("_E", bound=Event)


class Engines:
    """Both engines. Use it as a context manager."""

    def __init__(self, data_path: str, pool: PoolLayout, copy_threads: int) -> None:
        """Starts two servers that move over one data path."""
        self._pool = pool
        self._ends = contextlib.ExitStack()
        flags = ["--data-paths", path_of(data_path), "--copy-threads", str(copy_threads)]
        with environment(environment_of(data_path)):
            self.source, self.destination = (
                self._ends.enter_context(Engine.launch(flags=flags, pool=pool, weights_revision="bench"))
                for _ in range(2)
            )
        source, destination = (
            self._ends.enter_context(Rank(engine.ticket)) for engine in (self.source, self.destination)
        )
        self._memory = source.memory, destination.memory
        self.layers_seen = 0
        """Number of layers of the last push that the destination's engine was told of, before the push ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def register(self, blocks: Ids) -> Push:
        """Returns the source's side of a push that both servers know."""
        key, of = secrets.token_bytes(16), self._content(blocks)
        reservation = self.destination.reserve(lists(blocks), of, transfer_key=key)
        next_event(self.destination, Reserved)
        push = self.source.push(of, transfer_key=key)
        push.register(reservation.grant)
        self.source.flush()
        deadline = time.monotonic() + _EVENT_S
        answered = _waiting_for(self.source)
        while not push.transfer_id and time.monotonic() < deadline:
            # The answer is no event, so the engine's own `poll` would go on waiting.
            answered.poll(_EVENT_S * 1e3)
            _check(self.source.poll())
        self.layers_seen = 0
        return push

    def finish(self, push: Push, blocks: Ids, layers: tuple[int, int] | None = None, *, last: bool = True) -> None:
        """Hands a part over, without waiting for an answer."""
        push.finished(lists(blocks), layers=layers, last=last)
        self.source.flush()

    def received(self) -> float:
        """Returns when the destination's engine got Received, once the source has its blocks again.

        Raises InternalError if the push failed.
        """
        next_event(self.destination, Received, self._note)
        woken = time.monotonic()
        next_event(self.source, BlocksReturned)
        return woken

    def processor_s(self) -> tuple[float, float]:
        """Returns the processor time of the two servers so far, in seconds."""
        source, destination = (_process_s(engine.lead_pid) for engine in (self.source, self.destination))
        return source, destination

    def run_until(self, when: float) -> None:
        """Lets both engines take in their events until `when`."""
        engines = {engine.fileno(): engine for engine in (self.source, self.destination)}
        told = _waiting_for(*engines.values())
        while (left_s := when - time.monotonic()) > 0:
            for ready, _ in told.poll(left_s * 1e3):
                self._note(_check(engines[ready].poll()))

    def fill(self) -> None:
        """Gives every eight bytes of the source a distinct value, and clears the destination."""
        source, destination = self._memory
        fill(source)
        destination[:] = 0

    def check(self, source: Ids, destination: Ids) -> None:
        """Raises InternalError unless the destination's blocks equal those of the source, in every layer."""
        for region in self._pool.regions:
            nbytes = region.stride_bytes * self._pool.groups[region.group].blocks
            rows = (memory[region.offset :][:nbytes].reshape(-1, region.stride_bytes) for memory in self._memory)
            here, there = rows
            if not np.array_equal(here[source], there[destination]):
                raise InternalError(Reason.INTERNAL, f"layer {region.first_layer} has other bytes than were to move")

    def _content(self, blocks: Ids) -> Content:
        return content(opaque_id=b"python -m bench", tokens=len(blocks) * BLOCK_TOKENS)

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, LayersReceived):
                self.layers_seen = sum(count for _, count in event.layers_done)


def next_event(engine: Engine, kind: type[_E], hear: Callable[[list[Event]], None] = lambda _: None) -> _E:
    """Returns the next event of that kind; `hear` gets all events until then. Raises InternalError for a failure, or if
    no such event comes.
    """
    deadline = time.monotonic() + _EVENT_S
    while time.monotonic() < deadline:
        found = None
        events = _check(engine.poll(_EVENT_S))
        hear(events)
        for event in events:
            found = event if isinstance(event, kind) else found
        if found is not None:
            return found
    raise InternalError(Reason.INTERNAL, f"no {kind.__name__} within {_EVENT_S:g} s")


def _waiting_for(*engines: Engine) -> select.poll:
    """Returns a poll that waits for news of any of the engines. select would take no descriptor beyond 1,023."""
    found = select.poll()
    for engine in engines:
        found.register(engine, select.POLLIN)
    return found


def _check(events: list[Event]) -> list[Event]:
    """Returns the events. Raises InternalError if there is a failure among them."""
    for event in events:
        if isinstance(event, Failed):
            raise InternalError(Reason.INTERNAL, f"a push failed: {event.message}")
    return events


def _process_s(pid: int) -> float:
    """Returns the processor time of a process, in seconds.

    The expression is Linux's clock id of another process, as in clock_getcpuclockid(3), which Python lacks.
    """
    return time.clock_gettime(~pid << 3 | 2)


@contextlib.contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Changes the environment in which children of this process are started."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
