"""Events of `Engine.poll`. `transfer` is the handle that an event is about."""

from dataclasses import dataclass, field

from kvgrpc.core.tables.transfers import Side
from kvgrpc.core.values.telemetry import MoveTelemetry
from kvgrpc.engine.transfers.handles import Handle, Pull
from kvgrpc.engine.transfers.pushes import Push, Reservation
from kvgrpc.errors import NextStep, Reason


@dataclass(frozen=True)
class PullOpened:
    """The source accepted the pull, which waits for its blocks: `use_tokens` tokens of KV will come. A pull that has
    its blocks by then gets no such event.
    """

    transfer: Pull
    use_tokens: int


@dataclass(frozen=True)
class Reserved:
    """The blocks of a push are reserved: `transfer.grant` can go to the source."""

    transfer: Reservation


@dataclass(frozen=True)
class LayersReceived:
    """Every block of these layers is there, provisionally: nothing that is computed from them leaves the engine before
    Received. Each event replaces the last one. Fewer layers mean that the prefill started over: discard what was
    computed from the others. Failed discards all.
    """

    transfer: Reservation
    layers_done: tuple[tuple[int, int], ...]
    """Ranges of layers, each (first, count), in order."""
    part_epoch: int


@dataclass(frozen=True)
class Received:
    """The KV of the first `use_tokens` tokens is in the blocks, and the blocks are the engine's again."""

    transfer: Pull | Reservation
    use_tokens: int
    telemetry: MoveTelemetry | None = field(default=None, compare=False)
    """Telemetry of this engine's ranks; None: the source's ranks moved the bytes, or there was nothing to move."""


@dataclass(frozen=True)
class Failed:
    """The transfer is over without success. Returns no blocks: BlocksReturned follows."""

    transfer: Handle
    reason: Reason
    message: str
    next: NextStep
    cancelled: bool = False
    phase: str = ""
    side: Side | None = None
    """Side of the transfer that failed."""
    rank: int | None = None


@dataclass(frozen=True)
class BlocksReturned:
    """The transfer's blocks are the engine's again."""

    transfer: Handle
    telemetries: tuple[MoveTelemetry, ...] = field(default=(), compare=False)
    """Telemetry of a push whose bytes this engine's ranks moved, one for each consumer that has everything."""


@dataclass(frozen=True)
class PartsReturned:
    """The blocks of replaced parts are the engine's again; their push goes on. Parts that `Push.start_over` took back
    at once get no such event.
    """

    transfer: Push


Event = PullOpened | Reserved | LayersReceived | Received | Failed | BlocksReturned | PartsReturned
