"""Counts the work of a function in calls, which are the same on every machine."""

import sys
from collections.abc import Callable
from types import FrameType


def steps(do: Callable[[], object]) -> int:
    """Returns the number of Python and built-in calls that `do` makes."""
    counted = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal counted
        counted += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(None)
    return counted
