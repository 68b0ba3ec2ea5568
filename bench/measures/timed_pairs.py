"""Measures two ways to do the same thing side by side."""

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

_Found = TypeVar("_Found")


def timed_pairs(count: int, one: Callable[[], _Found], other: Callable[[], _Found]) -> list[tuple[_Found, _Found]]:
    """Returns the results of both ways in pairs. The ways take turns at being first, so that drift favours neither."""
    pairs = []
    for number in range(count):
        if number % 2:
            first, second = one(), other()
        else:
            second, first = other(), one()
        pairs.append((first, second))
    return pairs


def quartiles(values: Sequence[float]) -> list[float]:
    """Returns the first and the third quartile."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]
