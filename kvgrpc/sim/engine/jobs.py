"""What a modelled engine keeps of its hand-overs, pulls and reservations, and what it knows of its lead."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from kvgrpc.core.actions import Failed
from kvgrpc.core.events import Event
from kvgrpc.core.values.content import Content, chain
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.sim.checks.audit import Audit
from kvgrpc.sim.engine.requests import Wish
from kvgrpc.sim.world.memory import Prompt
from kvgrpc.sim.world.network import Ask, Give


@dataclass(eq=False)
class HandOver:
    """A hand-over, as its engine sees it."""

    prompt: Prompt
    blocks: Blocks
    lease_id: str
    step: int
    """The step that computes it; 0 when that is over."""
    handed: bool = False
    """The lead has, or had, a part of this epoch, or all of it."""
    taken_back: bool = False
    """The engine preempted it: the blocks are its own again already."""
    part_epoch: int = 0
    start_over: Callable[[], None] | None = None
    """Of a push: its prefill begins anew."""
    asking: int = 0
    """Of a push: parts of which the lead has not said yet whether it takes them."""
    over: bool = False


@dataclass(eq=False)
class Fetch:
    """A pull, as its engine sees it."""

    wish: Wish
    use_tokens: int
    have_tokens: int
    ended: Callable[[Failed | None], None]
    key: bytes
    transfer_id: str = ""
    blocks: Blocks | None = None
    """All of the request's, those that it holds already included."""
    handed_in: bool = False
    """The lead has them."""
    over: bool = False


class Lead(Protocol):
    """What an engine knows of its lead."""

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
def content_of(prompt: Prompt, also_at: int = 0) -> Content:
    """What the KV of a prompt is of."""
    return chain(prompt.tokens, cache_salt=prompt.salt, weights_revision="w1", also_at=also_at)
