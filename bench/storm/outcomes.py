"""What came of each request, and what is wrong with it: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.storm.schedule import Request

ANSWERED = "200"
HUNG_UP, TIMED_OUT, CUT, UNREACHED = "hung up", "timed out", "cut", "unreached"
"""In place of an HTTP status: our client left, or gave up; the answer ended too early; nobody answered."""
FAILED_STREAM = "200, then an error"

Expected = Mapping[tuple[int, ...], Sequence[int]]
"""By prompt, at least as many tokens as any request with it asks for."""


@dataclass(frozen=True)
class Outcome:
    """Of one request."""

    request: Request
    status: str
    tokens: tuple[int, ...]
    """All that came, also of an answer that is not whole."""
    seconds: float
    sent_s: float
    """Since the storm began."""

    @property
    def answered(self) -> bool:
        return self.status == ANSWERED


def wrong_from(outcome: Outcome, expected: Expected) -> int | None:
    """The first token that is not what an engine alone makes of the prompt; of a whole answer, one that is missing or
    too many, too. None: nothing is wrong.
    """
    right = expected[outcome.request.prompt][: outcome.request.answer_tokens]
    for number, (token, wanted) in enumerate(zip(outcome.tokens, right, strict=False)):
        if token != wanted:
            return number
    got, wanted_count = len(outcome.tokens), len(right)
    differs = got != wanted_count if outcome.answered else got > wanted_count
    return min(got, wanted_count) if differs else None
