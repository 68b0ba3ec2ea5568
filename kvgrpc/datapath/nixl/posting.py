"""One posting of data path `nixl`: runs cut into slices, each one transfer of NIXL's, and the end of the posting.

This module does not know NIXL, only `AgentConnection` and `SliceTransfer`.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.actions import Operation
from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.base import DataPathFailed, PostingState
from kvgrpc.datapath.host.addresses import Rows

# Maximum bytes and rows of a slice. Within one host UCX copies inside the posting call, without the interpreter lock
# (CMA: 3 to 11 GB/s, 3 to 7 us a row); over TCP it takes all that has arrived. These bound the time of a call to some
# 30 ms by CMA, and so the delay of another posting or a cancel. At 16 MB the calls took 8 % longer than one of all
# bytes, at 64 MB 2 to 7 %.
SLICE_BYTES = 64 << 20
SLICE_ROWS = 4096
# Two slices keep a network from waiting for the next poll.
SLICES_IN_FLIGHT = 2

MEMORY_TYPES = ("DRAM", "VRAM")
"""NIXL's names for memory of the host and memory of a GPU."""


@dataclass(frozen=True, eq=False)
class NixlSlice:
    """Descriptors of one transfer: [n, 3] of (address, bytes, device), and NIXL's memory types."""

    own: NDArray[np.uint64]
    own_type: str
    peer: NDArray[np.uint64]
    peer_type: str
    part: int = 0
    """Number of the caller's slice to which it belongs."""


# Outcomes of a posting that broke, from the least proved to the most.
_PROVED = (PostingState.PENDING, PostingState.UNPROVED, PostingState.FAILED)


class _MemoryPlace(NamedTuple):
    """A kind of memory, as NIXL distinguishes it."""

    memory_type: str
    device: int


class SliceTransfer(Protocol):
    """One slice in NIXL's hands."""

    def post(self) -> tuple[PostingState, str]:
        """Starts the transfer, which may be over on return. The text says why it FAILED."""

    def check(self) -> tuple[PostingState, str]:
        """Gives NIXL a turn and returns the state; never blocks."""

    def release(self) -> None:
        """Releases an ended transfer. NIXL releases a running transfer too, and its bytes still arrive."""


class AgentConnection(Protocol):
    """An agent and one of its peers."""

    @property
    def lock(self) -> threading.RLock: ...

    @property
    def closed(self) -> bool: ...

    def prepare(self, piece: NixlSlice, operation: Operation) -> SliceTransfer:
        """Makes the transfer of a slice. Raises DataPathFailed; nothing has started then."""

    def broke(self, error: str, operation: Operation) -> PostingState:
        """Records that a transfer ended with an error. Returns the state of its posting: see NixlPosting."""

    def after_close(self, operation: Operation) -> PostingState:
        """Returns the state of a posting after the agent's end: see NixlPosting."""


class NixlPosting:
    """Implements `Posting`.

    The meaning of NIXL's errors was found by experiment (NIXL 1.5.1, UCX 1.23, host memory; TCP and CMA): the peer
    killed, its agent closed, connections cut while the peer ran or was stopped. Each time all postings on that peer
    ended with an error in the same poll, and UCX had dropped the connection's requests before it reported. This process
    touches its own memory only inside its own calls, so that memory is at rest then. For the peer's side it means:

    * READ: not a byte changed later, so an error is FAILED.
    * WRITE over CMA: this process writes into the peer's memory inside its own calls, so it is FAILED, too.
    * WRITE over TCP: the peer's process writes the bytes that have left when it gets to them, in every
      trial with a peer that was stopped for a moment, also after this agent's end: UNPROVED.
    * Elsewhere (an RDMA adapter reads and writes by itself, and a GPU's copies are its own) no test has
      shown anything: the posting stays PENDING with `error` set, until the path is closed. That makes
      a READ FAILED and a WRITE UNPROVED.

    DONE of a WRITE is the peer's acknowledgement over TCP; over CMA the bytes are there, though the peer may be
    stopped. Otherwise a stopped peer is no error: PENDING until it continues. NIXL has no cancel.

    DONE has one hole: NIXL keeps only the last request of a list. If a peer unmaps part of its memory during a read
    over CMA, those bytes are missing and nothing says so. Memory that was offered must stay mapped while it may be
    read.
    """

    def __init__(
        self,
        connection: AgentConnection,
        slices: Iterator[NixlSlice],
        wake: Callable[[], None],
        operation: Operation = Operation.READ,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        self._connection = connection
        self._operation = operation
        self._slices = slices
        self._next = next(slices, None)
        self._wake = wake
        self._arrived = arrived
        self._there: list[int] = []
        """Parts of which `arrived` has not been told."""
        self._running: dict[SliceTransfer, int] = {}
        """Running transfers, with the part to which each belongs."""
        self._state = PostingState.PENDING
        self._error = ""
        self._end = PostingState.FAILED
        """State that the posting gets if it breaks."""

    @property
    def error(self) -> str:
        """Why it FAILED or is UNPROVED or, while PENDING, why it will not end by itself; else empty."""
        return self._error

    def poll(self) -> PostingState:
        with self._connection.lock:
            if self._state is PostingState.PENDING:
                if self._connection.closed:
                    self._drop()
                self._check()
                self._post()
                if not self._next:
                    self._tell()
                self._conclude()
            return self._state

    def _drop(self) -> None:
        if self._end is PostingState.PENDING or self._running:
            self._end = self._connection.after_close(self._operation)
        self._running.clear()
        self._error = self._error or "the data path was closed"

    def _check(self) -> None:
        for transfer in list(self._running):
            self._update(transfer, *transfer.check())

    def _post(self) -> None:
        while self._next and not self._error and len(self._running) < SLICES_IN_FLIGHT:
            try:
                transfer = self._connection.prepare(self._next, self._operation)
            except DataPathFailed as error:
                self._error = error.message
                return
            self._running[transfer] = self._next.part
            self._next = next(self._slices, None)
            self._tell()
            state, error_text = transfer.post()
            self._update(transfer, state, error_text)
            if state is PostingState.DONE:
                # The slice was copied within the call. Other postings get a turn before the next slice.
                if self._next:
                    self._wake()
                return

    def _update(self, transfer: SliceTransfer, state: PostingState, error: str) -> None:
        if state is PostingState.PENDING:
            return
        part = self._running.pop(transfer)
        transfer.release()
        is_next = self._next is not None and self._next.part == part
        if state is PostingState.DONE and not is_next and part not in self._running.values():
            self._there.append(part)
        if state is PostingState.FAILED:
            self._error = self._error or error
            self._end = min(self._end, self._connection.broke(error, self._operation), key=_PROVED.index)

    def _tell(self) -> None:
        """Reports parts just before a slice is posted: the receiver then gets the interpreter lock."""
        there, self._there = self._there, []
        for part in there:
            if self._arrived is not None:
                self._arrived(part)

    def _conclude(self) -> None:
        if self._running:
            return
        if self._error:
            self._state = self._end
        elif not self._next:
            self._state = PostingState.DONE


def by_type(segments: Sequence[Segment]) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
    """Yields the memory to register: for each of NIXL's memory types, rows (address, bytes, device)."""
    for memory_type in MEMORY_TYPES:
        rows = [(s.address, s.nbytes, s.device) for s in segments if _place(s).memory_type == memory_type]
        if rows:
            yield memory_type, rows


def slices(
    rows: Rows, own: Sequence[Segment], peer: Sequence[Segment], ends: Sequence[int] = ()
) -> Iterator[NixlSlice]:
    """Yields rows (own address, peer's address, bytes of at most SLICE_BYTES) in slices. `ends` are byte counts at
    which rows end; no slice goes past one of them.

    Each slice has one kind of memory on either side, since a transfer of NIXL's can have no more.
    """
    if len(ends) < 2:
        yield from _of_one_kind(rows, own, peer)
        return
    bounds = np.searchsorted(np.cumsum(rows[:, 2]), ends, side="right").tolist()
    for part, (first, end) in enumerate(itertools.pairwise([0, *bounds])):
        for piece in _of_one_kind(rows[first:end], own, peer):
            yield replace(piece, part=part)


def _of_one_kind(rows: Rows, own: Sequence[Segment], peer: Sequence[Segment]) -> Iterator[NixlSlice]:
    for own_place, mine in _by_place(rows, 0, own):
        for peer_place, both in _by_place(mine, 1, peer):
            yield from _cut(both, own_place, peer_place)


def _place(segment: Segment) -> _MemoryPlace:
    return _MemoryPlace(MEMORY_TYPES[segment.kind is MemoryKind.CUDA], segment.device)


def _by_place(rows: Rows, column: int, segments: Sequence[Segment]) -> Iterator[tuple[_MemoryPlace, Rows]]:
    """Yields the rows whose address in `column` is in memory of each kind. For one kind, rows are not inspected."""
    places = [_place(segment) for segment in segments]
    kinds = list(dict.fromkeys(places))
    if len(kinds) == 1:
        yield kinds[0], rows
        return
    begins = np.array([segment.address for segment in segments], dtype=np.int64)
    order = np.argsort(begins)
    segment = order[np.searchsorted(begins[order], rows[:, column], side="right") - 1]
    kind = np.array([kinds.index(place) for place in places])[segment]
    for i, place in enumerate(kinds):
        some = rows[kind == i]
        if len(some):
            yield place, some


def _cut(rows: Rows, own: _MemoryPlace, peer: _MemoryPlace) -> Iterator[NixlSlice]:
    ends = rows[:, 2].cumsum()
    first = taken = 0
    while first < len(rows):
        end = min(int(ends.searchsorted(taken + SLICE_BYTES, side="right")), first + SLICE_ROWS)
        some = rows[first:end]
        yield NixlSlice(
            _descriptors(some, 0, own.device), own.memory_type, _descriptors(some, 1, peer.device), peer.memory_type
        )
        first, taken = end, int(ends[end - 1])


def _descriptors(rows: Rows, column: int, device: int) -> NDArray[np.uint64]:
    made = np.empty((len(rows), 3), dtype=np.uint64)
    made[:, 0], made[:, 1], made[:, 2] = rows[:, column], rows[:, 2], device
    return made
