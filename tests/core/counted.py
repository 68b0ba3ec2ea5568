"""How much work something is, whatever machine does it."""

import sys
from collections.abc import Callable
from types import FrameType


def steps(do: Callable[[], object]) -> int:
    """How many steps it takes."""
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
