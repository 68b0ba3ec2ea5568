"""Requests of a router to engines: to compute and hand over, and to pull."""

from dataclasses import dataclass

from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.core.values.request_times import RequestTime
from sim.world.memory import Prompt


@dataclass(frozen=True)
class PromptOffer:
    """A prompt that an engine must compute and hand over."""

    key: bytes
    request_id: str
    prompt: Prompt
    ttl_s: float = 30.0
    firm_ttl_s: float | None = None
    consumers: int = 1
    on_abort: OnAbort = OnAbort.RELEASE
    announce_after_s: float = 0.0
    """Delay between the grant and FinishedBlocks, in seconds."""
    priority: int = 0
    in_step: bool = False
    """True if the prompt is handed over before the step that computes its KV is over."""
    request_time_us: int = 0
    in_line: bool = False
    """True if the request waits in line for blocks: the oldest in line is served first."""

    @property
    def by(self) -> RequestTime | None:
        """Identity under which the engine asks for blocks."""
        return RequestTime(self.request_time_us, self.request_id) if self.request_time_us else None


@dataclass(frozen=True)
class PromptWish:
    """A prompt that an engine must pull."""

    request_id: str
    prompt: Prompt
    """Prompt of the engine's own request: shorter, longer or other than the one on offer."""
    access_id: bytes
    use_tokens: int = 0
    have_tokens: int = 0
    """Number of tokens whose KV the engine has computed itself before."""
    all_local: bool = False
    """True if the engine has found everything locally."""
    blocks_after_s: float = 0.0
    """Delay before the engine looks for room, in seconds; 0 gives the blocks with the call, if there is room."""
    priority: int = 0
    in_step: bool = False
    """True if a running step still touches the blocks."""
    request_time_us: int = 0
    in_line: bool = False
    """True if the request waits in line for blocks, as in PromptOffer."""

    @property
    def by(self) -> RequestTime | None:
        """Identity under which the engine asks for blocks, as in PromptOffer."""
        return RequestTime(self.request_time_us, self.request_id) if self.request_time_us else None


@dataclass(frozen=True)
class PartPlan:
    """One part of a push: the blocks of tokens [first, end) in some layers, handed over after a delay."""

    first: int
    end: int
    layers: LayerRange | None
    after_s: float
    last: bool
    failure: str = ""
