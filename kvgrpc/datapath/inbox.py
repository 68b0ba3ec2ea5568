"""What a mover's thread is to do, in the order in which it was asked for, and the names of postings under way.

Anyone may ask until it is closed. While the thread has done all that was asked, an asker may do something small in its
place: nothing is asked for meanwhile, and so no peer is disconnected and nothing closed.
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
        self._lock = threading.Lock()  # guards the others
        self._unperformed = 0
        """Commands that were asked for and are not done."""
        self._postings: set[str] = set()
        self._closed = False

    def ask(self, command: Command) -> None:
        """Raises Unavailable once it is closed: no answer would come."""
        with self._lock:
            self._admit(command)

    def post(self, posting: str, command: Command, at_once: Callable[[], _T | None] | None = None) -> _T | None:
        """As `ask`, of a posting. `at_once` is done first, in this very call, if everything that was asked for is done:
        what it returns ends the posting, and the command is not asked for; None: it could not be done so.

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
        """Its name is free."""
        with self._lock:
            self._postings.discard(posting)

    def close(self, command: Command) -> None:
        """Asks for a last command, the first time."""
        with self._lock:
            if not self._closed:
                self._admit(command)
                self._closed = True

    def later(self, command: Command) -> None:
        """For the thread's own helpers: also when it is closed."""
        self._commands.put(command)

    def next(self, wait_s: float | None) -> Command | None:
        """For the thread: the next command, when there is one within `wait_s`; None: wait for ever."""
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
