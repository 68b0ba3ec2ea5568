"""News for the attached engine, watchers and operators."""

from dataclasses import field

from kvgrpc.core.tables.transfers import Failure, Transfer
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.telemetry import MoveTelemetry


@dataclass(frozen=True)
class TransferChanged:
    """A transfer changed: for watchers, waiters and traces."""

    transfer: Transfer


@dataclass(frozen=True)
class PullOpenedNews:
    """For the engine: the number of tokens that a pull, which still waits for its blocks, will bring."""

    transfer_id: str
    request_id: str
    use_tokens: int


@dataclass(frozen=True)
class ReceivedNews:
    """For the engine: the KV has arrived, and the blocks are the engine's own."""

    transfer_id: str
    request_id: str
    use_tokens: int
    telemetry: MoveTelemetry | None = field(default=None, compare=False)
    """None if this engine's ranks moved nothing: the source's ranks did, or there was nothing to move."""


@dataclass(frozen=True)
class FailedNews:
    """For the engine: a transfer ended without success. This returns no blocks."""

    transfer_id: str
    request_id: str
    failure: Failure
    cancelled: bool


@dataclass(frozen=True)
class BlocksReturnedNews:
    """For the engine: the blocks of a transfer are its own again."""

    transfer_id: str
    """Empty for GrantLease, which makes no transfer."""
    request_id: str
    lease_id: str = ""
    """The lease that ended, if the blocks were handed over."""
    telemetries: tuple[MoveTelemetry, ...] = field(default=(), compare=False)
    """Telemetry of a push that this engine's ranks moved, one for each consumer that has everything."""


@dataclass(frozen=True)
class PartsReturnedNews:
    """For the engine: the blocks of replaced parts are its own again. Their push goes on."""

    transfer_id: str
    request_id: str
    lease_id: str
    """The lease that ended."""


@dataclass(frozen=True)
class LayersReceivedNews:
    """For the engine: all blocks of these layers have arrived, provisionally. Nothing computed from them may leave the
    engine before ReceivedNews. Each LayersReceivedNews replaces the last one. Fewer layers mean that the prefill
    started over: results computed from the others must be discarded. FailedNews discards all.
    """

    transfer_id: str
    request_id: str
    layers_done: tuple[LayerRange, ...]
    part_epoch: int


@dataclass(frozen=True)
class PushWantedNews:
    """For the engine: a destination registered for a push of which nothing has been handed over yet."""

    key: bytes


EngineNews = (
    PushWantedNews
    | PullOpenedNews
    | LayersReceivedNews
    | ReceivedNews
    | FailedNews
    | BlocksReturnedNews
    | PartsReturnedNews
)


@dataclass(frozen=True)
class BlocksLacking:
    """For the log: a request lacks blocks, because leases keep them for readers that wait for blocks of their own."""

    request_id: str
    blocks: int
    """Number of blocks that the request lacks."""
    readers: tuple[tuple[str, str, int], ...]
    """Engine, request and number of blocks kept here, for each reader; only the first ones of many."""
    reader_count: int
    """Number of all such readers."""


@dataclass(frozen=True)
class WeightsUnknown:
    """For the log: this life of a peer was admitted although neither side states its weights."""

    peer: str


@dataclass(frozen=True)
class TellEngine:
    """News for the attached engine."""

    news: EngineNews
