"""What waits: for the answer of a peer, for what an opening misses, for checksums, for mirrors, for a re-key."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvgrpc.core.actions import SendClose
from kvgrpc.core.events import Opened
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.pieces import RankChecksums
from kvgrpc.errors import KVGrpcError


@dataclass
class Closes:
    """Closes of accesses that their issuers have not answered."""

    sent: dict[bytes, SendClose] = field(default_factory=dict)
    following: dict[bytes, SendClose] = field(default_factory=dict)
    """What is to be said of an access once the close under way is answered: an answer names no more than that."""
    unsent: dict[str, dict[bytes, SendClose]] = field(default_factory=dict)
    """Closes by address, for issuers that are still being reached; those that name a life reached it before."""
    parked: dict[str, dict[bytes, SendClose]] = field(default_factory=dict)
    """Closes by life, for issuers that were declared dead."""
    retries: dict[str, int] = field(default_factory=dict)
    """How often each of those was dialled again, of those that may wait for a proof."""


@dataclass(eq=False)
class OpenCall:
    """An OpenAccess call, which is answered when its last row is."""

    id: int
    rows: list[Opened | KVGrpcError | None]
    left: int
    blocks: int = 0
    """That its answer names at most, so far."""


@dataclass
class WaitingOpenings:
    """Accesses that peers asked for and that are not open yet."""

    rows: dict[bytes, list[tuple[OpenCall, int]]] = field(default_factory=dict)
    """Rows that wait, by access id."""
    missing: dict[tuple[str, str], dict[bytes, None]] = field(default_factory=dict)
    """Accesses that wait, by what they miss and whose it is."""
    early: dict[str, dict[bytes, None]] = field(default_factory=dict)
    """Accesses that were closed before their lease was announced, by lease id."""


Places = list[slice]
"""Which bytes of a lease's checksums are wanted, of every rank."""


@dataclass(eq=False)
class ChecksumAsk:
    """A ChecksumBlocks call for which the ranks compute."""

    call: int
    access: Access
    portions: Iterator[list[tuple[Blocks, LayerRange | None]]]
    next: list[tuple[Blocks, LayerRange | None]] | None
    """The portion that comes next; None: that was the last one."""
    found: list[tuple[bytes, ...]] = field(default_factory=list)
    """Checksums of each portion, by rank."""

    @property
    def name(self) -> str:
        """The ranks know its portions by that."""
        return f"s{self.call}"


@dataclass
class ChecksumAsks:
    """Calls of peers that wait for checksums."""

    waiting: dict[str, ChecksumAsk] = field(default_factory=dict)
    """Calls by name."""
    queue: dict[str, dict[str, ChecksumAsk]] = field(default_factory=dict)
    """Those whose next portion is not begun: by peer, whose turns they have, and by name."""
    running: dict[str, tuple[ChecksumAsk, RankChecksums]] = field(default_factory=dict)
    """Portions that the ranks are at, by name; also of calls that wait no longer."""


@dataclass(eq=False)
class PrefetchTurn:
    """The lease whose checksums are being computed ahead; None once it has ended."""

    lease: Lease | None
    name: str
    """The ranks know it by that."""
    awaited: RankChecksums


@dataclass
class Prefetch:
    """Leases whose checksums are computed before a destination asks."""

    queue: dict[str, Lease] = field(default_factory=dict)
    """Leases that wait for their turn, by id."""
    turn: PrefetchTurn | None = None
    nbytes: int = 0
    """Bytes of checksums that are kept, or will be."""
    waiting: dict[int, tuple[Access, Places]] = field(default_factory=dict)
    """Calls that wait for the lease that has its turn."""

    @property
    def idle(self) -> bool:
        """Nothing is computed, and nothing waits for its turn."""
        return self.turn is None and not self.queue


@dataclass(eq=False)
class Copying:
    """A hand-over, or a part of a push, that is copied into the mirrors."""

    lease: Lease
    number: int
    """That of the part."""
    after_step: int
    layers: LayerRange | None
    portions: Iterator[list[tuple[Blocks, LayerRange | None]]]
    """Those that are not begun."""
    running: int = 0
    """Portions that the ranks are at."""
    begun: bool = False
    """All portions are."""


@dataclass(eq=False)
class CopyingPortion:
    """A portion that ranks are at."""

    copying: Copying
    ranks: set[int]
    """Those that have not answered."""
    since: float


@dataclass
class Mirrors:
    """What is copied into the mirrors."""

    stepping: list[Copying] = field(default_factory=list)
    """What waits for its step, in the order of the hand-overs."""
    queue: list[Copying] = field(default_factory=list)
    """What may be copied, in the order in which it may."""
    running: dict[str, CopyingPortion] = field(default_factory=dict)
    """Portions that ranks are at, by name, oldest first; also those of leases that have ended."""
    begun: int = 0
    """Portions that ever were."""

    def drop(self, lease: Lease) -> None:
        """A lease is over: nothing more of it is begun."""
        self.stepping = [copying for copying in self.stepping if copying.lease is not lease]
        self.queue = [copying for copying in self.queue if copying.lease is not lease]


@dataclass
class Proofs:
    """What is known of writes into this engine's memory that may go on, and the re-key that ends them."""

    processes_ended: dict[str, dict[tuple[int, int], bool]] = field(default_factory=dict)
    """For each life the pairs, our rank and its, of which the process of its rank is gone, and whether nothing that it
    sent arrives any more.
    """
    rekeying_ranks: set[int] = field(default_factory=set)
    """Ranks that have not reported of the re-key."""
    unproved: set[int] = field(default_factory=set)
    """Ranks whose re-key proved nothing about what peers write."""
    doubted: dict[str, set[int]] = field(default_factory=dict)
    """For each life such ranks of all re-keys since it may write: a later re-key is of other data paths than it wrote
    by.
    """
    calls: list[int] = field(default_factory=list)
    """ReleaseQuarantine calls that wait for the re-key."""
    before: int = 0
    """Blocks in quarantine when the re-key began."""
    next_at: float = 0.0
    """When there may be another re-key."""
    tried: frozenset[str] = frozenset()
    """What was still in quarantine after the last re-key: another one is of no use to it."""
    quarantines_tried: int = 0
    """How many quarantines there had ever been when all that were left had been tried: until there is another one
    nothing is due.
    """
