"""Two ways to do the same, measured side by side."""

from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


def timed_pairs(count: int, one: Callable[[], _Found], other: Callable[[], _Found]) -> list[tuple[_Found, _Found]]:
    """What both say of themselves, in pairs, each in turn the first of a pair, so that what drifts favours none."""
    pairs = []
    for number in range(count):
        if number % 2:
            first, second = one(), other()
        else:
            second, first = other(), one()
        pairs.append((first, second))
    return pairs
