"""Options and results of the demo."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from examples.demo.spans import Span

Say = Callable[[str], None]
"""Takes a line about what the demo does now."""


def silent(_: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Options:
    """Options of the demo."""

    push: bool = False
    """P pushes into blocks that D reserved; otherwise D pulls."""
    layerwise: bool = False
    """Push each layer as soon as it is computed. To compare, all prompts are also pushed whole."""
    corrupt: bool = False
    """Change a received block before decoding: the comparison must notice."""
    swap_grants: bool = False
    """Give two requests each other's grants: both must fail."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of a transfer at D that are worth showing. A layer-wise push has phases only in its first round."""
        if self.layerwise:
            return ("rendezvous",)
        if self.push:
            return ("rendezvous", "queue", "wire", "settle")
        return ("queue", "handshake", "open", "wire", "settle")


@dataclass(frozen=True)
class PromptResult:
    """Result of one prompt: the tokens of both engines and of the single one."""

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
    """Time from the end of P's prefill until D may use the KV, in milliseconds."""
    whole_visible_ms: float | None = None
    """The value of `visible_ms` if the prompt was pushed whole, for comparison."""
    error: str = ""

    def as_line(self) -> str:
        """One line of progress."""
        if self.error:
            return f"{self.name}: {self.prompt_tokens} tokens, failed: {self.error}"
        equal = "the same tokens as one engine" if self.tokens_equal else "NOT the tokens of one engine"
        moved = f"{self.blocks} block{'' if self.blocks == 1 else 's'} moved over {self.data_path}"
        return f"{self.name}: {self.prompt_tokens} tokens, {moved}, {equal}"

    def as_json(self) -> dict[str, Any]:
        """Returns the row for `--json`."""
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
    """Result of one turn of the conversation."""

    served: PromptResult
    held_tokens: int = 0
    """Tokens of the prompt that P had from earlier turns."""
    offered_tokens: int = 0
    """Tokens that D offered: the last prompt and its reply."""
    pulled_tokens: int = 0
    """Tokens that P took from D: all that it lacked, or none if they are fewer than `recompute_tokens`."""
    recompute_tokens: int = 0
    renewals: int = 0
    """Number of renewals of the lease on D's offer before P came for it."""

    def as_json(self) -> dict[str, Any]:
        """Returns the row for `--json`."""
        return self.served.as_json() | {
            "held_tokens": self.held_tokens,
            "offered_tokens": self.offered_tokens,
            "pulled_tokens": self.pulled_tokens,
            "recompute_tokens": self.recompute_tokens,
            "lease_renewals": self.renewals,
        }


@dataclass(frozen=True)
class Left:
    """Leftovers at P and D together when nothing is in flight."""

    leases: int
    pinned_blocks: int
    used_blocks: int
    """Blocks that an engine holds for transfers."""


@dataclass(frozen=True)
class Result:
    """Result of the whole demo."""

    options: Options
    prompts: list[PromptResult]
    chat: list[ChatTurn]
    """Turns of the conversation; empty if only prompts were run."""
    left: Left
    trace_id: str
    trace: list[Span]

    @property
    def identical(self) -> bool:
        served = [*self.prompts, *(turn.served for turn in self.chat)]
        return self.left == Left(0, 0, 0) and all(one.tokens_equal for one in served)

    @property
    def visible_ratio(self) -> float | None:
        """Median of `visible_ms` layer by layer over that of whole prompts: below 1, layers were sooner. None if
        nothing was compared.
        """
        whole = [prompt.whole_visible_ms for prompt in self.prompts if prompt.whole_visible_ms is not None]
        if not whole:
            return None
        return round(median(prompt.visible_ms for prompt in self.prompts) / median(whole), 3)

    def as_json(self) -> dict[str, Any]:
        """Returns the object for `--json`."""
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
