"""The thread of a store: it speaks to the lead, copies tensors into the store in the order in which they were put, and
has any number of calls under way.

A job is a generator. It yields a call, to go on with its answer, or a number of seconds, to go on when another job has
ended or they are over; what it returns, or raises, is its caller's.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.engine.engine import Engine
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Reason, Unavailable
from kvgrpc.session.v1 import session_pb2

_log = logging.getLogger(__name__)
Call = dict[str, Any]
"""One field of a session's Call, by its name."""
Job = Generator[Call | float, session_pb2.CallAnswer, Any]
Begin = Callable[[], Job]


def begun() -> "Future[Any]":
    """A future that cannot be cancelled: what it stands for is under way, and its end is told in any case."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class PendingPut:
    """A tensor that is being put: `full` once it waits for room in the store of its source, `saved` when it is there,
    done when its consumers have it.
    """

    future: "Future[None]" = field(default_factory=begun)
    saved: "Future[None]" = field(default_factory=begun)
    full: "Future[None]" = field(default_factory=begun)

    def result(self, timeout_s: float | None = None) -> None:
        """Returns when the tensor is stored at its consumers, or kept for them. Raises what it was refused with, and
        DeadlineExceeded (DEADLINE) after `timeout_s`: the put goes on then.
        """
        try:
            self.future.result(timeout_s)
        except TimeoutError:
            raise too_late("the tensor is not stored yet") from None

    def done(self) -> bool:
        """Whether `result` has something to say."""
        return self.future.done()


@dataclass(eq=False)
class _Running:
    job: Job
    future: "Future[Any]"


class JobThread:
    """Runs jobs. It alone uses the engine's session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._new: deque[_Running] = deque()
        self._over: KVGrpcError | None = None
        """Why no job runs any more."""
        self._closing = False
        self._calls: dict[int, _Running] = {}
        self._paused: list[tuple[float, _Running]] = []
        self._ended = False
        """A job has, since paused ones were looked at last."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._live, name="kvgrpc-tensors", daemon=True)
        self._thread.start()

    def run(self, job: Job, future: "Future[Any] | None" = None) -> "Future[Any]":
        """Begins a job, after those that were begun before; its result comes by the future, which is one that `begun`
        makes. From any thread. Raises Unavailable when the store is closed, or its lead gone.
        """
        future = begun() if future is None else future
        with self._lock:
            if self._over is not None or self._closing:
                raise self._over or _closed()
            self._new.append(_Running(job, future))
            os.eventfd_write(self._wake, 1)
        return future

    def close(self) -> None:
        """Ends the thread; what is under way fails."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _live(self) -> None:
        error: KVGrpcError = _closed()
        try:
            while not self._closing:
                self._turn()
        except KVGrpcError as gone:
            error = gone.untraced()
        except Exception as defect:  # noqa: BLE001 - the jobs must end in any case
            _log.exception("the thread of a store failed")
            error = Unavailable(Reason.INTERNAL, f"a defect of kvgrpc: {defect!r}")
        with self._lock:
            self._over = error
            left = [*self._new, *self._calls.values(), *(running for _, running in self._paused)]
            self._new.clear()
        for running in left:
            running.job.close()
            _fail(running.future, error)

    def _turn(self) -> None:
        """Begins what is new, takes answers in, and waits for more."""
        self._engine.poll(0.0)
        answered = [id_ for id_ in self._calls if self._engine.answered(id_)]
        for call_id in answered:
            self._answer(call_id)
        now = time.monotonic()
        due = [row for row in self._paused if self._ended or row[0] <= now]
        self._ended = False
        for row in due:
            self._paused.remove(row)
            self._go_on(row[1], next)
        new = len(self._new)
        for _ in range(new):
            self._go_on(self._new.popleft(), next)
        if not (answered or due or new or self._ended):
            self._wait()

    def _wait(self) -> None:
        look = select.poll()
        look.register(self._wake, select.POLLIN)
        look.register(self._engine.fileno(), select.POLLIN)
        until = min((until for until, _ in self._paused), default=None)
        look.poll(None if until is None else max((until - time.monotonic()) * 1000, 0) + 1)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _answer(self, call_id: int) -> None:
        running = self._calls.pop(call_id)
        try:
            answer = self._engine.answer(call_id)
        except KVGrpcError as error:
            refused = error
            self._go_on(running, lambda job: job.throw(refused))
        else:
            self._go_on(running, lambda job: job.send(answer))

    def _go_on(self, running: _Running, step: Callable[[Job], Call | float]) -> None:
        try:
            wanted = step(running.job)
            if isinstance(wanted, float):
                self._paused.append((time.monotonic() + wanted, running))
            else:
                self._calls[self._engine.call(**wanted)] = running
        except StopIteration as end:
            running.future.set_result(end.value)
            self._ended = True
        except Exception as error:  # noqa: BLE001 - it is the caller's, also where what it calls cannot be said
            running.job.close()
            _fail(running.future, error)
            self._ended = True


def too_late(what: str) -> DeadlineExceeded:
    """A wait of the caller's own is over."""
    return DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "tensor"})


def _closed() -> Unavailable:
    return Unavailable(Reason.ENGINE_LOST, "the store is closed")


def _fail(future: "Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
