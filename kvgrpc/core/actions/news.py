"""News: what the attached engine, watchers and operators are told."""

from dataclasses import dataclass, field

from kvgrpc.core.tables.transfers import Failure, Transfer
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.telemetry import MoveTelemetry


@dataclass(frozen=True)
class TransferChanged:
    """For watchers, waiters and traces."""

    transfer: Transfer


@dataclass(frozen=True)
class PullOpened:
    """For the engine: how many tokens a pull will bring that waits for its blocks."""

    transfer_id: str
    request_id: str
    use_tokens: int


@dataclass(frozen=True)
class Received:
    """For the engine: the KV is there and the blocks are its own."""

    transfer_id: str
    request_id: str
    use_tokens: int
    telemetry: MoveTelemetry | None = field(default=None, compare=False)
    """None: this engine's ranks moved nothing, the source's did or there was nothing."""


@dataclass(frozen=True)
class Failed:
    """For the engine: it is over without success. Returns nothing."""

    transfer_id: str
    request_id: str
    failure: Failure
    cancelled: bool


@dataclass(frozen=True)
class BlocksReturned:
    """For the engine: the blocks of a transfer are its own again."""

    transfer_id: str
    """Empty for GrantLease, which makes no transfer."""
    request_id: str
    lease_id: str = ""
    """The lease that ended, where the blocks were handed over."""
    telemetries: tuple[MoveTelemetry, ...] = field(default=(), compare=False)
    """Of a push whose bytes this engine's ranks moved: one for each consumer that has everything."""


@dataclass(frozen=True)
class PartsReturned:
    """For the engine: the blocks of parts that were replaced are its own again. Their push goes on."""

    transfer_id: str
    request_id: str
    lease_id: str
    """The lease that ended."""


@dataclass(frozen=True)
class LayersReceived:
    """For the engine: all blocks of these layers are there, provisionally: nothing computed from them leaves the
    engine before Received. Each one replaces the last: one with fewer layers says that the prefill started over, and
    that what was computed from the others is to be discarded. Failed discards all.
    """

    transfer_id: str
    request_id: str
    layers_done: tuple[LayerRange, ...]
    part_epoch: int


@dataclass(frozen=True)
class PushWanted:
    """For the engine: a destination has registered for what nothing is handed over of yet."""

    key: bytes


EngineNews = PushWanted | PullOpened | LayersReceived | Received | Failed | BlocksReturned | PartsReturned


@dataclass(frozen=True)
class BlocksLacking:
    """A request of this engine waits for blocks that leases keep whose readers wait for blocks of their own."""

    request_id: str
    blocks: int
    """So many it lacks."""
    readers: tuple[tuple[str, str, int], ...]
    """Engine and request of each reader, with the blocks that it keeps here; the first ones of many."""
    reader_count: int
    """All of them."""


@dataclass(frozen=True)
class WeightsUnknown:
    """For the log: this life of a peer was admitted although neither side states its weights."""

    peer: str


@dataclass(frozen=True)
class TellEngine:
    """Something for the attached engine."""

    news: EngineNews
