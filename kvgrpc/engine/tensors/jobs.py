"""The thread of a store: it speaks to the lead, and copies tensors into the store in the order of their puts. It has
any number of calls in flight.

A job is a generator. It yields a call, and goes on with the answer. Or it yields a number of seconds, and goes on when
they are over or another job has ended. The caller gets what the job returns or raises.
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
SessionCall = dict[str, Any]
"""Fields of a session's Call by their names: the request, and with some its `traceparent`."""
Job = Generator[SessionCall | float, session_pb2.CallAnswer, Any]
Begin = Callable[[], Job]


def begun() -> "Future[Any]":
    """Returns a future that cannot be cancelled: its work is in flight, and ends with a result or an error."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class PendingPut:
    """A tensor that is being put. `full` is done once it waits for room in its source's store, `saved` once it is
    copied there or never will be, and `future` once its consumers have it or the put failed.
    """

    future: "Future[None]" = field(default_factory=begun)
    saved: "Future[None]" = field(default_factory=begun)
    full: "Future[None]" = field(default_factory=begun)

    def result(self, timeout_s: float | None = None) -> None:
        """Returns when the tensor is stored at its consumers, or kept for them. Raises the error of a refused put, and
        DeadlineExceeded (DEADLINE) after `timeout_s`, though the put goes on.
        """
        try:
            self.future.result(timeout_s)
        except TimeoutError:
            raise too_late("the tensor is not stored yet") from None

    def done(self) -> bool:
        """Returns whether `result` returns or raises at once."""
        return self.future.done()


@dataclass(eq=False)
class _RunningJob:
    job: Job
    future: "Future[Any]"


class JobThread:
    """The thread that runs jobs. Nothing else uses the engine's session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._new: deque[_RunningJob] = deque()
        self._over: KVGrpcError | None = None
        """Error with which all jobs ended. None while the thread runs."""
        self._closing = False
        self._calls: dict[int, _RunningJob] = {}
        self._paused: list[tuple[float, _RunningJob]] = []
        self._ended = False
        """True if a job has ended since paused jobs were last resumed."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._live, name="kvgrpc-tensors", daemon=True)
        self._thread.start()

    def run(self, job: Job, future: "Future[Any] | None" = None) -> "Future[Any]":
        """Queues a job, from any thread. Jobs begin in the order of these calls. Returns the future of the result:
        `future`, which `begun` made, or a new one. Raises Unavailable if the store is closed or its lead is gone.
        """
        future = begun() if future is None else future
        with self._lock:
            if self._over is not None or self._closing:
                raise self._over or _closed()
            self._new.append(_RunningJob(job, future))
            os.eventfd_write(self._wake, 1)
        return future

    def close(self) -> None:
        """Ends the thread. Jobs in flight fail."""
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
        except Exception as defect:  # noqa: BLE001 - all jobs must end
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
        """Takes answers in, resumes paused jobs, and begins new ones. Waits if there was nothing to do."""
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

    def _go_on(self, running: _RunningJob, step: Callable[[Job], SessionCall | float]) -> None:
        try:
            wanted = step(running.job)
            if isinstance(wanted, float):
                self._paused.append((time.monotonic() + wanted, running))
            else:
                self._calls[self._engine.call(**wanted)] = running
        except StopIteration as end:
            running.future.set_result(end.value)
            self._ended = True
        except Exception as error:  # noqa: BLE001 - the caller gets it, also for an invalid call
            running.job.close()
            _fail(running.future, error)
            self._ended = True


def too_late(what: str) -> DeadlineExceeded:
    """Returns the error of a caller whose own wait timed out."""
    return DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "tensor"})


def _closed() -> Unavailable:
    return Unavailable(Reason.ENGINE_LOST, "the store is closed")


def _fail(future: "Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
