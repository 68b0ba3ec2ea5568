"""What `Engine.poll` tells. `transfer` is the handle that the event is about."""

from dataclasses import dataclass, field

from kvgrpc.core.tables.transfers import Side
from kvgrpc.core.values.telemetry import MoveTelemetry
from kvgrpc.engine.transfers.handles import Handle, Pull
from kvgrpc.engine.transfers.pushes import Push, Reservation
from kvgrpc.errors import NextStep, Reason


@dataclass(frozen=True)
class PullOpened:
    """The source said yes, and the pull waits for its blocks: `use_tokens` tokens of KV will come. One that had them by
    then is not spoken of before its end.
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
    Received. Each replaces the last: one with fewer layers says that the prefill started over, and that what was
    computed from the others is to be discarded. Failed discards all.
    """

    transfer: Reservation
    layers_done: tuple[tuple[int, int], ...]
    """(first, count), in order."""
    part_epoch: int


@dataclass(frozen=True)
class Received:
    """The KV of the first `use_tokens` tokens is in the blocks, and the blocks are the engine's again."""

    transfer: Pull | Reservation
    use_tokens: int
    telemetry: MoveTelemetry | None = field(default=None, compare=False)
    """What this engine's ranks moved for it; None: the source's did, or there was nothing to move."""


@dataclass(frozen=True)
class Failed:
    """It is over without success. Returns nothing: BlocksReturned follows."""

    transfer: Handle
    reason: Reason
    message: str
    next: NextStep
    cancelled: bool = False
    phase: str = ""
    side: Side | None = None
    """At which of the two engines."""
    rank: int | None = None


@dataclass(frozen=True)
class BlocksReturned:
    """The transfer's blocks are the engine's again."""

    transfer: Handle
    telemetries: tuple[MoveTelemetry, ...] = field(default=(), compare=False)
    """Of a push whose bytes this engine's ranks moved: one for each consumer that has everything."""


@dataclass(frozen=True)
class PartsReturned:
    """The blocks of parts that were replaced are the engine's again; their push goes on. Not told of those that
    `Push.start_over` took back by itself.
    """

    transfer: Push


Event = PullOpened | Reserved | LayersReceived | Received | Failed | BlocksReturned | PartsReturned
