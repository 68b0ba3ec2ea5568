"""Threads that copy: a posting is cut into pieces, and a free thread takes the next one.

Pieces are small (some milliseconds), so that threads end together even if one was held up, and a close waits for no
more than a piece. Pieces are not smaller, since after each one a thread has to win the interpreter lock back. Postings
are served in order of arrival. A thread without work is blocked and costs nothing.
"""

import contextlib
import queue
import threading
from collections.abc import Callable

from kvgrpc.datapath.base import DataPathFailed, PostingState
from kvgrpc.errors import KVGrpcError

PIECE_BYTES_MAX = 16 << 20
PIECE_BYTES_MIN = 256 << 10


def piece_bytes(total_bytes: int, threads: int) -> int:
    """Returns the bytes of a piece: several pieces for each thread if there are enough bytes."""
    return min(max(total_bytes // (4 * threads), PIECE_BYTES_MIN), PIECE_BYTES_MAX)


class PiecesPosting:
    """A posting whose pieces the threads of a `Crew` copy.

    `copy(i)` copies piece i and may raise; `verify` runs after the last piece if none failed and may raise, too. The
    posting ends only when no thread works on it any more. After its first failure no further piece is begun: FAILED
    means that no access follows.
    """

    def __init__(
        self,
        pieces: int,
        copy: Callable[[int], None],
        wake: Callable[[], None],
        verify: Callable[[], None] | None = None,
    ) -> None:
        self.pieces = pieces
        self._copy = copy
        self._verify = verify
        self._wake = wake
        self._lock = threading.Lock()
        self._left = pieces
        self._error = ""
        self._state = PostingState.PENDING if pieces else PostingState.DONE

    def poll(self) -> PostingState:
        return self._state

    @property
    def error(self) -> str:
        return self._error

    def run(self, piece: int) -> None:
        """Copies one piece. The last piece to end ends the posting. Never raises."""
        if not self._error:
            self._attempt(lambda: self._copy(piece))
        self._ended()

    def skip(self, reason: str) -> None:
        """Ends one piece that was not begun, and with it the posting as FAILED."""
        self._error = self._error or reason
        self._ended()

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except KVGrpcError as error:
            self._error = self._error or error.message or type(error).__name__
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails this posting only
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _ended(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if not last:
            return
        if not self._error and self._verify is not None:
            self._attempt(self._verify)
        self._state = PostingState.FAILED if self._error else PostingState.DONE
        self._wake()


class Crew:
    """Threads that copy the pieces of postings in order of arrival."""

    def __init__(self, name: str, threads: int) -> None:
        self.size = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._pieces: queue.SimpleQueue[tuple[PiecesPosting, int] | None] = queue.SimpleQueue()
        self._closed = False

    def start(self, posting: PiecesPosting) -> None:
        """Hands out the pieces. The first posting with several starts the threads; all such postings come from one
        thread.

        A single piece, which is small, is copied before this returns: to hand it over takes longer. Raises
        DataPathFailed after `close`.
        """
        if self._closed:
            raise DataPathFailed("the data path is closed")
        if posting.pieces == 1:
            posting.run(0)
            return
        if not self._threads and posting.pieces:
            self._threads = [
                # These threads are daemons, so that a program that forgets to close still ends.
                threading.Thread(target=self._work, name=f"{self._name}-{i}", daemon=True)
                for i in range(self.size)
            ]
            for thread in self._threads:
                thread.start()
        for piece in range(posting.pieces):
            self._pieces.put((posting, piece))

    def close(self) -> None:
        """Skips all pieces that are not begun (their postings end as FAILED) and ends the threads.

        Waits for the pieces at work. Idempotent.
        """
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._pieces.get_nowait()
                if item is not None:
                    item[0].skip("the data path was closed before all bytes were copied")
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (item := self._pieces.get()) is not None:
            posting, piece = item
            posting.run(piece)
            del posting, item  # not kept alive while it waits for the next one
