"""A process group of two ranks and one direction, and the thread that processes its sends in order.

The thread waits message by message, for a bounded time without news. Once it has ended, the group is gone, and nothing
accesses this rank's memory by the group any more.
"""

import errno
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, NotMet, PostingState
from kvgrpc.datapath.collective.messages import Message
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.errors import KVGrpcError
from kvgrpc.open_files import NONE_LEFT, spare

GLOO, NCCL, WINDOW = "gloo", "nccl", "window"
"""Libraries that make groups."""
SENDER, RECEIVER = 0, 1
"""Ranks within a group."""
BUILD_S = 15.0
"""Time for the other rank to come, in seconds. A rank may have to load the library first."""
PROOF_S = 5.0
"""Time for a rank to connect and to prove that it is the other one, in seconds: a moment once both know of each other.
"""
STALL_S = 10.0
"""Maximum time for a message, in seconds."""
UNDER_WAY = 8
"""Maximum number of messages that the library has at once."""
DESCRIPTORS = 16
"""Descriptors of a group, including those that Gloo opens for a moment."""
_PASSING = NONE_LEFT | {errno.EAGAIN, errno.EADDRINUSE}
"""Errors of a host that lacks something for a while."""
_WHERE = re.compile(r"^\[[^\]]*\] *")
"""The position in the library's source with which its errors begin."""


class GroupLibrary(Protocol):
    """One connected side of a process group, in its library's terms. One thread uses it, except for `shut_down`. When
    nothing refers to it any more, it accesses nothing.
    """

    def launch(self, message: Message, number: int) -> Any:
        """Hands a message of send `number` to the library, which matches no message of another send."""

    def land(self, flying: Any, stall_s: float) -> None:
        """Waits until a message has moved, in launch order. Raises RuntimeError if it does not move."""

    def shut_down(self) -> None:
        """Ends what is in flight, so that `land` raises. Any thread may call it."""

    def close(self) -> None:
        """Ends the group, before anything that was launched is forgotten."""


@dataclass(eq=False)
class GroupJob:
    """The messages of one send or receive."""

    messages: Iterator[Message]
    wake: Callable[[], None]
    error: str = ""
    state: PostingState = PostingState.PENDING

    def poll(self) -> PostingState:
        return self.state

    def end(self, error: str = "") -> None:
        self.error = error
        self.state = PostingState.FAILED if error else PostingState.DONE
        self.wake()


class ProcessGroup:
    """One side of a group. The group's thread calls `make`, then `told` with the values for the other side, and `ready`
    once the group is made or broken.
    """

    def __init__(
        self, make: Callable[[Rendezvous], GroupLibrary], *, told: Callable[[Values], None], ready: Callable[[], None]
    ) -> None:
        self._make = make
        self._library: GroupLibrary | None = None
        self._ready = ready
        self._rendezvous = Rendezvous(told, BUILD_S)
        self._jobs: queue.SimpleQueue[tuple[int, GroupJob] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `broken`: no job comes in after it was set
        self.broken = ""
        """Why nothing moves by the group any more; empty if it works."""
        self._permanent = False
        """True if the group was not made, and another one will not be."""
        self.made = False
        """True once both ranks have come."""
        self._thread = threading.Thread(target=self._run, name="kvgrpc-collective", daemon=True)
        self._thread.start()

    @property
    def not_met(self) -> NotMet:
        """The reason why a broken group was not made."""
        return (DataPathUnavailable if self._permanent else DataPathFailed)(self.broken)

    def learn(self, values: Values) -> None:
        """Takes the values of the other side."""
        self._rendezvous.learn(values)

    def start(self, number: int, job: GroupJob) -> None:
        """Queues send or receive `number`: its messages move after those of the jobs before it."""
        with self._lock:
            if not self.broken:
                self._jobs.put((number, job))
                return
        job.end(self.broken)

    def abort(self, why: str) -> None:
        """Ends the group, with all that is in flight, without waiting."""
        self._break(why)
        self._rendezvous.give_up(why)
        if (library := self._library) is not None:
            library.shut_down()
        self._jobs.put(None)

    @property
    def awaits_half(self) -> bool:
        """True if the group only waits for the other side's values, and can be ended at once."""
        return self._rendezvous.waits

    @property
    def ended(self) -> bool:
        """True if it is proved that nothing accesses this rank's memory by the group any more."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the thread. Returns True if it has come."""
        self._thread.join(timeout_s)
        return self.ended

    # ---- the thread

    def _run(self) -> None:
        job: GroupJob | None = None
        library: GroupLibrary | None = None
        try:
            self._library = library = self._make(self._rendezvous)
            self._rendezvous.tell()
            self.made = True
            self._ready()
            try:
                while not self.broken and (numbered := self._jobs.get()) is not None:
                    number, job = numbered
                    self._move(library, job, number)
                    done, job = job, None
                    done.end()
            finally:
                library.close()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this group only
            self._break_for(error)
        self._library = library = None  # it accesses nothing any more
        if not self.made:
            self._ready()
        if job is not None:
            job.end(self.broken)
        with suppress(queue.Empty):
            while True:
                if (left := self._jobs.get_nowait()) is not None:
                    left[1].end(self.broken)

    def _break(self, why: str, *, permanent: bool = False) -> None:
        with self._lock:
            if not self.broken:
                self.broken, self._permanent = why, permanent

    def _break_for(self, error: Exception) -> None:
        """Breaks the group after an error. The other rank need not come to a group that this one cannot make."""
        said = error.message if isinstance(error, KVGrpcError) else str(error)
        why = _WHERE.sub("", said).partition("\n")[0] or type(error).__name__
        if self.made or isinstance(error, DataPathFailed):
            self._break(why)
        elif isinstance(error, KVGrpcError):
            self._break(why, permanent=True)
        else:
            passes = (isinstance(error, OSError) and error.errno in _PASSING) or not spare(DESCRIPTORS)
            self._break(f"this rank cannot make its half: {why}", permanent=not passes)

    def _move(self, library: GroupLibrary, job: GroupJob, number: int) -> None:
        """Moves all messages of a job, in order. Raises an error if that fails."""
        flying: deque[Any] = deque()
        for message in job.messages:
            if len(flying) == UNDER_WAY:
                self._land(library, flying.popleft())
            flying.append(library.launch(message, number))
        while flying:
            self._land(library, flying.popleft())

    def _land(self, library: GroupLibrary, flying: Any) -> None:
        library.land(flying, STALL_S)
        if self.broken:
            raise RuntimeError(self.broken)
