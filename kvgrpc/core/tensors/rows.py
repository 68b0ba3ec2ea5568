"""Rows of the table of tensors, its limits, and what it asks the shell to do."""

from dataclasses import dataclass
from enum import Enum

from kvgrpc.core.tensors.calls import LeadAddress
from kvgrpc.core.tensors.values import ANY, Description, Expected, TensorId
from kvgrpc.core.values.owners import ANONYMOUS, ENGINE_SIDE, Kind, Thing, Verb, may
from kvgrpc.errors import KVGrpcError, Reason


@dataclass(frozen=True)
class TensorLimits:
    """Bounds of what a lead remembers of tensors."""

    tensors: int = 65_536
    """Here or on their way, and as many that are kept for others."""
    waits: int = 4_096
    """Calls that wait for a tensor."""
    tombstones: int = 65_536
    """Keys and tensors that have ended; the oldest one is forgotten."""
    tombstone_s: float = 120.0
    """How long what has ended is remembered: no put is as late."""
    spill_pages: int = 0
    """Pages outside of the store for tensors that nobody has asked for."""
    held_s: float = 600.0
    """How long a caller by RPC holds a tensor after it last asked for it."""
    kept_s: float = 600.0
    """How long what nobody has asked for is kept at most, from when it came, however often it is renewed."""


TENSOR_BYTES = 3_000
"""Of a tensor here, or kept for others: with its name, its description, its deadline, and its row in the ledger."""
LEAD_BYTES = 250
"""Of another lead that it is sent to, without its texts."""


class Stage(Enum):
    """Where a tensor of another engine is."""

    ARRIVING = "arriving"
    STORED = "stored"
    SPILLING = "spilling"
    """It is being copied out of the store, and is in its pages until that is over."""
    SPILLED = "spilled"
    RETURNING = "returning"
    """It is wanted in the store again, and waits for pages or is being copied into them."""
    HELD = "held"
    """The engine has it, until it is released."""


STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.ARRIVING: frozenset({Stage.STORED}),
    Stage.STORED: frozenset({Stage.SPILLING, Stage.HELD}),
    Stage.SPILLING: frozenset({Stage.SPILLED, Stage.STORED}),
    Stage.SPILLED: frozenset({Stage.RETURNING}),
    Stage.RETURNING: frozenset({Stage.STORED, Stage.SPILLED}),
    Stage.HELD: frozenset({Stage.STORED}),
}
"""Which stage may follow which; from any of them a tensor may be dropped."""


@dataclass(eq=False)
class Tensor:
    """A tensor of another engine: here, or on its way."""

    id: TensorId
    described: Description
    pages: int
    peer: str
    """Where it comes from."""
    since: float
    """When it got into its stage."""
    ttl_s: float
    """How long it is kept, from when it is stored, if nobody asks for it."""
    number: int = 0
    """Of all tensors of a life, in the order in which they were made known."""
    made: float = 0.0
    """When that was."""
    stage: Stage = Stage.ARRIVING
    allocation_id: str = ""
    """Its pages in the store; empty while it has none."""
    transfer_id: str = ""
    slots: tuple[int, ...] = ()
    """Its pages outside of the store."""
    copying: bool = False
    """The shell copies it: its memory is given back when that is over, though it be dropped."""
    gone: bool = False
    """It was dropped."""
    holder: str = ""
    """The principal that has it; empty while nobody has it. The engine goes before others."""

    given: int = 0
    """How many calls were given it."""

    def hold(self, now: float, holder: str) -> None:
        """That principal has it: for the first time, or once more."""
        self.given += 1
        if self.stage is not Stage.HELD:
            self.move_to(Stage.HELD, now)
        if self.holder not in ENGINE_SIDE:
            self.holder = holder

    def outlasts(self, reason: Reason, caller: str) -> bool:
        """Whether the tensor stays when its request ends so: its holder has a view on its memory, and nobody else can
        say that the holder is done with it.
        """
        ends = reason is not Reason.CANCELLED and may(caller, Verb.END, Thing(Kind.HELD_TENSOR, self.holder))
        return self.stage is Stage.HELD and not ends

    def move_to(self, stage: Stage, now: float) -> None:
        """Its next stage."""
        assert stage in STAGES[self.stage], f"{self.stage} -> {stage}"
        self.stage, self.since = stage, now


@dataclass(eq=False)
class Offer:
    """A tensor of this engine that is kept for others, under a lease."""

    id: TensorId
    described: Description
    pages: int
    allocation_id: str
    """The pages that it was put in; by now the lease's."""
    consumers: tuple[LeadAddress, ...]
    """Where it is sent to; none: it is fetched."""
    since: float
    consumer_count: int = 1
    number: int = 0
    """As of a Tensor."""
    token: bytes = b""
    """The READ grant; empty until the hand-over stands."""
    transfer_id: str = ""
    lent: str = ""
    """The transfer by which its consumer reads it with others; empty: none does."""
    payer: str = ""
    """Whose share of what may be kept it is in."""
    ttl_s: float | None = None
    """How long it is kept from when it was put, or somebody last asked for one of its request; None: the lead's
    default.
    """
    refused: KVGrpcError | None = None
    """Why a consumer that it was sent to does not have it."""

    @property
    def kept_bytes(self) -> int:
        """What it weighs."""
        texts = sum([LEAD_BYTES + len(at.address) + len(at.engine_id) for at in self.consumers])
        return TENSOR_BYTES + len(self.token) + texts

    @property
    def made(self) -> float:
        """When it was made known."""
        return self.since

    @property
    def may_go_together(self) -> bool:
        """It is kept for one consumer, and is not on its way to it with others."""
        return bool(self.token) and not self.consumers and self.consumer_count == 1 and not self.lent

    def is_same(self, other: "Offer") -> bool:
        """Whether one put, made twice, is what both are of: an allocation is handed over once."""
        return (self.described, self.allocation_id, self.consumers, self.consumer_count) == (
            other.described, other.allocation_id, other.consumers, other.consumer_count,
        )  # fmt: skip


class Purpose(Enum):
    """What a call waits for."""

    STORED = "stored"
    """The tensor is here: the end of a put."""
    GIVEN = "given"
    """The engine may use it, and holds it then."""
    OFFERED = "offered"
    """It is kept here for others."""


@dataclass(frozen=True)
class Wait:
    """One call that waits."""

    number: int
    id: TensorId
    purpose: Purpose
    deadline: float
    expected: Expected = ANY
    fetches: bool = False
    """It also asks a source for it."""
    caller: str = ANONYMOUS
    """The principal that asks."""
    payer: str = ""
    """Whose share of what may be kept it is in."""


@dataclass(frozen=True)
class Answer:
    """The call has what it waits for, or is refused."""

    wait: int
    result: Tensor | Offer | KVGrpcError


@dataclass(frozen=True)
class Drop:
    """A tensor is wanted no more: what brings it ends, and its memory comes back."""

    tensor: Tensor


@dataclass(frozen=True)
class Withdraw:
    """What is kept for others is kept no more."""

    offer: Offer


@dataclass(frozen=True)
class Renew:
    """Somebody waits for more of the request that these are of: they are kept for their TTL from now on."""

    offers: tuple[Offer, ...]


@dataclass(frozen=True)
class BringBack:
    """A tensor outside of the store is wanted in it."""

    tensor: Tensor


@dataclass(frozen=True)
class Fetch:
    """What was put for a call does not come: its source is asked, unless it is being asked."""

    wait: int


Effect = Answer | Drop | Withdraw | Renew | BringBack | Fetch
