"""Rows that wait: for a peer's answer, an opening's missing condition, checksums, mirrors or a re-key."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvgrpc.core.actions import SendClose
from kvgrpc.core.events import Opened
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.pieces import RankChecksums
from kvgrpc.errors import KVGrpcError


@dataclass
class Closes:
    """Closes of accesses that their issuers have not answered."""

    kept: dict[str, dict[bytes, SendClose]] = field(default_factory=dict)
    """All closes by life and access, oldest first. Those that are not in `sent` wait for the issuer's next handshake:
    the issuer was declared dead, or refused them too many times.
    """
    sent: dict[bytes, SendClose] = field(default_factory=dict)
    """Closes under way, or to be sent again after a delay."""
    following: dict[bytes, SendClose] = field(default_factory=dict)
    """Closes to send for an access once the close under way is answered. An answer names only the access."""
    tries: dict[bytes, int] = field(default_factory=dict)
    """Number of times that a sent close was sent again."""
    unsent: dict[str, dict[bytes, SendClose]] = field(default_factory=dict)
    """Closes by address, for issuers that are still being reached. A close that names a life had reached it before."""
    retries: dict[str, int] = field(default_factory=dict)
    """Life -> number of times it was dialled again, for dead lives that may wait for a proof."""

    @property
    def nbytes(self) -> int:
        """Sum of the weights of all closes."""
        return sum(send.kept_bytes for rows in self.kept.values() for send in rows.values())

    def parked(self, life: str) -> list[SendClose]:
        """Returns the closes that wait for the next handshake of a life, oldest first."""
        return [send for access_id, send in self.kept.get(life, {}).items() if access_id not in self.sent]


@dataclass(eq=False)
class OpenCall:
    """An OpenAccess call. It is answered when its last row is."""

    id: int
    rows: list[Opened | KVGrpcError | None]
    left: int
    blocks: int = 0
    """Maximum number of blocks that its answer names so far."""


@dataclass
class WaitingOpenings:
    """Accesses that peers requested and that are not open yet."""

    rows: dict[bytes, list[tuple[OpenCall, int]]] = field(default_factory=dict)
    """Waiting rows, by access id."""
    missing: dict[tuple[str, str], dict[bytes, None]] = field(default_factory=dict)
    """Waiting accesses, by the missing condition and whose it is."""
    early: dict[str, dict[bytes, None]] = field(default_factory=dict)
    """Accesses that were closed before their lease was announced, by lease id."""


Places = list[slice]
"""Byte ranges of a lease's checksums, the same for every rank."""


@dataclass(eq=False)
class ChecksumAsk:
    """A ChecksumBlocks call for which the ranks compute."""

    call: int
    access: Access
    portions: Iterator[list[tuple[Blocks, LayerRange | None]]]
    next: list[tuple[Blocks, LayerRange | None]] | None
    """The next portion. None after the last one."""
    found: list[tuple[bytes, ...]] = field(default_factory=list)
    """Checksums of each portion, by rank."""

    @property
    def name(self) -> str:
        """The name of its portions at the ranks."""
        return f"s{self.call}"


@dataclass
class ChecksumAsks:
    """Calls of peers that wait for checksums."""

    waiting: dict[str, ChecksumAsk] = field(default_factory=dict)
    """Calls by name."""
    queue: dict[str, dict[str, ChecksumAsk]] = field(default_factory=dict)
    """Calls whose next portion is not begun, by peer and name. Peers take turns."""
    running: dict[str, tuple[ChecksumAsk, RankChecksums]] = field(default_factory=dict)
    """Portions that the ranks compute, by name, also for calls that no longer wait."""


@dataclass(eq=False)
class PrefetchTurn:
    """The lease whose checksums are being computed ahead. `lease` is None once it has ended."""

    lease: Lease | None
    name: str
    """The name at the ranks."""
    awaited: RankChecksums


@dataclass
class Prefetch:
    """Leases whose checksums are computed before a destination asks."""

    queue: dict[str, Lease] = field(default_factory=dict)
    """Leases that wait for their turn, by id."""
    turn: PrefetchTurn | None = None
    nbytes: int = 0
    """Bytes of checksums that are kept or being computed."""
    waiting: dict[int, tuple[Access, Places]] = field(default_factory=dict)
    """Calls that wait for the lease whose turn it is."""

    @property
    def idle(self) -> bool:
        """True when nothing is computed and nothing waits."""
        return self.turn is None and not self.queue


@dataclass(eq=False)
class MirrorCopy:
    """A hand-over, or a part of a push, that is copied into the mirrors."""

    lease: Lease
    number: int
    """Number of the part. A hand-over to readers is part 0."""
    after_step: int
    layers: LayerRange | None
    portions: Iterator[list[tuple[Blocks, LayerRange | None]]]
    """Portions that are not begun."""
    running: int = 0
    """Number of portions that the ranks are copying."""
    begun: bool = False
    """True when all portions are begun."""


@dataclass(eq=False)
class MirrorPortion:
    """A portion that ranks are copying."""

    copy: MirrorCopy
    ranks: set[int]
    """Ranks that have not answered."""
    since: float


@dataclass
class Mirrors:
    """Copies into the mirrors."""

    stepping: list[MirrorCopy] = field(default_factory=list)
    """Copies that wait for their step, in the order of the hand-overs."""
    queue: list[MirrorCopy] = field(default_factory=list)
    """Copies that may begin, in the order in which their steps finished."""
    running: dict[str, MirrorPortion] = field(default_factory=dict)
    """Portions that ranks are copying, by name, oldest first, also of ended leases."""
    begun: int = 0
    """Number of portions ever begun."""

    def drop(self, lease: Lease) -> None:
        """Begins no further copy of an ended lease."""
        self.stepping = [copy for copy in self.stepping if copy.lease is not lease]
        self.queue = [copy for copy in self.queue if copy.lease is not lease]


@dataclass
class Proofs:
    """Facts about writes into this engine's memory that may go on, and the re-key that ends them."""

    processes_ended: dict[str, dict[tuple[int, int], bool]] = field(default_factory=dict)
    """Life -> pairs (our rank, its rank) whose process at the peer has ended -> whether nothing that it sent still
    arrives.
    """
    rekeying_ranks: set[int] = field(default_factory=set)
    """Ranks that have not reported the end of the re-key."""
    unproved: set[int] = field(default_factory=set)
    """Ranks whose re-key proved nothing about peers' writes."""
    doubted: dict[str, set[int]] = field(default_factory=dict)
    """Life -> such ranks in all re-keys since it may write. A later re-key covers other data paths than it used."""
    calls: list[int] = field(default_factory=list)
    """ReleaseQuarantine calls that wait for the re-key."""
    before: int = 0
    """Number of blocks in quarantine when the re-key began."""
    next_at: float = 0.0
    """Earliest time of another re-key."""
    tried: frozenset[str] = frozenset()
    """Owners still in quarantine after the last re-key. Another re-key does not help them."""
    quarantines_tried: int = 0
    """Value of `PinTable.quarantines` when everything left had been tried. Until it grows, no re-key is due."""
