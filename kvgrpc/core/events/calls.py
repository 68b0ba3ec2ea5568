"""Calls of engines, schedulers and routers.

Each carries a `Call` and is answered exactly once, by a Reply or a Refuse with its id. Random ids enter here.
"""

from enum import Enum
from typing import NamedTuple

from kvgrpc.core.values.block_ids import BlockLists
from kvgrpc.core.values.call import Call, LayerRange
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.request_times import RequestTime


class WaitsFor(Enum):
    """The event that a hand-over waits for."""

    READERS = "readers"
    """Consumers that pull: exactly one part, the last."""
    REGISTRATION = "registration"
    """A registration to push to: any number of parts."""


@dataclass(frozen=True, eq=False)
class FinishedBlocks:
    """Blocks of a whole prompt for readers, or one part of a push. `transfer` is False for GrantLease.

    A part of a push (`waits_for` REGISTRATION) lists whole blocks, group by group. They follow the blocks of the same
    layers in earlier parts. Only the part that reaches the prompt's end may list a partly filled block. The first part
    of an epoch states the whole prompt's content; later parts may omit it. The parts of one epoch share one lease: the
    first part's `lease_id`, which later parts repeat or omit.
    """

    call: Call
    key: bytes
    blocks: BlockLists
    content: ContentId | None
    ttl_s: float | None = None
    consumers: int = 1
    on_abort: OnAbort = OnAbort.RELEASE
    request_id: str = ""
    priority: int = 0
    after_step: int = 0
    lease_id: str = ""
    validate_only: bool = False
    """Nothing changes; the answer has no ids."""
    transfer: bool = True
    labels: tuple[tuple[str, str], ...] = ()
    waits_for: WaitsFor = WaitsFor.READERS
    last: bool = True
    """The final part: this and the earlier parts hold every block of the content, in all layers."""
    layers: LayerRange | None = None
    """Layers that this part covers; None: all."""
    part_epoch: int = 0
    """Raised when the prefill starts over: the first part of a higher epoch replaces all parts of lower epochs."""
    failure: str = ""
    """Why the source cannot deliver. If not empty, the push ends at once, and only `key` matters beside it."""
    allocation_id: str = ""
    """The allocation that owns all blocks; empty: not checked."""
    firm_ttl_s: float | None = None
    """Time for which an unclaimed lease is not taken back, in seconds; None: the default."""
    request_time_us: int = 0
    """The time when the request began; 0: not known."""
    takes_registrations: bool = False
    """The hand-over to readers becomes a push if a destination registers under its key."""
    expected: bool = False
    """The engine will compute a push under `key`; only `key` matters beside this."""
    tenant: str = ""
    """Tenant of the lease; empty: the caller's."""
    bound_to: str = ""
    """Name of the one consumer that may use the grant; empty: any of the tenant."""
    stands_for: tuple[str, ...] = ()
    """Live leases of these same blocks, for one consumer each: a read under this lease counts as a read under each of
    them.
    """


@dataclass(frozen=True, eq=False)
class RegisterPush:
    """Tells the source of a push where the blocks go: answered by Registered. It may come before, between or after the
    parts.

    FinishedBlocks and RegisterPush are paired by the exact transfer key of the grant. The same grant again is the same
    registration; another grant for the same key is refused.
    """

    call: Call
    token: bytes
    """The WRITE grant."""
    request_id: str = ""
    access_id: bytes = b""
    """16 random bytes: id of the WRITE access to open at the destination."""
    reverse_access_id: bytes = b""
    """16 random bytes: id of the READ access for the destination, if the destination moves the bytes."""
    validate_only: bool = False


@dataclass(frozen=True)
class PushSource:
    """The lead that the blocks of a push come from."""

    address: str
    engine_id: str = ""
    """The engine that must answer there; empty: any."""


@dataclass(frozen=True, eq=False)
class ReserveBlocks:
    """Reserves blocks for a push to fill: answered by BlocksReserved.

    The blocks are those from the first block that is not wholly held (`have_tokens`), or that a window begins in, to
    the block of the last token used. With `source` this lead registers the push there by itself; without it the grant
    must reach the source some other way.
    """

    call: Call
    key: bytes
    blocks: BlockLists
    content: ContentId | None
    have_tokens: int = 0
    use_tokens: int = 0
    """K: a multiple of 16 or the whole content; 0: the whole content."""
    source: PushSource | None = None
    request_id: str = ""
    priority: int = 0
    after_step: int = 0
    """The last engine step that touches the blocks: no byte moves before every rank reported it done."""
    registration_timeout_s: float | None = None
    """Maximum time for the source's first part, and then for each next part, in seconds."""
    validate_only: bool = False
    allocation_id: str = ""
    """The allocation that owns all blocks; empty: not checked."""
    allow_prefix: bool = False
    """See PullBlocks."""


@dataclass(frozen=True, eq=False)
class Destination:
    """The blocks that a pull fills: nothing moves when no group has a block."""

    blocks: BlockLists
    have_tokens: int = 0
    allocation_id: str = ""
    """The allocation that owns all blocks; empty: not checked."""


@dataclass(frozen=True, eq=False)
class PullBlocks:
    """Starts a pull: answered by PullStarted."""

    call: Call
    token: bytes
    content: ContentId | None
    access_id: bytes
    use_tokens: int = 0
    destination: Destination | None = None
    key: bytes = b""
    request_id: str = ""
    priority: int = 0
    after_step: int = 0
    queue_timeout_s: float | None = None
    transfer_timeout_s: float | None = None
    validate_only: bool = False
    request_time_us: int = 0
    """The time when the request began; 0: the time of the request that handed over."""
    allow_prefix: bool = False
    """If the source's tokens differ from some point on, the pull accepts the common prefix."""


@dataclass(frozen=True, eq=False)
class GiveDestination:
    """PullBlocks by transfer id: gives an earlier pull its blocks."""

    call: Call
    transfer_id: str
    destination: Destination
    after_step: int = 0
    validate_only: bool = False
    key: bytes = b""
    """The request's transfer key. If stated, it must be the pull's."""


class LeaseRef(NamedTuple):
    """A lease by id, by a grant's token, or by its transfer key."""

    lease_id: str = ""
    token: bytes = b""
    key: bytes = b""


@dataclass(frozen=True)
class RenewLeases:
    """Extends leases, row by row: answered by Renewed."""

    call: Call
    leases: tuple[LeaseRef, ...]
    ttl_s: float | None = None
    for_access: bool = False
    """The caller has an open access on each lease. The access is the caller's claim, so the renewal adds none."""
    validate_only: bool = False
    """Nothing is renewed: the rows show the leases unchanged."""
    reading: tuple[bytes, ...] = ()
    """Accesses under which the caller now reads."""
    source: PushSource | None = None
    """Another lead that has the leases. All rows must name keys, and the answer has no rows."""


@dataclass(frozen=True)
class ReleaseLease:
    """Ends a lease before its time: answered by Released."""

    call: Call
    lease: LeaseRef
    validate_only: bool = False


class CancelScope(Enum):
    """The sides that a cancel ends."""

    BOTH = "both"
    """The other side is told, and ends CANCELLED too."""
    THIS_SIDE = "this_side"
    """The other side sees a consumer that failed, or a source that took its blocks back."""
    ON_ABORT = "on_abort"
    """Like BOTH, but a destination tells its source of an abort: the grant says what an abort means there."""


@dataclass(frozen=True)
class CancelTransfer:
    """Cancels one transfer by its id, or all of this engine under a key. An unknown key is refused from now on."""

    call: Call
    transfer_id: str = ""
    key: bytes = b""
    message: str = ""
    scope: CancelScope = CancelScope.BOTH
    free_allocation_ids: tuple[str, ...] = ()
    """Allocations to free as well, as FreeBlocks does."""
    validate_only: bool = False
    """Nothing is cancelled: the answer has the outcome that the cancel would have."""


@dataclass(frozen=True)
class AcknowledgeTransfers:
    """The engine has seen the end of these transfers."""

    call: Call
    transfer_ids: tuple[str, ...]
    validate_only: bool = False


@dataclass(frozen=True)
class AllocateBlocks:
    """Takes blocks, or renews the TTL of an earlier allocation. Without `ttl_s` and `no_expiry` an allocation has the
    default TTL; an allocation of the engine's session has none.
    """

    call: Call
    counts: tuple[tuple[int, int], ...]
    ttl_s: float | None = None
    allocation_id: str = ""
    no_expiry: bool = False
    """The allocation never expires."""
    reclaim: bool = False
    """Soft leases may be ended if too few blocks are free."""
    validate_only: bool = False
    by: RequestTime | None = None
    """See ReclaimBlocks."""
    request_id: str = ""
    """The request id that the caller states, for listings of allocations."""
    label: str = ""


@dataclass(frozen=True)
class ReclaimBlocks:
    """Ends leases so that the pool's owner gets these blocks (group, count) beside the free ones: answered by
    Reclaimed.
    """

    call: Call
    counts: tuple[tuple[int, int], ...]
    validate_only: bool = False
    """Nothing is reclaimed: the answer names the leases that would end."""
    by: RequestTime | None = None
    """The oldest request that waits for the blocks: weak claims of younger requests yield to it. None: no request
    waits.
    """


@dataclass(frozen=True, eq=False)
class FreeBlocks:
    """Returns blocks to a pool that this server manages: answered by Freed."""

    call: Call
    blocks: BlockLists = ()
    allocation_id: str = ""
    """The allocation that owns all blocks, if stated. Without blocks: the allocation, of which all that is left is
    freed.
    """
    validate_only: bool = False


@dataclass(frozen=True)
class GiveAllocation:
    """Gives an allocation to another owner: answered by Allocated. The lead's staging store takes the pages of a put
    tensor this way, and returns them.
    """

    call: Call
    allocation_id: str
    owner: str


@dataclass(frozen=True)
class ConnectPeer:
    """A router wants the handshake done now: answered by PeerConnected."""

    call: Call
    address: str
    engine_id: str = ""
    validate_only: bool = False


@dataclass(frozen=True)
class ReleaseQuarantine:
    """Ends quarantines: by re-key, or, with `force`, because an operator says that nothing writes any more."""

    call: Call
    force: bool = False
    transfer_ids: tuple[str, ...] = ()
    """Transfers whose blocks `force` releases; empty: all."""
    why: str = ""
    """The reason, for the log; required with `force`."""
    validate_only: bool = False
    """Nothing is released: the answer says how many blocks the call would ask for."""


@dataclass(frozen=True)
class StartDrain:
    """Stops taking new work: answered by DrainChanged."""

    call: Call
    reason: str = ""
    """The reason, for people; empty: the reason of the drain so far stays."""
    validate_only: bool = False


@dataclass(frozen=True)
class CancelDrain:
    """Takes new work again: answered by DrainChanged."""

    call: Call
    validate_only: bool = False
