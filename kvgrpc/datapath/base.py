"""The seam between the mover and the libraries that move bytes.

A data path knows memory, endpoints and runs. It knows no gRPC, no lease and no block id, never waits for a peer's
goodwill without a bound, and reports an end only when it knows that no further access of its own can follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from kvgrpc.core.values.descriptors import Runs
from kvgrpc.core.values.endpoints import RankEndpoint, Segment
from kvgrpc.core.values.sends import SendAnswer, SendAsk, Values
from kvgrpc.core.values.strips import Strip
from kvgrpc.datapath.questions import Answer, Question
from kvgrpc.errors import KVGrpcError, Reason


class PostingState(Enum):
    """Where one posting is."""

    PENDING = "pending"
    DONE = "done"
    """All bytes are in the destination and visible to this process."""
    FAILED = "failed"
    """Some bytes may have arrived; the library guarantees that no access follows."""
    UNPROVED = "unproved"
    """Of a write: it is over here, and this rank's memory at rest, but bytes that have left may still land in the
    peer's memory."""


class DataPathUnavailable(KVGrpcError):
    """This data path cannot reach that rank; `str()` says why."""

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

    @property
    def nonce(self) -> bytes:
        """Random bytes that stand at `nonce_address` as long as this memory is this process's."""
        ...

    @property
    def nonce_address(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Buffer:
    """A piece of a rank's staging arena, which is host memory."""

    segment: Segment
    arena: Segment
    """All of it: data paths that register memory register this, once, and never offer it."""
    keeps: object
    """Keeps it mapped."""


class Posting(Protocol):
    """One submission to a data path."""

    def poll(self) -> PostingState:
        """Never blocks. Once it is not PENDING it keeps answering the same."""
        ...

    @property
    def error(self) -> str:
        """Why it FAILED or is UNPROVED; empty otherwise."""
        ...


class PeerProcess(Protocol):
    """The process of a peer rank on this host, held: its end can be seen, and is never that of another one."""

    @property
    def ended(self) -> bool: ...

    def close(self) -> None:
        """Lets go of it. Idempotent."""
        ...


class Remote(Protocol):
    """A connected peer rank: what `DataPath.connect` proved and mapped."""

    @property
    def why(self) -> str:
        """One sentence: how the bytes will move (mapping, process_vm_readv, UCX transport)."""
        ...

    @property
    def process(self) -> PeerProcess | None:
        """Who has that memory, and writes into this rank's where peers write; None where its end cannot be seen.

        The caller's, also after `close`.
        """
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


@runtime_checkable
class PromptRemote(Remote, Protocol):
    """A peer rank from which little is read sooner than another thread is woken."""

    def ends_at_once(self, runs: Runs) -> bool:
        """Whether a read of these runs is over when `read` returns, which waits for nobody.

        Any thread may then start it, while no other starts one on this peer or closes it.
        """
        ...


@runtime_checkable
class SlicingRemote(Remote, Protocol):
    """A peer rank from which bytes come slice by slice."""

    def read_slices(
        self, runs: Runs, ends: Sequence[int], arrived: Callable[[int], None], wake: Callable[[], None]
    ) -> Posting:
        """As `read`. Slice i ends after `ends[i]` bytes of `runs`, where a run does, too; `arrived` hears within this
        call or a `poll` that its bytes are there.
        """
        ...


@runtime_checkable
class StagingRemote(Remote, Protocol):
    """A peer rank from which bytes may come into a staging buffer."""

    def read_into(self, buffer: Buffer, runs: Runs, wake: Callable[[], None]) -> Posting:
        """As `read`, with offsets in the buffer as `runs.dst`."""
        ...


@runtime_checkable
class StripsRemote(Remote, Protocol):
    """A peer rank out of whose memory strips are copied to where they belong, without a staging buffer."""

    def read_strips(self, strips: Sequence[Strip], wake: Callable[[], None]) -> Posting:
        """As `read`, of strips that were checked, with offsets in the peer's memory as sources."""
        ...


@runtime_checkable
class WritableRemote(Remote, Protocol):
    """A peer rank whose memory this rank may write, too.

    Only where the source may move the bytes. Where ranks share a host's memory no peer ever holds a
    writable mapping: those paths have remotes without `write`.
    """

    def write(self, runs: Runs, wake: Callable[[], None]) -> Posting:
        """As `read`, of this rank's `runs.src` into the peer's `runs.dst`.

        DONE means that the bytes are in the peer's memory, whatever the peer does.
        """
        ...


@runtime_checkable
class SentRemote(Remote, Protocol):
    """A peer rank that sends what is read, when it is asked to."""

    def read_sent(self, posting_id: str, runs: Runs, wake: Callable[[], None], buffer: Buffer | None = None) -> Posting:
        """As `read`, or with a buffer as `read_into`, of a posting: the peer is asked for its sake."""
        ...


class Reaching(Protocol):
    """A peer rank that is being reached."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        ...


class DataPath(Protocol):
    """One way to move bytes between two ranks, for this rank's memory. Used from the mover's thread only."""

    @property
    def name(self) -> str: ...

    @property
    def needs_polling(self) -> bool:
        """Whether postings and open accesses progress only while `progress` is called."""
        ...

    @property
    def peers_need_turns(self) -> bool:
        """Whether what peers do with this rank's memory does. Where it does not, a new peer connects by them still.

        Another peer may change it.
        """
        ...

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        """`endpoint` with this path's part filled in, for one peer (tokens that are good once under each rank number
        are minted here).

        Raises DataPathUnavailable where this rank's memory cannot be reached this way.
        """
        ...

    def withdraw(self, peer: str) -> None:
        """The tokens that `offer` made for that peer are good for nothing any more."""
        ...

    def question(self, endpoint: RankEndpoint) -> Question | None:
        """What the peer's process is to be asked before `connect`; None: nothing. Raises as `connect` does."""
        ...

    def connect(self, endpoint: RankEndpoint, answer: Answer | str) -> Remote:
        """Proves that the peer's memory is reachable this way. Raises DataPathUnavailable with the reason.

        `answer`: what came of the question, or why nothing did. Never waits for a peer.
        """
        ...

    def progress(self) -> None:
        """Gives the library a turn; never blocks."""
        ...

    def close(self) -> None:
        """Releases everything in the order the library needs. Idempotent.

        When it returns, no access of this path to this rank's memory follows, nor any that it makes
        to a peer's, also not of postings that are pending: those never become DONE any more. What it
        cannot speak for are bytes of a write that have left (UNPROVED), and `WrittenByPeers.late_writes`.
        """
        ...


@runtime_checkable
class WrittenByPeers(Protocol):
    """A data path by which peers may write into this rank's memory."""

    @property
    def late_writes(self) -> str:
        """Why a peer's write may still land after `close` or `rekey`, as text; empty: it is proved that none does.

        Other proofs hold all the same: the peer's word, and the end of its process once this path was closed.
        """
        ...

    @property
    def ends_with_process(self) -> bool:
        """Whether nothing of a peer's lands any more once its process is gone."""
        ...

    def rekey(self) -> None:
        """Ends all that peers can do with what `offer` gave them, and begins anew on the same memory.

        Like `close`, ends its own postings; remotes of before are closed. Raises DataPathFailed when the old one
        did not end, DataPathUnavailable when no new one could be made: then nothing is offered any more.
        """
        ...


@runtime_checkable
class SentByPeers(Protocol):
    """A data path by which bytes move only if both ranks act: the destination asks, the source sends."""

    def bind(self, later: Callable[[Callable[[], None]], None], want: Callable[[str, str, SendAsk], None]) -> None:
        """Once, before all else. `later` has the mover's thread do something; `want` asks a peer (its name, the posting
        for whose sake, what), which comes to `answered`.
        """
        ...

    def reach(self, rank: int, peer: str, endpoint: RankEndpoint, reached: Callable[[Remote | str], None]) -> Reaching:
        """In place of `connect`: begins to reach a peer's rank from this one, number `rank`; `reached` hears, after
        this has returned, its remote, or why there is none. Raises DataPathUnavailable.
        """
        ...

    def answered(self, peer: str, answer: SendAnswer) -> None:
        """What came of an ask."""
        ...

    def send(self, peer: str, ask: SendAsk, posted: Callable[[Values, str], None]) -> None:
        """This rank sends. `posted` hears once, at once or later, with what the other side has to know, or why nothing
        is sent; then the send is under way, and its end is the destination's to conclude.
        """
        ...


@runtime_checkable
class LoadsLibrary(Protocol):
    """A data path whose library takes seconds to load, which is done when it is used first."""

    def load(self) -> None:
        """Loads it now: where no other path comes before this one."""
        ...


@runtime_checkable
class SaysWhy(Protocol):
    """A data path of which what is to be said depends on this rank's memory."""

    @property
    def why(self) -> str:
        """One sentence, for people."""
        ...
