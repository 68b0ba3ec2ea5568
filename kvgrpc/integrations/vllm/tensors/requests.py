"""Requests as the scheduler's side knows them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgrpc.core.policy.values import Loss
from kvgrpc.integrations.params import TensorWish
from kvgrpc.integrations.vllm.tensors.parts import PromptParts

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False)
class PrefillRequest:
    """A request whose prompt is computed for another engine."""

    request: "Request"
    wants: TensorWish
    prompt: PromptParts
    to: str
    """Address of the consumer's rank 0, where the tensors are put; empty: they are kept."""
    put: int = 0
    """Number of leading parts that are put. They stay valid when the request is preempted."""


@dataclass(eq=False)
class DecodeRequest:
    """A request whose prompt is computed elsewhere, until it has blocks for it."""

    tokens: int
    wants: TensorWish | None = None
    prompt: PromptParts | None = None
    asked: range = range(0)
    """Parts that the workers were told to ask for."""
    nbytes: int = 0
    """Bytes of KV of these parts, on a rank."""
    held: bool = False
    """True if all workers hold what was asked for."""
    lost: Loss | None = None
    """Reason why the KV does not come. None while it may come."""
    refused: bool = False
    """True if the request was lost on arrival, because it asks for something impossible."""
    computed_here: bool = False
    """True if this engine itself lost the KV. It computes the prompt then, whatever `on_loss` says."""
    workers: Counter[int] = field(default_factory=Counter)
    """Number of parts -> number of workers that hold so many."""

    def takes(self, key: bytes) -> bool:
        """Returns whether it takes under this key: a request that left may have had the same id."""
        return self.wants is not None and self.wants.key == key
