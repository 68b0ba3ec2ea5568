"""Values that calls share: the caller, and the forms that name blocks and layers."""

from dataclasses import field

from kvgrpc.core.values.block_ids import BlockLists
from kvgrpc.core.values.owners import ANONYMOUS
from kvgrpc.core.values.records import dataclass

LayerRange = tuple[int, int]
"""Range (first, count) of layers, numbered from 0 within each group. A group with fewer layers takes its part of it."""


@dataclass(frozen=True)
class Call:
    """A call's number, caller and idempotency key."""

    id: int
    principal: str
    trace: str = ""
    """W3C traceparent of the call; empty without one."""
    key: str = ""
    method: str = ""
    body: bytes = b""
    """Digest of the request without its idempotency key."""
    incarnation: int = 0
    """Incarnation of this engine to which the request's block ids belong; 0 if the request does not say."""
    connection: str = ""
    """Connection over which the call came; empty for a call that this engine itself makes."""
    proof: bytes = field(default=b"", repr=False)
    """Proof of the peer's life for which the caller speaks."""
    on_behalf_of: str = ""
    """Payer of what the call keeps, for a call that this engine itself makes for somebody; else empty."""
    wall_us: int = 0
    """Arrival time in microseconds since the Unix epoch, to bound the times that the request states; 0: unknown."""

    @property
    def payer(self) -> str:
        """Account that pays for what the call keeps: its principal, or its connection if the principal is anonymous."""
        return self.on_behalf_of or (self.connection if self.principal == ANONYMOUS else "") or self.principal


@dataclass(frozen=True, eq=False)
class ReadyPart:
    """One part of a push that may be read at its source, in the source's block ids."""

    number: int
    """Number of the part, counted from 0 within the access."""
    blocks: BlockLists
    """Blocks that no earlier part lists."""
    known: tuple[int, ...]
    """Per group, the number of blocks before these that earlier parts list for other layers. Trailing groups without
    any are left out.
    """
    layers: LayerRange | None
    last: bool
