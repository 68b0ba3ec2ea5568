"""Pages of a list, for every RPC that lists.

A page begins after the last row of the one before, by that row's position in the list's order, which never changes
while the row is there. So rows that come or go between two pages neither hide nor repeat another one.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvgrpc.errors import InvalidRequest
from kvgrpc.wire.values import invalid

PAGE_SIZE = 100
PAGE_SIZE_MAX = 1_000

Position = tuple[float, str]
"""Seconds in the order of the list, then the row's own id."""

_Row = TypeVar("_Row")


def page(rows: Iterable[_Row], position: Callable[[_Row], Position], size: int, token: str) -> tuple[list[_Row], str]:
    """At most `size` rows after `token`, and the token of the next page; empty on the last one.

    Raises InvalidRequest for a token that is not ours.
    """
    ordered = sorted(rows, key=position)
    start = bisect_right(ordered, _read(token), key=position) if token else 0
    end = start + min(size or PAGE_SIZE, PAGE_SIZE_MAX)
    found = ordered[start:end]
    return found, _token(position(found[-1])) if end < len(ordered) else ""


def _token(position: Position) -> str:
    return f"{position[0].hex()}:{position[1]}"


def _read(token: str) -> Position:
    number, colon, name = token.partition(":")
    try:
        at = float.fromhex(number)
    except (ValueError, OverflowError):
        raise _not_ours() from None
    if not colon or not math.isfinite(at):
        raise _not_ours()
    return at, name


def _not_ours() -> InvalidRequest:
    return invalid("page_token", "take it from the last page's reply, unchanged")
