"""Threads that compute checksums of a rank's memory, beside those that move bytes: nothing else waits for them.

The bytes of a posting (`ReadChecksums`) are checksummed while they are in the processor's cache. A data path that
copies by itself checksums what it has just copied (`ChecksummingRemote`). On other paths the posting moves in slices,
if they can (`SlicingRemote`), and each slice is checksummed while the next one moves.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from kvgrpc.core.events import ChecksumsComputed
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.base import Memory, Posting
from kvgrpc.datapath.copy.crc32c import Checksummer, ChecksumPlan, Values
from kvgrpc.errors import KVGrpcError

Work = Callable[[], None]
Computed = Callable[[str, bytes, str], None]
"""Callback with a name, the checksums, and why there are none: see ChecksumsComputed."""
SLICE_BYTES = 64 << 20
"""Maximum bytes of a slice of a posting: what NIXL gets at once anyway."""
ARRIVED_BYTES = 8 << 20
"""Minimum bytes of the last slices of a posting: a millisecond of copying. Fewer slices copy faster. Each slice is half
of what is left, so that nearly all is checksummed when the last one comes. See docs/performance.md for figures.
"""

_log = logging.getLogger(__name__)


def in_order_of_addresses(pieces: Pieces) -> tuple[Pieces, Ids]:
    """Returns the pieces with their checksums sorted by first address, and each checksum's place in the given order.

    Blocks of a request lie anywhere in a pool. In request order 16 KB blocks are checksummed at 6 GB/s, in address
    order at 8, and at 20 if they are neighbours. Checksums over different numbers of pieces keep their order.
    """
    count = len(pieces.counts)
    each = len(pieces.offsets) // max(count, 1)
    if not each or len(pieces.offsets) != count * each or (pieces.counts != each).any():
        return pieces, np.arange(count)
    offsets, nbytes = pieces.offsets.reshape(count, each), pieces.nbytes.reshape(count, each)
    places: Ids = np.argsort(offsets[:, 0], kind="stable")
    return Pieces(offsets[places].ravel(), nbytes[places].ravel(), pieces.counts), places


class ChecksumThreads:
    """Computes the checksums that it is asked for. `report` gets one ChecksumsComputed for each, from any thread."""

    def __init__(self, rank: int, memory: Memory, threads: int, report: Callable[[ChecksumsComputed], None]) -> None:
        self._rank = rank
        self._memory = memory
        self._report = report
        self.width = threads
        self._threads = ThreadPoolExecutor(threads, f"kvgrpc-sum-{rank}")
        self._checksummer: Checksummer | None = None

    def start(self, name: str, pieces: Pieces) -> None:
        """Starts to compute checksums, without blocking. Pieces outside the memory are an error of the report."""
        try:
            checksummer = self._made()
            pieces, places = in_order_of_addresses(pieces)
            values = _zeros(pieces)
            plan = checksummer.plan(pieces, values)
        except KVGrpcError as error:
            self._computed(name, b"", error.message)
            return
        works = [partial(plan.sum, first, end) for first, end in plan.slices]
        job = ChecksumJob(name, values, len(works), self._computed, places)
        left = iter(works)
        for _ in range(self.width):
            self._later(job.name, self._turn, job, left)

    def arrival(self, name: str, pieces: Pieces) -> "ReadChecksums | None":
        """Returns the checksums of a posting's bytes. The checksums are reported once all are computed, and not if the
        posting fails. If none can be computed, that is reported at once, and None is returned.
        """
        try:
            return ReadChecksums(name, pieces, self._made(), self, self._computed)
        except KVGrpcError as error:
            self._computed(name, b"", error.message)
            return None

    def submit(self, job: "ChecksumJob", work: Work) -> None:
        """Queues a piece of work after all that was submitted before."""
        self._later(job.name, job.run, work)

    def _turn(self, job: "ChecksumJob", left: Iterator[Work]) -> None:
        """Does one piece of work and queues the next, so that bytes that arrived meanwhile come between the two."""
        work = next(left, None)
        if work is not None:
            job.run(work)
            self._later(job.name, self._turn, job, left)

    def _computed(self, name: str, values: bytes, message: str) -> None:
        self._report(ChecksumsComputed(self._rank, name, values, message))

    def _later(self, name: str, do: Callable[..., None], *arguments: object) -> None:
        try:
            self._threads.submit(do, *arguments)
        except RuntimeError:  # closed: its reports are not wanted any more
            _log.debug("the rank is closed; %s is not summed up", name)

    def close(self) -> None:
        """Ends the threads after the slice that each is at; the rest is never reported. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _made(self) -> Checksummer:
        self._checksummer = self._checksummer or Checksummer(self._memory.segments)
        return self._checksummer


class ReadChecksums:
    """Checksums of the blocks that one posting brings. Only the mover uses it, by either `together` or `slices`."""

    def __init__(
        self, name: str, pieces: Pieces, checksummer: Checksummer, threads: ChecksumThreads, report: Computed
    ) -> None:
        self._name = name
        self._pieces = pieces
        self._checksummer = checksummer
        self._threads = threads
        self._report = report

    def together(self, runs: Runs, source: Sequence[Segment]) -> "tuple[ChecksumJob, list[Work]] | None":
        """Returns the work of copying and checksumming at once, for a path that can address the source.

        Returns None if the runs are not exactly the checksummed bytes. Raises DataPathFailed for pieces out of range.
        """
        offsets = sources_of(self._pieces, runs)
        if offsets is None:
            return None
        values = _zeros(self._pieces)
        plan = self._checksummer.plan(self._pieces, values, offsets, source)
        works: list[Work] = [partial(plan.sum, first, end) for first, end in plan.slices]
        return ChecksumJob(self._name, values, len(works), self._report), works

    def slices(self, runs: Runs) -> "ChecksummedSlices":
        """Returns the same bytes in slices of whole checksums. Raises DataPathFailed for pieces out of range."""
        self._checksummer.check(self._pieces)
        return ChecksummedSlices(self._name, self._pieces, runs, self._checksummer, self._threads, self._report)


class ChecksummedSlices:
    """A posting in slices, each checksummed while the next one moves. Only the mover's thread makes and uses it."""

    def __init__(
        self,
        name: str,
        pieces: Pieces,
        runs: Runs,
        checksummer: Checksummer,
        threads: ChecksumThreads,
        report: Computed,
    ) -> None:
        sources, bounds = sources_of(pieces, runs), [0, len(pieces.counts)]
        self.runs = runs
        """Runs to move, in this order."""
        self.ends = [runs.total_bytes]
        """Bytes of `runs` after which each slice is complete."""
        if sources is not None and len(sources):
            bounds = _bounds(pieces, ARRIVED_BYTES)
            self.runs, self.ends = _joined(Runs(sources, pieces.offsets, pieces.nbytes), pieces.counts, bounds)
        self._left = dict(enumerate(itertools.pairwise(bounds)))
        """Slices that are not there yet, with the range of their checksums."""
        self._checksummer = checksummer
        self._threads = threads
        self._pieces = pieces
        self._values = _zeros(pieces)
        self._plan: ChecksumPlan | None = None
        self._planning = threading.Lock()
        self._job = ChecksumJob(name, self._values, len(self.ends) - 1 + threads.width, report)

    def arrived(self, number: int) -> None:
        """Takes the news that a slice is there. All threads share the last one, since nothing moves beside it."""
        first, end = self._left.pop(number)
        threads = self._threads.width if number == len(self.ends) - 1 else 1
        bounds = [first + (end - first) * i // threads for i in range(threads + 1)]
        for some in itertools.pairwise(bounds):
            self._threads.submit(self._job, partial(self._sum, *some))

    def all_there(self) -> None:
        """Ends the posting: slices that were not reported have arrived, too."""
        for number in [*self._left]:
            self.arrived(number)

    def _sum(self, first: int, end: int) -> None:
        """Computes checksums. The plan is made here, once: the mover needs the interpreter between two slices."""
        with self._planning:
            self._plan = self._plan or self._checksummer.plan(self._pieces, self._values)
        self._plan.compute_numbers(first, end)


def sources_of(pieces: Pieces, runs: Runs) -> Ids | None:
    """Returns each piece's source, or None unless the runs bring exactly these pieces, none of them in two."""
    if np.array_equal(pieces.offsets, runs.dst) and np.array_equal(pieces.nbytes, runs.nbytes):
        return runs.src
    if not len(runs) or runs.total_bytes != int(pieces.nbytes.sum()):
        return None
    # Both are sorted: to look up thousands of unsorted offsets takes six times as long.
    order = np.argsort(runs.dst)
    if _in_order(pieces.offsets):
        run = order[np.searchsorted(runs.dst[order], pieces.offsets, side="right") - 1]
    else:
        wanted = np.argsort(pieces.offsets)
        run = np.empty(len(wanted), dtype=np.int64)
        run[wanted] = order[np.searchsorted(runs.dst[order], pieces.offsets[wanted], side="right") - 1]
    skipped = pieces.offsets - runs.dst[run]
    if ((skipped < 0) | (skipped + pieces.nbytes > runs.nbytes[run])).any():
        return None
    sources: Ids = runs.src[run] + skipped
    return sources


def _in_order(offsets: Ids) -> bool:
    """Returns True if offsets are sorted, in a tenth of the time that sorting takes."""
    return bool((offsets[1:] >= offsets[:-1]).all())


def _zeros(pieces: Pieces) -> Values:
    return np.zeros(len(pieces.counts), dtype=np.uint32)


def _bounds(pieces: Pieces, least: int) -> list[int]:
    """Returns the bounds of slices as numbers of checksums. A slice has half of the bytes that are left, at most
    SLICE_BYTES, or about `least`. The last one has up to half as many more, so that none is much smaller.
    """
    ends = np.concatenate(([0], np.cumsum(pieces.nbytes)))[np.cumsum(pieces.counts)]
    found, taken = [0], 0
    while found[-1] < len(ends):
        left = int(ends[-1]) - taken
        most = min(max(left // 2, least), SLICE_BYTES) if left > 1.5 * least else left
        found.append(max(int(np.searchsorted(ends, taken + most, side="right")), found[-1] + 1))
        taken = int(ends[found[-1] - 1])
    return found


def _joined(runs: Runs, counts: Ids, bounds: list[int]) -> tuple[Runs, list[int]]:
    """Returns the same bytes, slice by slice, and the bytes after which each slice ends. Each slice is sorted by
    destination and has as few runs as possible. `runs` has one run per piece; `bounds` are numbers of checksums.
    """
    pieces = np.concatenate(([0], np.cumsum(counts)))[bounds]
    src, dst, nbytes = runs.src, runs.dst, runs.nbytes
    if not _in_order(dst):
        order = np.concatenate([first + np.argsort(dst[first:end]) for first, end in itertools.pairwise(pieces)])
        src, dst, nbytes = src[order], dst[order], nbytes[order]
    ends = np.concatenate(([0], np.cumsum(nbytes)))
    goes_on = (src[1:] == (src + nbytes)[:-1]) & (dst[1:] == (dst + nbytes)[:-1])
    goes_on[pieces[1:-1] - 1] = False
    first = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    return Runs(src[first], dst[first], np.diff(ends[np.append(first, len(src))])), ends[pieces[1:]].tolist()


class ChecksumJob:
    """One request for checksums, in pieces of work. Without any work it is over when it is made."""

    def __init__(self, name: str, values: Values, works: int, report: Computed, places: Ids | None = None) -> None:
        self.name = name
        self.error = ""
        self._values = values
        """Results of the work. Result i answers request number `places[i]`, or i if `places` is None."""
        self._left = works
        self._report = report
        self._places = places
        self._lock = threading.Lock()
        if not works:
            report(name, self._in_order(), "")

    def run(self, work: Work) -> None:
        """Does one piece of work. The last one to end reports."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails these sums only
            _log.exception("%s could not be summed up", self.name)
            self.error = self.error or f"{type(error).__name__}: {error}"
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._report(self.name, b"" if self.error else self._in_order(), self.error)

    def _in_order(self) -> bytes:
        """Returns the checksums in the order of the request, as little-endian uint32."""
        values = self._values.astype("<u4")
        if self._places is not None:
            values[self._places] = self._values
        return values.tobytes()


@runtime_checkable
class ChecksummingRemote(Protocol):
    """A `Remote` whose peer's memory this process can address, and which checksums what it has just copied."""

    @property
    def source(self) -> Sequence[Segment]:
        """The peer's memory, by addresses of this process."""

    def read_and_checksum(self, job: ChecksumJob, works: Sequence[Work], wake: Callable[[], None]) -> Posting:
        """Does what `Remote.read` does for the runs of `ReadChecksums.together`, whose work also copies them."""
