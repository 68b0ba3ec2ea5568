"""Interface between the mover and the libraries that move bytes.

A data path knows memory, endpoints and runs. A path knows no gRPC, no lease and no block id, never waits for a peer
without a bound, and reports an end only when it knows that no further access of its own can follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint, Segment
from kvgrpc.core.values.sends import SendAnswer, SendAsk, Values
from kvgrpc.core.values.strips import Strip
from kvgrpc.datapath.questions import Answer, Question
from kvgrpc.errors import KVGrpcError, Reason


class PostingState(Enum):
    """The state of one posting."""

    PENDING = "pending"
    DONE = "done"
    """All bytes are in the destination and visible to this process."""
    FAILED = "failed"
    """Some bytes may have arrived; the library guarantees that no access follows."""
    UNPROVED = "unproved"
    """A write that is over here, with this rank's memory at rest; its bytes may still land in the peer's memory."""


class DataPathUnavailable(KVGrpcError):
    """This data path cannot reach that rank; `str()` says why."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.NO_DATA_PATH, message)


class DataPathFailed(KVGrpcError):
    """A posting or a connection broke."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.DATA_PATH_FAILED, message)


NotMet = DataPathUnavailable | DataPathFailed
"""Reason why two ranks did not meet. DataPathFailed may pass; DataPathUnavailable stays, whoever tries again."""


class Memory(Protocol):
    """One rank's own memory, mapped in this process. Linear offsets run through `segments` in order."""

    @property
    def segments(self) -> tuple[Segment, ...]: ...

    @property
    def nonce(self) -> bytes:
        """Random bytes at `nonce_address` for as long as this memory belongs to this process."""

    @property
    def nonce_address(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Buffer:
    """A piece of a rank's staging arena in host memory."""

    segment: Segment
    arena: Segment
    """The whole arena. Data paths that register memory register it once, and never offer it."""
    keeps: object
    """Object that keeps the arena mapped."""


class Posting(Protocol):
    """One submission to a data path."""

    def poll(self) -> PostingState:
        """Returns the state, without blocking. Once it is not PENDING, it does not change any more."""

    @property
    def error(self) -> str:
        """Why the posting FAILED or is UNPROVED; empty otherwise."""


class PeerProcess(Protocol):
    """A held process of a peer's rank on this host, whose end can be seen, and is never that of another process."""

    @property
    def ended(self) -> bool: ...

    def close(self) -> None:
        """Lets go of the process. Idempotent."""


class Remote(Protocol):
    """A connected peer rank, proved and mapped by `DataPath.connect`."""

    @property
    def why(self) -> str:
        """One sentence on how the bytes will move (mapping, process_vm_readv, UCX transport)."""

    @property
    def process(self) -> PeerProcess | None:
        """The process that has that memory, and writes into this rank's. None if its end cannot be seen.

        The caller owns it, also after `close`.
        """

    def read(self, runs: Runs, wake: Callable[[], None]) -> Posting:
        """Starts to copy the peer's `runs.src` into this rank's `runs.dst`.

        `wake` may be called from any thread when `poll` has news; a path that never calls it is polled by the mover.
        Raises DataPathFailed if nothing was started. Every run is first checked against both memories.
        """

    def close(self) -> None:
        """Unmaps and forgets the peer. Only called while no posting on the peer is pending."""


@runtime_checkable
class PromptRemote(Remote, Protocol):
    """A peer rank from which a small read ends sooner than another thread is woken."""

    def ends_at_once(self, runs: Runs) -> bool:
        """Returns True if a read of these runs is over when `read` returns, without waiting for anybody.

        Any thread may then start the read, if no other thread starts one on this peer or closes it meanwhile.
        """


@runtime_checkable
class SlicingRemote(Remote, Protocol):
    """A peer rank from which bytes come slice by slice."""

    def read_slices(
        self, runs: Runs, ends: Sequence[int], arrived: Callable[[int], None], wake: Callable[[], None]
    ) -> Posting:
        """Does what `read` does, in slices. Slice i ends after `ends[i]` bytes of `runs`, at the end of a run.
        `arrived` is called within this call or a `poll` when the slice's bytes are there.
        """


@runtime_checkable
class StagingRemote(Remote, Protocol):
    """A peer rank from which bytes may come into a staging buffer."""

    def read_into(self, buffer: Buffer, runs: Runs, wake: Callable[[], None]) -> Posting:
        """Does what `read` does, with offsets in the buffer as `runs.dst`."""


@runtime_checkable
class StripsRemote(Remote, Protocol):
    """A peer rank out of whose memory strips are copied to their places, without a staging buffer."""

    def read_strips(self, strips: Sequence[Strip], wake: Callable[[], None]) -> Posting:
        """Does what `read` does, for checked strips whose sources are offsets in the peer's memory."""


@runtime_checkable
class WritableRemote(Remote, Protocol):
    """A peer rank whose memory this rank may write, too.

    Such a peer exists only where the source may move the bytes. If ranks share a host's memory, no peer ever holds a
    writable mapping: those paths have remotes without `write`.
    """

    def write(self, runs: Runs, wake: Callable[[], None]) -> Posting:
        """Does what `read` does, from this rank's `runs.src` into the peer's `runs.dst`.

        DONE means that the bytes are in the peer's memory, whatever the peer does.
        """


@runtime_checkable
class SentRemote(Remote, Protocol):
    """A peer rank that sends the bytes of a read when it is asked."""

    def read_sent(self, posting_id: str, runs: Runs, wake: Callable[[], None], buffer: Buffer | None = None) -> Posting:
        """Does what `read` does, or with a buffer what `read_into` does, for a posting: the peer is asked to send."""


class ReachAttempt(Protocol):
    """An attempt to reach a peer rank."""

    def cancel(self) -> None:
        """Cancels the attempt: nobody waits for it any more."""


class DataPath(Protocol):
    """One way to move bytes between two ranks, for this rank's memory. Only the mover's thread uses it."""

    @property
    def name(self) -> str: ...

    @property
    def needs_polling(self) -> bool:
        """True if postings and open accesses progress only while `progress` is called."""

    @property
    def peers_need_turns(self) -> bool:
        """True if peers' work on this rank's memory needs `progress`. If not, a new peer may need it to connect.

        Another peer may change the value.
        """

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        """Returns `endpoint` with this path's part filled in, for one peer. Tokens are minted here, each valid once
        under each rank number.

        Raises DataPathUnavailable if this rank's memory cannot be reached this way.
        """

    def withdraw(self, peer: str) -> None:
        """Invalidates the tokens that `offer` made for that peer."""

    def question(self, endpoint: RankEndpoint) -> Question | None:
        """Returns the question to ask the peer's process before `connect`, or None. Raises as `connect` does."""

    def connect(self, endpoint: RankEndpoint, answer: Answer | str) -> Remote:
        """Proves that the peer's memory is reachable this way. Raises DataPathUnavailable with the reason.

        `answer` is the answer to the question, or why there is none. The call never waits for a peer.
        """

    def progress(self) -> None:
        """Gives the library a turn, without blocking."""

    def close(self) -> None:
        """Releases everything in the order that the library needs. Idempotent.

        After it returns, this path accesses neither this rank's memory nor a peer's, also not for pending postings:
        they never become DONE. The path cannot speak for bytes of a write that have left (UNPROVED), nor for
        `WrittenByPeers.late_writes`.
        """


@runtime_checkable
class WrittenByPeers(Protocol):
    """A data path by which peers may write into this rank's memory."""

    @property
    def late_writes(self) -> str:
        """Why a peer's write may still land after `close` or `rekey`; empty if it is proved that none does.

        Other proofs hold all the same: the peer's word, and the end of its process once this path was closed.
        """

    @property
    def ends_with_process(self) -> bool:
        """True if no write of a peer lands after its process is gone."""

    def rekey(self) -> None:
        """Ends all access by what `offer` gave to peers, and starts anew on the same memory.

        Like `close`, it ends its own postings; earlier remotes are closed. Raises DataPathFailed if the old state did
        not end, DataPathUnavailable if no new one could be made: then nothing is offered any more.
        """


@runtime_checkable
class SentByPeers(Protocol):
    """A data path by which bytes move only if both ranks act: the destination asks, the source sends."""

    def bind(self, later: Callable[[Callable[[], None]], None], want: Callable[[str, str, SendAsk], None]) -> None:
        """Sets the callbacks, once and before all else. `later` runs something in the mover's thread. `want` asks a
        peer (its name, the id of the posting, the ask); the answer comes to `answered`.
        """

    def reach(
        self, rank: int, peer: str, endpoint: RankEndpoint, reached: Callable[[Remote | NotMet], None]
    ) -> ReachAttempt:
        """Begins to reach a peer's rank from this rank, number `rank`, in place of `connect`. After the return,
        `reached` gets the remote, or why there is none. Raises DataPathUnavailable, and DataPathFailed for a reason
        that may pass.
        """

    def answered(self, peer: str, answer: SendAnswer) -> None: ...

    def send(self, peer: str, ask: SendAsk, posted: Callable[[Values, NotMet | None], None]) -> None:
        """Sends from this rank. `posted` is called once, at once or later, with the values for the other side or with
        the reason why nothing is sent. The send is then in flight, and the destination decides when it has ended.
        """


@runtime_checkable
class LoadsLibrary(Protocol):
    """A data path whose library takes seconds to load, and is loaded on first use."""

    def load(self) -> None:
        """Loads the library now; called if no other path comes before this one."""


@runtime_checkable
class SaysWhy(Protocol):
    """A data path whose description depends on this rank's memory."""

    @property
    def why(self) -> str:
        """One sentence for people."""
