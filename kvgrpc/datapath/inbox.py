"""Commands for a mover's thread, in order, and the names of postings in flight.

Anyone may ask until the inbox is closed. While the thread is idle, a caller may do something small in its place. The
lock is held meanwhile, so nothing else is asked: no peer is disconnected, and nothing is closed.
"""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from kvgrpc.errors import AlreadyExists, Reason, Unavailable

_T = TypeVar("_T")
Command = Callable[[], None]


class Inbox:
    """The commands of one thread."""

    def __init__(self) -> None:
        self._commands: queue.Queue[Command] = queue.Queue()  # SimpleQueue may wait for ever: see decision 13
        self._lock = threading.Lock()  # guards the attributes below
        self._unperformed = 0
        """Number of commands that were asked for and are not done."""
        self._postings: set[str] = set()
        self._closed = False

    def ask(self, command: Command) -> None:
        """Queues a command. Raises Unavailable if the inbox is closed: no answer would come."""
        with self._lock:
            self._admit(command)

    def post(self, posting: str, command: Command, at_once: Callable[[], _T | None] | None = None) -> _T | None:
        """Queues the command of a posting. If the thread is idle, `at_once` is called first, in this call. A result
        ends the posting, and the command is not queued; None means that it could not be done.

        Raises AlreadyExists while a posting of that name has not ended.
        """
        with self._lock:
            if posting in self._postings:
                raise AlreadyExists(Reason.ACCESS_REUSED, f"posting {posting} has not ended")
            self._check_open()
            if at_once is not None and not self._unperformed and (ended := at_once()) is not None:
                return ended
            self._admit(command)
            self._postings.add(posting)
        return None

    def ended(self, posting: str) -> None:
        """Frees the name of a posting."""
        with self._lock:
            self._postings.discard(posting)

    def close(self, command: Command) -> None:
        """Queues a last command; only the first call does."""
        with self._lock:
            if not self._closed:
                self._admit(command)
                self._closed = True

    def later(self, command: Command) -> None:
        """Queues a command of the thread's own helpers, also if the inbox is closed."""
        self._commands.put(command)

    def next(self, wait_s: float | None) -> Command | None:
        """Returns the next command for the thread, or None if none comes within `wait_s`; None waits for ever."""
        try:
            return self._commands.get(timeout=wait_s) if wait_s != 0 else self._commands.get(block=False)
        except queue.Empty:
            return None

    def _admit(self, command: Command) -> None:
        self._check_open()
        self._unperformed += 1
        self._commands.put(lambda: self._perform(command))

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(Reason.ENGINE_LOST, "the mover is closed")

    def _perform(self, command: Command) -> None:
        try:
            command()
        finally:
            with self._lock:
                self._unperformed -= 1
