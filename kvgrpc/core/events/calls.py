"""Calls of engines, schedulers and routers.

Each carries a `Call` and is answered exactly once, by a Reply or a Refuse with its id. Random ids enter here.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvgrpc.core.values.calls import BlockLists, Call, LayerRange
from kvgrpc.core.values.content import Content
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.core.values.request_times import RequestTime


class WaitsFor(Enum):
    """What a hand-over waits for."""

    READERS = "readers"
    """Consumers that pull: exactly one part, the last."""
    REGISTRATION = "registration"
    """A registration, to push to: any number of parts."""


@dataclass(frozen=True, eq=False)
class FinishedBlocks:
    """Blocks of a whole prompt for readers, or one part of a push. `transfer` is False for GrantLease.

    A part of a push (`waits_for` REGISTRATION) lists whole blocks that follow those of the same layers handed over
    before, group by group; only the one that reaches the prompt's end may list a block that is partly filled. The
    first part of an epoch states the whole prompt's content, later ones may leave it out. The parts of one epoch share
    one lease: `lease_id` of the first, and the same or none on the others.
    """

    call: Call
    key: bytes
    blocks: BlockLists
    content: Content | None
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
    """The final part: it and those before it hold every block of the content, in all layers."""
    layers: LayerRange | None = None
    """Layers that this part covers; None: all."""
    part_epoch: int = 0
    """Raised when the prefill starts over: the first part of a higher epoch replaces all parts of lower ones."""
    failure: str = ""
    """Why the source cannot deliver; not empty ends the push at once, and nothing else is looked at but the key."""
    allocation_id: str = ""
    """The allocation that all blocks are of; empty: not checked."""
    firm_ttl_s: float | None = None
    """How long the lease is not taken back though nobody claims it; None: the default."""
    request_time_us: int = 0
    """When its request began; 0: not known."""
    takes_registrations: bool = False
    """What is handed over to readers is pushed to a destination that registers for it under its key."""
    expected: bool = False
    """The engine computes what is to be pushed under that key; nothing else is looked at."""
    stands_for: tuple[str, ...] = ()
    """Live leases for one consumer each, whose blocks these are: when they are read here, they are read there."""


@dataclass(frozen=True, eq=False)
class RegisterPush:
    """The source of a push learns where the blocks go: answered by Registered. Before, between or after the parts.

    Paired with FinishedBlocks by the exact transfer key of the grant. The same grant again is the same registration;
    another one for the same key is refused.
    """

    call: Call
    token: bytes
    """The WRITE grant."""
    request_id: str = ""
    access_id: bytes = b""
    """16 random bytes: the WRITE access that is opened at the destination."""
    reverse_access_id: bytes = b""
    """16 random bytes: the READ access for the destination, if that moves the bytes."""
    validate_only: bool = False


@dataclass(frozen=True)
class PushSource:
    """Where the blocks of a push come from."""

    address: str
    engine_id: str = ""
    """The engine that must answer there; empty: any."""


@dataclass(frozen=True, eq=False)
class ReserveBlocks:
    """Blocks that a push will fill: answered by Reserved.

    The blocks are those from the first block that is not wholly held (`have_tokens`), or that a window begins in, to
    the one that holds the last token used. With `source` this lead registers the push there by itself; else the grant
    must reach the source.
    """

    call: Call
    key: bytes
    blocks: BlockLists
    content: Content | None
    have_tokens: int = 0
    use_tokens: int = 0
    """K: a multiple of 16 or the whole content; 0: the whole content."""
    source: PushSource | None = None
    request_id: str = ""
    priority: int = 0
    after_step: int = 0
    """Engine step that touches the blocks last: no byte moves before every rank reported it."""
    registration_timeout_s: float | None = None
    """How long the source may take for its first part, and after that for each next one."""
    validate_only: bool = False
    allocation_id: str = ""
    """The allocation that all blocks are of; empty: not checked."""
    allow_prefix: bool = False
    """As in PullBlocks."""


@dataclass(frozen=True, eq=False)
class Destination:
    """Where pulled blocks go: nothing moves when no group has a block."""

    blocks: BlockLists
    have_tokens: int = 0
    allocation_id: str = ""
    """The allocation that all blocks are of; empty: not checked."""


@dataclass(frozen=True, eq=False)
class PullBlocks:
    """A new pull."""

    call: Call
    token: bytes
    content: Content | None
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
    """When its request began; 0: when the one began that handed over."""
    allow_prefix: bool = False
    """Where the source has other tokens from somewhere on, what it has of the same will do."""


@dataclass(frozen=True, eq=False)
class GiveDestination:
    """PullBlocks by transfer id: the blocks of an earlier pull."""

    call: Call
    transfer_id: str
    destination: Destination
    after_step: int = 0
    validate_only: bool = False
    key: bytes = b""
    """The request's transfer key; where it is stated it is the pull's."""


class LeaseRef(NamedTuple):
    """A lease by id, by a grant's token, or by the transfer key that it is under."""

    lease_id: str = ""
    token: bytes = b""
    key: bytes = b""


@dataclass(frozen=True)
class RenewLeases:
    """Extends leases, row by row."""

    call: Call
    leases: tuple[LeaseRef, ...]
    ttl_s: float | None = None
    for_access: bool = False
    """The caller has an access open on each of them, which is its claim; the renewal is none beside it."""
    validate_only: bool = False
    """The rows are those of the leases as they are."""
    reading: tuple[bytes, ...] = ()
    """Accesses under which the caller reads by now."""
    source: PushSource | None = None
    """The lead that they are at, where that is another one: all are named by keys, and no row is answered."""


@dataclass(frozen=True)
class ReleaseLease:
    """Ends a lease before its time."""

    call: Call
    lease: LeaseRef
    validate_only: bool = False


class CancelScope(Enum):
    """Which sides a cancel ends."""

    BOTH = "both"
    """The other side is told, and ends CANCELLED too."""
    THIS_SIDE = "this_side"
    """To the other side it is a consumer that failed, or a source that took its blocks back."""
    ON_ABORT = "on_abort"
    """As BOTH, but what becomes of the source is what the grant says of a consumer that aborts."""


@dataclass(frozen=True)
class CancelTransfer:
    """The transfer by its id, or all of this engine by their key, or those to come where the key is unknown."""

    call: Call
    transfer_id: str = ""
    key: bytes = b""
    message: str = ""
    scope: CancelScope = CancelScope.BOTH
    free_allocation_ids: tuple[str, ...] = ()
    """Freed as well, as by FreeBlocks."""
    validate_only: bool = False
    """The outcome is the one that the cancel would have."""


@dataclass(frozen=True)
class AcknowledgeTransfers:
    """The engine has seen the end of these transfers."""

    call: Call
    transfer_ids: tuple[str, ...]
    validate_only: bool = False


@dataclass(frozen=True)
class AllocateBlocks:
    """Takes blocks, or renews the TTL of an earlier allocation. Without `ttl_s` and `no_expiry` an allocation has the
    default TTL; one of the engine's session has none.
    """

    call: Call
    counts: tuple[tuple[int, int], ...]
    ttl_s: float | None = None
    allocation_id: str = ""
    no_expiry: bool = False
    """It is never freed by itself."""
    reclaim: bool = False
    """Soft leases end where too few blocks are free."""
    validate_only: bool = False
    by: RequestTime | None = None
    """As in ReclaimBlocks."""
    request_id: str = ""
    """As its caller states it, for those who list allocations."""
    label: str = ""


@dataclass(frozen=True)
class ReclaimBlocks:
    """The owner of the pool needs so many more blocks (group, count) than are free: answered by Reclaimed."""

    call: Call
    counts: tuple[tuple[int, int], ...]
    validate_only: bool = False
    """The answer names the leases that would end."""
    by: RequestTime | None = None
    """The oldest request that waits for them, to which weak claims of younger ones yield; None: none does."""


@dataclass(frozen=True, eq=False)
class FreeBlocks:
    """Gives blocks back to a pool that this server manages."""

    call: Call
    blocks: BlockLists = ()
    allocation_id: str = ""
    """The allocation that all blocks are of, where it is stated; without a row of blocks all that is left of it."""
    validate_only: bool = False


@dataclass(frozen=True)
class GiveAllocation:
    """An allocation goes to another owner: the lead's staging store takes the pages of a tensor that is put, or returns
    them. Answered by Allocated.
    """

    call: Call
    allocation_id: str
    owner: str


@dataclass(frozen=True)
class ConnectPeer:
    """A router wants the handshake done now."""

    call: Call
    address: str
    engine_id: str = ""
    validate_only: bool = False


@dataclass(frozen=True)
class ReleaseQuarantine:
    """Memory in quarantine is wanted back: by re-key, or, with `force`, because an operator says that nothing writes
    it.
    """

    call: Call
    force: bool = False
    transfer_ids: tuple[str, ...] = ()
    """With `force`: whose; empty means all."""
    why: str = ""
    """For the log; required with `force`."""
    validate_only: bool = False
    """The answer says how many blocks would be asked for."""


@dataclass(frozen=True)
class Drain:
    """An operator says that no new work is taken, or with `cancel` that it is taken again."""

    call: Call
    cancel: bool = False
    validate_only: bool = False
