"""What the scheduler's side knows of a request."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgrpc.core.policy.values import Loss
from kvgrpc.integrations.params import Named
from kvgrpc.integrations.vllm.tensors.parts import Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False)
class Giving:
    """A request whose prompt is computed for another engine."""

    request: "Request"
    wants: Named
    prompt: Prompt
    to: str
    """Where they are put: address of the consumer's rank 0; empty: they are kept."""
    put: int = 0
    """So many parts, the first ones, are put. They stay good when the request is preempted."""


@dataclass(eq=False)
class Taking:
    """A request whose prompt is computed elsewhere, until it has blocks for it."""

    tokens: int
    wants: Named | None = None
    prompt: Prompt | None = None
    asked: range = range(0)
    """Parts that the workers were told of."""
    nbytes: int = 0
    """Bytes of KV of these parts, on a rank."""
    held: bool = False
    """All workers hold what was asked for."""
    lost: Loss | None = None
    """Why it does not come."""
    refused: bool = False
    """It was lost when it arrived, since it asks for nothing that can be done."""
    computed_here: bool = False
    """It is lost by what happened in this engine, which computes it, whatever is configured for what does not come."""
    workers: Counter[int] = field(default_factory=Counter)
    """By number of parts: how many workers hold so many."""

    def takes(self, key: bytes) -> bool:
        """Whether it is under this key: a request that left may have had the same id."""
        return self.wants is not None and self.wants.key == key
