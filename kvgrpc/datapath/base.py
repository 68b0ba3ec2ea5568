"""The seam between the mover and the libraries that move bytes.

A data path knows memory, endpoints and runs. It knows no gRPC, no lease and no block id, never waits for a peer's
goodwill without a bound, and reports an end only when it knows that no further access of its own can follow.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol, runtime_checkable

from kvgrpc.core.descriptors import Runs
from kvgrpc.core.endpoints import RankEndpoint, Segment
from kvgrpc.errors import KVGrpcError, Reason


class PostingState(Enum):
    """Where one posting is."""

    PENDING = "pending"
    DONE = "done"
    """All bytes are in the destination and visible to this process."""
    FAILED = "failed"
    """Some bytes may have arrived; the library guarantees that no access follows."""


class DataPathUnavailable(KVGrpcError):
    """This data path cannot reach that rank; `str()` says why, for people."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.NO_DATA_PATH, message)


class DataPathFailed(KVGrpcError):
    """A posting or a connection broke."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.DATA_PATH_FAILED, message)


class Memory(Protocol):
    """One rank's own memory, mapped in this process: linear offsets run through `segments` in order."""

    @property
    def segments(self) -> tuple[Segment, ...]: ...


class Posting(Protocol):
    """One submission to a data path."""

    def poll(self) -> PostingState:
        """Never blocks. After DONE or FAILED it keeps answering the same."""
        ...

    @property
    def error(self) -> str:
        """Why it FAILED; empty otherwise."""
        ...


class Remote(Protocol):
    """A connected peer rank: what `DataPath.connect` proved and mapped."""

    @property
    def why(self) -> str:
        """One sentence for people: how the bytes will move (mapping, process_vm_readv, UCX transport)."""
        ...

    def read(self, runs: Runs, wake: Callable[[], None]) -> Posting:
        """Starts copying the peer's `runs.src` into this rank's `runs.dst`.

        `wake` may be called from any thread when `poll` has news; a path that never calls it is polled by the mover.
        Raises DataPathFailed when nothing was started; checks every run against both memories first.
        """
        ...

    def close(self) -> None:
        """Unmaps and forgets the peer. Only called when no posting on it is pending."""
        ...


class DataPath(Protocol):
    """One way to move bytes between two ranks, for this rank's memory. Used from the mover's thread only."""

    @property
    def name(self) -> str: ...

    @property
    def needs_polling(self) -> bool:
        """Whether postings and open accesses progress only while `progress` is called."""
        ...

    def offer(self, endpoint: RankEndpoint) -> RankEndpoint:
        """`endpoint` with this path's part filled in, for one peer (one-time tokens are minted here).

        Raises DataPathUnavailable where this rank's memory cannot be reached this way.
        """
        ...

    def connect(self, endpoint: RankEndpoint) -> Remote:
        """Proves that the peer's memory is reachable this way. Raises DataPathUnavailable with the reason."""
        ...

    def progress(self) -> None:
        """Gives the library a turn; never blocks."""
        ...

    def close(self) -> None:
        """Releases everything in the order the library needs. Idempotent.

        When it returns, no access of this path to any memory follows, also not of postings that are
        pending: those never become DONE any more.
        """
        ...


@runtime_checkable
class WaitsToConnect(Protocol):
    """A data path whose `connect` may wait for its peer: the mover calls it from another thread."""

    @property
    def connect_waits(self) -> bool: ...
