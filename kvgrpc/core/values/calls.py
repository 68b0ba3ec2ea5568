"""What calls have in common: their caller, and the forms in which blocks and layers are named."""

from dataclasses import dataclass, field

from kvgrpc.core.values.descriptors import Ids
from kvgrpc.core.values.owners import ANONYMOUS

BlockLists = tuple[tuple[int, Ids], ...]
"""Rows (group, block ids) as a caller wrote them."""
LayerRange = tuple[int, int]
"""(first, count) of layers, numbered from 0 within each group; a group with fewer layers takes its part of it."""


@dataclass(frozen=True)
class Call:
    """A call's number, its caller, and its idempotency key."""

    id: int
    principal: str
    trace: str = ""
    """W3C traceparent of the call; empty without one."""
    key: str = ""
    method: str = ""
    body: bytes = b""
    """Digest of the request without its key."""
    incarnation: int = 0
    """The life of this engine that the request's block ids are of; 0 where it does not say."""
    connection: str = ""
    """Over which the call came; empty for what this engine itself asks for."""
    proof: bytes = field(default=b"", repr=False)
    """What its caller has shown of the life of a peer that it speaks for."""
    on_behalf_of: str = ""
    """Who pays for what it keeps, where this engine itself asks for somebody."""
    wall_us: int = 0
    """When it came, in microseconds since the Unix epoch, to bound what it says of times; 0: not known."""

    @property
    def payer(self) -> str:
        """Whose share of what may be kept its rows are in: its principal's; where that is anybody, its connection's."""
        return self.on_behalf_of or (self.connection if self.principal == ANONYMOUS else "") or self.principal


@dataclass(frozen=True, eq=False)
class ReadyPart:
    """One part of a push that its source may be read of, in the source's block ids."""

    number: int
    """Counted from 0 within the access."""
    blocks: BlockLists
    """Those that no earlier part lists."""
    known: tuple[int, ...]
    """Blocks of each group before these that earlier parts list, for other layers; groups without any at the end are
    left out.
    """
    layers: LayerRange | None
    last: bool
