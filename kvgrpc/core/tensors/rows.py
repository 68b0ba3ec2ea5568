"""Rows of the table of tensors, its limits, and the effects that it asks of the shell."""

from enum import Enum
from typing import TypeVar

from kvgrpc.core.tensors.descriptions import ANY, Description, ExpectedTensor, LeadAddress, TensorId
from kvgrpc.core.values.owners import ANONYMOUS, ENGINE_SIDE, Thing, ThingKind, Verb, may, meet
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import KVGrpcError, Reason


@dataclass(frozen=True)
class TensorLimits:
    """Bounds of the tensor rows that a lead keeps."""

    tensors: int = 65_536
    """Maximum number of tensors here or on their way, and separately of tensors kept for others."""
    waits: int = 4_096
    """Maximum number of calls that wait for a tensor."""
    tombstones: int = 65_536
    """Maximum number of ended keys and tensors that are remembered. Beyond it the oldest is forgotten."""
    tombstone_s: float = 120.0
    """Time in seconds for which ended names are remembered. No put is that late."""
    spill_pages: int = 0
    """Number of pages outside the store for tensors that nobody has asked for."""
    held_s: float = 600.0
    """Time in seconds for which an RPC caller holds a tensor after it last asked for it."""
    kept_s: float = 600.0
    """Maximum age in seconds of a tensor that nobody has asked for, however often it is renewed."""


TENSOR_BYTES = 3_000
"""Estimated bytes of a tensor here or kept for others: its name, description, deadline and row in the ledger."""
LEAD_BYTES = 250
"""Estimated bytes of a lead to which a tensor is sent, without its texts."""


class TensorStage(Enum):
    """The stage of a tensor of another engine."""

    ARRIVING = "arriving"
    STORED = "stored"
    SPILLING = "spilling"
    """The tensor is being copied out of the store, and stays in its pages until that is over."""
    SPILLED = "spilled"
    RETURNING = "returning"
    """The tensor is wanted in the store again, and waits for pages or is being copied into them."""
    HELD = "held"
    """The engine or an RPC caller has the tensor until it is released."""


STAGES: dict[TensorStage, frozenset[TensorStage]] = {
    TensorStage.ARRIVING: frozenset({TensorStage.STORED}),
    TensorStage.STORED: frozenset({TensorStage.SPILLING, TensorStage.HELD}),
    TensorStage.SPILLING: frozenset({TensorStage.SPILLED, TensorStage.STORED}),
    TensorStage.SPILLED: frozenset({TensorStage.RETURNING}),
    TensorStage.RETURNING: frozenset({TensorStage.STORED, TensorStage.SPILLED}),
    TensorStage.HELD: frozenset({TensorStage.STORED}),
}
"""Allowed next stages of each stage. In any stage a tensor may be dropped."""


@dataclass(eq=False)
class Tensor:
    """A tensor of another engine: here, or on its way."""

    id: TensorId
    described: Description
    pages: int
    peer: str
    """The peer that it comes from."""
    since: float
    """Time at which it got into its stage."""
    ttl_s: float
    """Time in seconds for which it is kept after it was stored, if nobody asks for it."""
    number: int = 0
    """Number in the order in which the life's tensors were made known."""
    made: float = 0.0
    """Time at which it was made known."""
    stage: TensorStage = TensorStage.ARRIVING
    allocation_id: str = ""
    """Allocation of its pages in the store. Empty while it has none."""
    transfer_id: str = ""
    slots: tuple[int, ...] = ()
    """Its pages outside the store."""
    copying: bool = False
    """True while the shell copies it. If it is dropped meanwhile, its memory is given back after the copy."""
    gone: bool = False
    """True when it was dropped."""
    holder: str = ""
    """The principal that has it. Empty while nobody has it. The engine takes precedence over others."""

    given: int = 0
    """Number of calls that were given the tensor."""
    tenant: str = ""
    """The tenant that it is of. Empty for the house."""

    def hold(self, now: float, holder: str) -> None:
        """Gives the tensor to a principal, for the first time or again."""
        self.given += 1
        if self.stage is not TensorStage.HELD:
            self.move_to(TensorStage.HELD, now)
        if self.holder not in ENGINE_SIDE:
            self.holder = holder

    def outlasts(self, reason: Reason, caller: str) -> bool:
        """Returns whether the tensor stays when its request ends for that reason. Its holder has a view on its memory,
        so nobody else can say that the holder is done with it.
        """
        ends = reason is not Reason.CANCELLED and may(caller, Verb.END, Thing(ThingKind.HELD_TENSOR, self.holder))
        return self.stage is TensorStage.HELD and not ends

    def move_to(self, stage: TensorStage, now: float) -> None:
        """Moves the tensor to its next stage. Asserts that `STAGES` allows it."""
        assert stage in STAGES[self.stage], f"{self.stage} -> {stage}"
        self.stage, self.since = stage, now


@dataclass(eq=False)
class TensorOffer:
    """A tensor of this engine that is kept for others under a lease."""

    id: TensorId
    described: Description
    pages: int
    allocation_id: str
    """The allocation in which it was put. Its pages are the lease's by now."""
    consumers: tuple[LeadAddress, ...]
    """Leads to which it is sent. Empty when it is fetched."""
    since: float
    consumer_count: int = 1
    number: int = 0
    """Number in the same order as `Tensor.number`."""
    token: bytes = b""
    """The READ grant. Empty until the hand-over stands."""
    transfer_id: str = ""
    lent: str = ""
    """Transfer by which its consumer reads it with others. Empty for none."""
    payer: str = ""
    """The principal whose share of the kept bytes it uses."""
    ttl_s: float | None = None
    """Time in seconds for which it is kept after it was put, or after somebody last waited for a tensor of its request.
    None means the lead's default.
    """
    refused: KVGrpcError | None = None
    """Reason why a consumer to which it was sent does not have it."""
    tenant: str = ""
    """The tenant that it is of. Empty for the house."""

    @property
    def kept_bytes(self) -> int:
        """Estimated bytes of this row."""
        texts = sum([LEAD_BYTES + len(at.address) + len(at.engine_id) for at in self.consumers])
        return TENSOR_BYTES + len(self.token) + texts

    @property
    def made(self) -> float:
        """Time at which it was made known."""
        return self.since

    @property
    def may_go_together(self) -> bool:
        """True when it is kept for one consumer, and is not on its way to it with others."""
        return bool(self.token) and not self.consumers and self.consumer_count == 1 and not self.lent

    def is_same(self, other: "TensorOffer") -> bool:
        """Returns whether both offers are of one put that was made twice. An allocation is handed over once."""
        own = self.described, self.allocation_id, self.consumers, self.consumer_count, self.tenant
        others = other.described, other.allocation_id, other.consumers, other.consumer_count, other.tenant
        return own == others


_Row = TypeVar("_Row", Tensor, TensorOffer)


def seen(row: _Row | None, tenant: str) -> _Row | None:
    """Returns a row as callers of a tenant see it: None where it is another tenant's."""
    return row if row is not None and meet(tenant, row.tenant) else None


class Purpose(Enum):
    """The condition that a call waits for."""

    STORED = "stored"
    """The tensor is here: the end of a put."""
    GIVEN = "given"
    """The caller may use the tensor, and holds it then."""
    OFFERED = "offered"
    """The tensor is kept here for others."""


@dataclass(frozen=True)
class TensorWait:
    """One call that waits."""

    number: int
    id: TensorId
    purpose: Purpose
    deadline: float
    expected: ExpectedTensor = ANY
    fetches: bool = False
    """True when it also asks a source for the tensor."""
    caller: str = ANONYMOUS
    """The principal that asks."""
    payer: str = ""
    """The principal whose share of the kept bytes it uses."""
    tenant: str = ""
    """The tenant that asks. Empty for the house, which sees the tensors of all."""


@dataclass(frozen=True)
class AnswerCall:
    """The call gets the result that it waits for, or an error."""

    wait: int
    result: Tensor | TensorOffer | KVGrpcError


@dataclass(frozen=True)
class Drop:
    """A tensor is wanted no more. Its transfer ends, and its memory comes back."""

    tensor: Tensor


@dataclass(frozen=True)
class Withdraw:
    """An offer is kept no more."""

    offer: TensorOffer


@dataclass(frozen=True)
class Renew:
    """Somebody waits for more tensors of a request. Its offers are kept for their TTL from now on."""

    offers: tuple[TensorOffer, ...]


@dataclass(frozen=True)
class BringBack:
    """A tensor outside the store is wanted in it."""

    tensor: Tensor


@dataclass(frozen=True)
class Fetch:
    """A tensor that was put for a call does not come. Its source is asked, unless that is under way."""

    wait: int


Effect = AnswerCall | Drop | Withdraw | Renew | BringBack | Fetch
