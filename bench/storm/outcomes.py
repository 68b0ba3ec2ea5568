"""Outcomes of requests, and what is wrong with them. This module is pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.storm.schedule import StormRequest

ANSWERED = "200"
HUNG_UP, TIMED_OUT, CUT, UNREACHED = "hung up", "timed out", "cut", "unreached"
"""Values in place of an HTTP status: our client left, or gave up; the answer ended too early; nobody answered."""
FAILED_STREAM = "200, then an error"

Expected = Mapping[tuple[int, ...], Sequence[int]]
"""Expected tokens by prompt, at least as many as any request with the prompt asks for."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request."""

    request: StormRequest
    status: str
    tokens: tuple[int, ...]
    """All tokens that came, also of an answer that is not whole."""
    seconds: float
    sent_s: float
    """Time of sending in seconds, since the storm began."""

    @property
    def answered(self) -> bool:
        return self.status == ANSWERED


def wrong_from(outcome: Outcome, expected: Expected) -> int | None:
    """Returns the position of the first wrong token, or None. In a whole answer, a missing or extra token is wrong,
    too.
    """
    right = expected[outcome.request.prompt][: outcome.request.answer_tokens]
    for number, (token, wanted) in enumerate(zip(outcome.tokens, right, strict=False)):
        if token != wanted:
            return number
    got, wanted_count = len(outcome.tokens), len(right)
    differs = got != wanted_count if outcome.answered else got > wanted_count
    return min(got, wanted_count) if differs else None
