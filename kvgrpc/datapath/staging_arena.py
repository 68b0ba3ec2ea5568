"""The staging arena of a rank: it holds bytes until they are re-packed, and has the threads that copy them.

The arena is one allocation, made at the first posting that needs it, and never grows. Postings get pieces of it in the
order of their requests. A piece is reused only when it is proved that nothing of its posting lands in it any more. Else
it is lost, since a late write would hit the bytes of another posting. Only the mover's thread uses the arena.
"""

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvgrpc.core.actions import Operation, Post
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.strips import Repack
from kvgrpc.datapath.base import Buffer, DataPathFailed, Memory
from kvgrpc.datapath.copy.crew import Crew, PiecesPosting, piece_bytes
from kvgrpc.datapath.copy.strips import check_strips, works_of
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.memory import is_host, memory_bytes

_ALIGNED_BYTES = 4096

_KEPT: list[object] = []
"""Arenas of ranks that ended while something may still land in them."""


@dataclass(eq=False)
class RoomClaim:
    """A posting's request for room: granted, waiting, or refused."""

    nbytes: int
    wake: Callable[[], None]
    """Callback for a change of one of the following."""
    buffer: Buffer | None = None
    refused: str = ""


class StagingArena:
    """The arena for re-packs into `memory`, and the threads that copy."""

    def __init__(self, rank: int, memory: Memory, copy_threads: int, nbytes: int) -> None:
        self._own = memory.segments
        self._own_bytes = memory_bytes(memory.segments)
        self._name = f"kvgrpc-repack-{rank}"
        self._threads = copy_threads
        self._crew = Crew(self._name, copy_threads)
        self._nbytes = nbytes
        self._arena: mmap.mmap | None = None
        self._address = 0
        self._taken: dict[RoomClaim, tuple[int, int]] = {}
        """Begin and end of each claim's piece, including lost ones."""
        self._lost: set[RoomClaim] = set()
        self._waiting: deque[RoomClaim] = deque()

    def check(self, post: Post) -> Repack:
        """Returns the posting's re-pack. Raises DataPathFailed, before anything is started, if it cannot be done."""
        repack = post.repack
        assert repack is not None
        if post.operation is not Operation.READ:
            raise DataPathFailed("only a read ends with a re-pack")
        if post.checksums is not None:
            raise DataPathFailed("no checksums are computed on the way to a re-pack: ask for them after it")
        if not is_host(self._own):
            raise DataPathFailed("this rank's memory is on a device, where no strips are copied: use longer runs")
        check_strips(repack, self._own_bytes)
        return repack

    def check_room(self, nbytes: int) -> None:
        """Raises DataPathFailed if there will never be room for `nbytes` bytes."""
        if why := self._impossible(nbytes):
            raise DataPathFailed(why)

    def claim(self, nbytes: int, wake: Callable[[], None]) -> RoomClaim:
        """Requests room for a checked posting, which is granted at once, or in its turn."""
        claim = RoomClaim(nbytes, wake)
        self._waiting.append(claim)
        self._grant()
        return claim

    def end(self, claim: RoomClaim, at_rest: bool) -> None:
        """Ends a claim with its posting. Not `at_rest`: something may still land in its piece. May be called again."""
        if claim in self._waiting:
            self._waiting.remove(claim)
        if at_rest:
            self._taken.pop(claim, None)
            self._lost.discard(claim)
        elif claim in self._taken:
            self._lost.add(claim)
            for waiting in [waiting for waiting in self._waiting if self._impossible(waiting.nbytes)]:
                waiting.refused = self._impossible(waiting.nbytes)
                self._waiting.remove(waiting)
                waiting.wake()
        for granted in self._grant():
            granted.wake()

    def start(self, repack: Repack, buffer: Buffer, wake: Callable[[], None]) -> PiecesPosting:
        """Starts to copy the strips out of the buffer. Raises DataPathFailed if nothing was started."""
        work_bytes = piece_bytes(repack.total_bytes, self._threads)
        works = works_of(repack.strips, buffer.segment, self._own, work_bytes)
        posting = PiecesPosting(len(works), lambda i: works[i](), wake)
        self._crew.start(posting)
        return posting

    def stop(self) -> None:
        """Ends all copies in flight, after the piece that each thread is at."""
        self._crew.close()
        self._crew = Crew(self._name, self._threads)

    def close(self) -> None:
        """Closes the arena. All postings must have ended."""
        self._crew.close()
        if self._lost:
            _KEPT.append(self._arena)

    def _grant(self) -> list[RoomClaim]:
        """Grants room to waiting claims, in order. Returns those that were granted or refused."""
        granted = []
        while self._waiting and (begin := self._room(self._waiting[0].nbytes, self._taken)) is not None:
            claim = self._waiting.popleft()
            try:
                claim.buffer = self._buffer(begin, claim.nbytes)
            except (OSError, ValueError, MemoryError) as error:
                claim.refused = f"there is no memory for a staging buffer of {self._nbytes} bytes: {error}"
            else:
                self._taken[claim] = begin, begin + _whole(claim.nbytes)
            granted.append(claim)
        return granted

    def _room(self, nbytes: int, besides: Iterable[RoomClaim]) -> int | None:
        """Returns an offset at which a piece touches none of the claims in `besides`, or None."""
        taken = sorted(self._taken[claim] for claim in besides)
        for (_, end), (begin, _) in pairwise([(0, 0), *taken, (self._nbytes, self._nbytes)]):
            if begin - end >= _whole(nbytes):
                return end
        return None

    def _impossible(self, nbytes: int) -> str:
        """Returns why there will never be room, or an empty text if there will be."""
        if nbytes >= 0 and self._room(nbytes, self._lost) is not None:
            return ""
        nbytes_lost = sum(end - begin for begin, end in (self._taken[claim] for claim in self._lost))
        lost = f", of which {nbytes_lost} are lost to postings that may still write there" if nbytes_lost else ""
        return (
            f"a re-pack of {nbytes} bytes does not fit into the {self._nbytes} bytes of staging of its rank{lost}: post"
            " less at once"
        )

    def _buffer(self, begin: int, nbytes: int) -> Buffer:
        if self._arena is None:
            self._arena = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._address = np.frombuffer(self._arena, dtype=np.uint8).ctypes.data
            with contextlib.suppress(OSError):
                libc.madvise(self._address, self._nbytes, libc.MADV_HUGEPAGE)
        arena = Segment(self._address, self._nbytes)
        return Buffer(Segment(self._address + begin, nbytes), arena, self._arena)


def _whole(nbytes: int) -> int:
    return max(-(-nbytes // _ALIGNED_BYTES), 1) * _ALIGNED_BYTES
