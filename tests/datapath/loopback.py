"""Path `loopback`: both ranks live in this very process. Its maker can let it be slow, fail, or end late: `Faults`."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvgrpc.core.actions import Operation
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.datapath.base import Buffer, DataPathFailed, DataPathUnavailable, Memory
from kvgrpc.datapath.copy import copy_methods
from kvgrpc.datapath.copy.copy_methods import CopyMethod
from kvgrpc.datapath.copy.crew import Crew, PiecesPosting, piece_bytes
from kvgrpc.datapath.host.addresses import check_runs, groups, to_rows
from kvgrpc.datapath.host.memory import SharedMemory, is_host, memory_bytes
from kvgrpc.datapath.questions import Answer, Question

_registry: dict[str, "_Offered"] = {}
_registry_lock = threading.Lock()
_ROWS_MAX = 1 << 16


@dataclass
class Faults:
    """The faults of a `LoopbackPath`. Each value is read when a posting comes to it."""

    fail_connect: str = ""
    """Reason why every connect is refused; empty: none is."""
    fail_post: str = ""
    """Reason why every posting is refused before a byte moved; empty: none is."""
    fail_after_bytes: int | None = None
    """Number of bytes after which, or somewhat later, a posting ends FAILED."""
    piece_delay_s: float = 0.0
    """Wait before each piece of up to 16 MB, in seconds."""
    begin: threading.Event | None = None
    """Event before which no byte moves; closing the path sets it."""
    end: threading.Event | None = None
    """Event before which no posting ends, though its bytes are there; closing the path sets it."""


class LoopbackPath:
    """Offers this rank's memory under `key` in this process, and reads and writes memory found by key.

    Raises DataPathFailed if `key` is taken.
    """

    name = "loopback"
    needs_polling = False
    peers_need_turns = False

    def __init__(self, memory: Memory, key: str, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._memory = memory
        self._key = key
        self._begin()

    def _begin(self) -> None:
        self._offered = _Offered(self._memory)
        with _registry_lock:
            if self._key in _registry:
                raise DataPathFailed(f"the loopback key {self._key} is taken")
            _registry[self._key] = self._offered
        self._crew = Crew("kvgrpc-loopback-copy", 1)
        self._closing = threading.Event()

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        nbytes = memory_bytes(self._memory.segments)
        return replace(endpoint, loopback=LoopbackEndpoint(self._key, nbytes))

    def withdraw(self, peer: str) -> None:
        """Does nothing: no peer gets a token."""

    def question(self, endpoint: RankEndpoint) -> Question | None:
        return None

    def connect(self, endpoint: RankEndpoint, answer: Answer | str = "") -> "LoopbackRemote":
        if endpoint.loopback is None:
            raise DataPathUnavailable("the peer offers no loopback")
        if self.faults.fail_connect:
            raise DataPathUnavailable(self.faults.fail_connect)
        key = endpoint.loopback.key
        peer = find(key)
        if peer is None:
            raise DataPathUnavailable(f"no rank with the loopback key {key} lives in this process")
        if not is_host([*peer.memory.segments, *self._memory.segments]):
            raise DataPathUnavailable("memory of one side is on a device")
        return LoopbackRemote(self, key, peer)

    def progress(self) -> None:
        """Does nothing: the copy thread needs no turn."""

    def close(self) -> None:
        """Ends every wait of `Faults`, then the thread, and frees the key. No peer writes after it."""
        self._offered.withdraw()
        self._closing.set()
        for held in (self.faults.begin, self.faults.end):
            if held is not None:
                held.set()
        self._crew.close()
        with _registry_lock:
            if _registry.get(self._key) is self._offered:
                del _registry[self._key]

    @property
    def late_writes(self) -> str:
        return ""

    @property
    def ends_with_process(self) -> bool:
        return False

    def rekey(self) -> None:
        """Starts anew: see `WrittenByPeers`."""
        self.close()
        self._begin()

    def start(
        self, runs: Runs, operation: Operation, peer: "_Offered", wake: Callable[[], None], buffer: Buffer | None
    ) -> PiecesPosting:
        """Begins to copy for `LoopbackRemote`. Raises DataPathFailed if nothing was started."""
        reads = operation is Operation.READ
        own, theirs = self._memory.segments if buffer is None else (buffer.segment,), peer.memory.segments
        source, destination = (theirs, own) if reads else (own, theirs)
        check_runs(runs, memory_bytes(source), memory_bytes(destination))
        piece = piece_bytes(runs.total_bytes, self._crew.size)
        rows = to_rows(runs, source, destination, piece)
        ranges = groups(rows[:, 2], piece, _ROWS_MAX)
        copy = copy_methods.copier(CopyMethod.LOOP)
        assert copy is not None  # this method works everywhere
        closing = self._closing

        def check(moved: int) -> None:
            limit = self.faults.fail_after_bytes
            if closing.is_set():
                raise DataPathFailed("the data path was closed before the posting ended")
            if limit is not None and moved >= limit:
                raise DataPathFailed(f"told to fail after {limit} bytes")

        def copy_piece(i: int) -> None:
            first, end = ranges[i]
            if self.faults.begin is not None:
                self.faults.begin.wait()
            closing.wait(self.faults.piece_delay_s)
            check(int(rows[:first, 2].sum()))
            with contextlib.nullcontext() if reads else peer.writing():
                copy(rows[first:end])

        def before_the_end() -> None:
            if self.faults.end is not None:
                self.faults.end.wait()
            check(int(rows[:, 2].sum()))

        posting = PiecesPosting(len(ranges), copy_piece, wake, verify=before_the_end)
        self._crew.start(posting)
        return posting


class _Offered:
    """Memory that peers may read and write, until it is withdrawn."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._lock = threading.Lock()
        self._withdrawn = False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Guards the write of one piece. Raises DataPathFailed if the memory was withdrawn."""
        with self._lock:
            if self._withdrawn:
                raise DataPathFailed("the peer has ended all writes into its memory")
            yield

    def withdraw(self) -> None:
        """Stops all further writes."""
        with self._lock:
            self._withdrawn = True


class LoopbackRemote:
    """Memory of another rank in this process."""

    def __init__(self, path: LoopbackPath, key: str, peer: _Offered) -> None:
        self._path = path
        self._key = key
        self._peer = peer
        # A rank that closes its memory during a copy gets it back a little later.
        self._alive = peer.memory.keep_alive() if isinstance(peer.memory, SharedMemory) else peer.memory

    @property
    def why(self) -> str:
        return f"the rank {self._key} lives in this process and is copied by one thread"

    @property
    def process(self) -> None:
        return None

    def read(self, runs: Runs, wake: Callable[[], None]) -> PiecesPosting:
        return self._start(runs, Operation.READ, wake)

    def read_into(self, buffer: Buffer, runs: Runs, wake: Callable[[], None]) -> PiecesPosting:
        return self._start(runs, Operation.READ, wake, buffer)

    def write(self, runs: Runs, wake: Callable[[], None]) -> PiecesPosting:
        return self._start(runs, Operation.WRITE, wake)

    def close(self) -> None:
        """Forgets the rank. Idempotent."""
        self._alive = None

    def _start(
        self, runs: Runs, operation: Operation, wake: Callable[[], None], buffer: Buffer | None = None
    ) -> PiecesPosting:
        faults = self._path.faults
        if faults.fail_post:
            raise DataPathFailed(faults.fail_post)
        if find(self._key) is not self._peer:
            raise DataPathFailed(f"the rank {self._key} is gone")
        return self._path.start(runs, operation, self._peer, wake, buffer)


def find(key: str) -> _Offered | None:
    """Returns the memory registered under `key` in this process, or None."""
    with _registry_lock:
        return _registry.get(key)
