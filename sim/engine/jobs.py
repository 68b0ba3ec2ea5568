"""Records that a modelled engine keeps of its hand-overs, pulls and reservations, and its view of its lead."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from kvgrpc.core.actions import FailedNews
from kvgrpc.core.events import Event
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.content import ContentId, chain
from sim.checks.audit import Audit
from sim.engine.requests import PromptWish
from sim.world.memory import Prompt
from sim.world.network import Ask, Give


@dataclass(eq=False)
class EngineHandOver:
    """A hand-over, as its engine sees it."""

    prompt: Prompt
    blocks: Blocks
    lease_id: str
    step: int
    """Step that computes the prompt; 0 once that step is over."""
    handed: bool = False
    """True if the lead has, or had, a part of this epoch, or all of it."""
    taken_back: bool = False
    """True if the engine preempted the hand-over: the blocks are already its own again."""
    part_epoch: int = 0
    start_over: Callable[[], None] | None = None
    """For a push, starts its prefill over."""
    asking: int = 0
    """For a push, the number of parts that the lead has neither accepted nor refused yet."""
    over: bool = False


@dataclass(eq=False)
class EngineFetch:
    """A pull, as its engine sees it."""

    wish: PromptWish
    use_tokens: int
    have_tokens: int
    ended: Callable[[FailedNews | None], None]
    key: bytes
    transfer_id: str = ""
    blocks: Blocks | None = None
    """All blocks of the request, including those that already hold KV."""
    handed_in: bool = False
    """True once the lead has the blocks."""
    over: bool = False


class EngineLead(Protocol):
    """An engine's view of its lead."""

    def call(self, ask: Ask, principal: str, give: Give, **fields: str) -> None: ...

    def handle(self, event: Event) -> None: ...

    def void(self, lease_id: str) -> None: ...

    def at_rest(self, blocks: Blocks) -> bool: ...

    def clock(self) -> float: ...

    def offered(self, key: bytes) -> Prompt | None: ...

    def lied_to(self, transfer_id: str) -> bool: ...

    @property
    def audit(self) -> Audit: ...

    def soon(self, do: Callable[[], None]) -> None: ...

    def later(self, delay_s: float, do: Callable[[], None]) -> None: ...


@lru_cache(maxsize=1024)
def content_of(prompt: Prompt, also_at: int = 0) -> ContentId:
    """Returns the content of a prompt's KV."""
    return chain(prompt.tokens, cache_salt=prompt.salt, weights_revision="w1", also_at=also_at)
