"""What the demo is asked to do, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvgrpc.demo.spans import Span

Say = Callable[[str], None]
"""Takes a line about what the demo does now."""


def silent(_: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Options:
    """What the demo is asked to do."""

    push: bool = False
    """P pushes into blocks that D reserved; else D pulls."""
    layerwise: bool = False
    """Each layer is pushed as soon as it is computed; and all prompts are pushed whole, too, to compare."""
    corrupt: bool = False
    """Change a received block before decoding: the comparison must notice."""
    swap_grants: bool = False
    """Give two requests each other's grants: both must fail."""

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of a transfer at D that are worth showing. Where layers follow each other, only the first round
        has phases.
        """
        if self.layerwise:
            return ("rendezvous",)
        if self.push:
            return ("rendezvous", "queue", "wire", "settle")
        return ("queue", "handshake", "open", "wire", "settle")


@dataclass(frozen=True)
class PromptResult:
    """One prompt, both ways."""

    name: str
    prompt_tokens: int
    tokens_equal: bool
    tokens: list[int]
    reference: list[int]
    blocks: int = 0
    nbytes: int = 0
    data_path: str = ""
    ms: dict[str, float] = field(default_factory=dict)
    visible_ms: float = 0.0
    """From the end of P's prefill until D may use the KV."""
    whole_visible_ms: float | None = None
    """The same when the prompt was pushed whole, to compare."""
    error: str = ""

    def as_line(self) -> str:
        """One line of progress."""
        if self.error:
            return f"{self.name}: {self.prompt_tokens} tokens, failed: {self.error}"
        equal = "the same tokens as one engine" if self.tokens_equal else "NOT the tokens of one engine"
        moved = f"{self.blocks} block{'' if self.blocks == 1 else 's'} moved over {self.data_path}"
        return f"{self.name}: {self.prompt_tokens} tokens, {moved}, {equal}"

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "name": self.name,
            "tokens_equal": self.tokens_equal,
            "prompt_tokens": self.prompt_tokens,
            "blocks": self.blocks,
            "bytes": self.nbytes,
            "datapath": self.data_path,
            "ms": self.ms,
            "visible_ms": self.visible_ms,
            "whole_visible_ms": self.whole_visible_ms,
            "error": self.error,
        }


@dataclass(frozen=True)
class ChatTurn:
    """One turn of the conversation."""

    served: PromptResult
    held_tokens: int = 0
    """Tokens of the prompt that P had from earlier turns."""
    offered_tokens: int = 0
    """Tokens that D offered: the last prompt and its reply."""
    pulled_tokens: int = 0
    """Tokens that P took from D: all that it lacked, or none where they are fewer than `recompute_tokens`."""
    recompute_tokens: int = 0
    renewals: int = 0
    """How often the lease on D's offer was renewed before P came for it."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return self.served.as_json() | {
            "held_tokens": self.held_tokens,
            "offered_tokens": self.offered_tokens,
            "pulled_tokens": self.pulled_tokens,
            "recompute_tokens": self.recompute_tokens,
            "lease_renewals": self.renewals,
        }


@dataclass(frozen=True)
class Left:
    """What is left at P and D together when nothing is under way."""

    leases: int
    pinned_blocks: int
    used_blocks: int
    """Blocks that an engine holds for transfers."""


@dataclass(frozen=True)
class Result:
    """The whole demo."""

    options: Options
    prompts: list[PromptResult]
    chat: list[ChatTurn]
    """Empty where only prompts were run."""
    left: Left
    trace_id: str
    trace: list[Span]

    @property
    def identical(self) -> bool:
        served = [*self.prompts, *(turn.served for turn in self.chat)]
        return self.left == Left(0, 0, 0) and all(one.tokens_equal for one in served)

    @property
    def visible_ratio(self) -> float | None:
        """Median of `visible_ms` layer by layer over that of whole prompts: below 1, layers were sooner. None where
        nothing was compared.
        """
        whole = [prompt.whole_visible_ms for prompt in self.prompts if prompt.whole_visible_ms is not None]
        if not whole:
            return None
        return round(median(prompt.visible_ms for prompt in self.prompts) / median(whole), 3)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "identical": self.identical,
            "mode": "push" if self.options.push else "pull",
            "layerwise": self.options.layerwise,
            "prompts": [prompt.as_json() for prompt in self.prompts],
            "visible_ratio": self.visible_ratio,
            "chat": {"turns": [turn.as_json() for turn in self.chat]},
            "leases_left": self.left.leases,
            "pinned_blocks_left": self.left.pinned_blocks,
            "used_blocks_left": self.left.used_blocks,
            "trace_id": self.trace_id,
        }
