"""Copies of a device, job after job and piece by piece: to its mirror, from the mirror, or from a peer's device."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.mirror.device import Copy, CopyFailed

_log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Bytes of a piece: a millisecond of a PCIe link. A job that is cancelled ends after such a piece."""
PIECE_RUNS = 4_096
PIECES_MAX = 2
"""Maximum number of pieces in flight, so that the device never waits for the next one to start."""


class CopyLost(Exception):
    """A copy ended without proof that nothing of it follows."""


Start = Callable[[], Copy]
"""Function that starts the copies of a piece."""


class CopyJob:
    """Copies, in pieces that the lane's thread makes and starts; it is a Posting. `ended` is called once, from any
    thread, when the job is not PENDING any more.
    """

    def __init__(self, pieces: Iterable[Start], ended: Callable[[], None]) -> None:
        self.pieces = pieces
        self.lost = False
        self._ended = ended
        self._state = PostingState.PENDING
        self._error = ""

    def poll(self) -> PostingState:
        """Returns the state. Raises CopyLost if it is not proved that nothing of the job follows."""
        if self.lost and self._state is not PostingState.PENDING:
            raise CopyLost(self._error)
        return self._state

    @property
    def error(self) -> str:
        return self._error

    def end(self, error: str) -> None:
        self._error = error
        self._state = PostingState.FAILED if error else PostingState.DONE
        self._ended()


class CopyLane:
    """The thread that starts copies and waits for them."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._closing = False
        self._lost = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, job: CopyJob) -> None:
        """Queues a job after all earlier ones. Never blocks."""
        if self._closing:
            job.end(self._refusal())
        else:
            self._jobs.put(job)

    def stop(self) -> None:
        """Begins no further piece: all jobs fail."""
        self._closing = True
        self._jobs.put(None)

    def at_rest(self, wait_s: float) -> bool:
        """Returns True, after `stop`, if it is proved that no copy of the lane is in flight, or will be."""
        self._thread.join(wait_s)
        return not self._thread.is_alive() and not self._lost

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            error = self._copied(job)
            try:
                job.end(error)
            except Exception:  # noqa: BLE001 - logged, and the thread goes on
                _log.exception("the owner of a copy could not take its end")
            del job

    def _copied(self, job: CopyJob) -> str:
        """Copies a job. Returns why it failed, or an empty text."""
        flying: deque[Copy] = deque()
        error = ""
        try:
            for start in job.pieces:
                if len(flying) == PIECES_MAX:
                    error = self._wait(job, flying.popleft().synchronize)
                if error := error or self._refusal() or self._wait(job, partial(_begin, start, flying)):
                    break
        except Exception as problem:  # noqa: BLE001 - an error of the pieces' maker, in which the device has no part
            _log.exception("the pieces of a copy could not be made")
            error = str(problem) or type(problem).__name__
        while flying:
            error = self._wait(job, flying.popleft().synchronize) or error
        return error

    def _refusal(self) -> str:
        if self._lost:
            return f"this rank lost a copy, of which something may still follow: {self._lost}"
        return "this rank is closing" if self._closing else ""

    def _wait(self, job: CopyJob, do: Callable[[], None]) -> str:
        """Calls the device. Returns why the call failed, or an empty text."""
        try:
            do()
        except CopyFailed as error:
            return error.message
        except Exception as error:  # noqa: BLE001 - logged, and nothing more is copied
            _log.exception("a copy of a device was lost")
            job.lost = True
            self._lost = str(error) or type(error).__name__
            return self._lost
        return ""


def _begin(start: Start, flying: deque[Copy]) -> None:
    flying.append(start())
