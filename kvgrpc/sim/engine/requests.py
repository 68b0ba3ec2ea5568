"""What a router asks of engines: to compute and hand over, and to pull."""

from dataclasses import dataclass

from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.core.values.request_times import RequestTime
from kvgrpc.sim.world.memory import Prompt


@dataclass(frozen=True)
class Offer:
    """What an engine is asked to compute and to hand over."""

    key: bytes
    request_id: str
    prompt: Prompt
    ttl_s: float = 30.0
    firm_ttl_s: float | None = None
    consumers: int = 1
    on_abort: OnAbort = OnAbort.RELEASE
    announce_after_s: float = 0.0
    """FinishedBlocks reaches the lead this much later than the grant leaves."""
    priority: int = 0
    in_step: bool = False
    """It is handed over before the step that computes it is over."""
    request_time_us: int = 0
    in_line: bool = False
    """It waits for its turn to get blocks: the oldest of those in line is first."""

    @property
    def by(self) -> RequestTime | None:
        """In whose name it asks for blocks."""
        return RequestTime(self.request_time_us, self.request_id) if self.request_time_us else None


@dataclass(frozen=True)
class Wish:
    """What an engine is asked to pull."""

    request_id: str
    prompt: Prompt
    """Of its own request: shorter, longer or other than the one on offer."""
    access_id: bytes
    use_tokens: int = 0
    have_tokens: int = 0
    """Tokens whose KV it has computed itself before."""
    all_local: bool = False
    """It has found everything locally."""
    blocks_after_s: float = 0.0
    """When it looks for room; 0 gives the blocks with the call, if there is room."""
    priority: int = 0
    in_step: bool = False
    """A step that runs still touches the blocks."""
    request_time_us: int = 0
    in_line: bool = False
    """As in Offer."""

    @property
    def by(self) -> RequestTime | None:
        """As in Offer."""
        return RequestTime(self.request_time_us, self.request_id) if self.request_time_us else None


@dataclass(frozen=True)
class PartPlan:
    """One part of a push: the blocks of the tokens from `first` to `end`, in some layers, handed over some time on."""

    first: int
    end: int
    layers: LayerRange | None
    after_s: float
    last: bool
    failure: str = ""
