"""The requests to each router, and what of the answers is compared: pure data from a seed.

Prompts are text for a tokenizer whose every token is a word of its own. So equal texts are equal tokens, whatever a
router omits from an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.vllm.engines import MAX_TOKENS, prompt_of
from tests.vllm.servers import MODEL

COMPLETIONS, CHAT, STREAMS, SEVERAL, PROMPTS, REFUSED, HANG_UPS, AFTERWARDS = KINDS = (
    "completions", "chat", "streams", "several answers", "lists of prompts", "refused", "hang-ups", "afterwards",
)  # fmt: skip
AT_ONCE, AFTER_A_PIECE = LEAVES = ("at once", "after a piece")
"""When a client hangs up: after sending its request, or after some of the answer."""
COMPLETE, TALK = "/v1/completions", "/v1/chat/completions"
SEEDS = 40
"""Number of seeds for one router's cases: more than it has prompts, and small enough that all routers get different
ones.
"""
ANSWERS = 2
LONG_ANSWER = 400


@dataclass(frozen=True)
class Case:
    """One request of a client."""

    kind: str
    path: str
    prompts: tuple[str, ...]
    more: tuple[tuple[str, Any], ...] = ()
    """Additional fields of its body."""
    leaves: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """The request body that a client sends."""
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        if self.path == TALK:
            asked["messages"] = [{"role": "user", "content": self.prompts[0]}]
        else:
            asked["prompt"] = self.prompts[0] if len(self.prompts) == 1 else list(self.prompts)
        return asked | dict(self.more)

    @property
    def streams(self) -> bool:
        """True if the answer comes in pieces."""
        return bool(self.body.get("stream"))

    @property
    def alone(self) -> "list[Case]":
        """Requests with one answer each, in the order of this one's answers."""
        count = int(self.body.get("n", 1))
        return [Case(COMPLETIONS, self.path, (prompt,)) for prompt in self.prompts for _ in range(count)]


def words(tokens: Sequence[int]) -> str:
    """Returns the text of these tokens."""
    return " ".join(map(word, tokens))


def word(token: int) -> str:
    """Returns the text of one token."""
    return f"w{token}"


def cases(number: int) -> list[Case]:
    """Returns all requests to one router, in order. `number` is the router's, so that no two share a prompt."""
    seeds = iter(range(number * SEEDS, (number + 1) * SEEDS))

    def text(length: int) -> str:
        return words(prompt_of(length, next(seeds)))

    stream = (("stream", True),)
    greedy = (("n", ANSWERS), ("temperature", 1), ("top_k", 1))
    long = (("max_tokens", LONG_ANSWER),)
    return [
        *(Case(COMPLETIONS, COMPLETE, (text(length),)) for length in (20, 200, 900)),
        *(Case(CHAT, TALK, (text(length),)) for length in (70, 400)),
        *(Case(STREAMS, path, (text(length),), stream) for path, length in ((COMPLETE, 120), (TALK, 300))),
        *(Case(SEVERAL, path, (text(length),), greedy) for path, length in ((COMPLETE, 150), (TALK, 250))),
        *(Case(PROMPTS, COMPLETE, tuple(text(80 + 40 * n) for n in range(count))) for count in (2, 3)),
        Case(REFUSED, COMPLETE, (text(100),), (("max_tokens", -1),)),
        Case(REFUSED, COMPLETE, (text(100),), (("temperature", -1),)),
        Case(HANG_UPS, COMPLETE, (text(1200),), long, AT_ONCE),
        Case(HANG_UPS, TALK, (text(1200),), long + stream, AT_ONCE),
        Case(HANG_UPS, COMPLETE, (text(500),), long + stream, AFTER_A_PIECE),
        Case(AFTERWARDS, COMPLETE, (text(260),)),
    ]
