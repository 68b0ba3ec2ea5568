"""Bugs of pairs of ranks that are not alike, as in `bugs`."""

from typing import Any


def first_heads(shares: Any) -> Any:
    """Where a rank of the source has several heads, all ranks that read it read from its first one on."""
    return lambda *sides: [share._replace(source_first=0) for share in shares(*sides)]


def by_rank(_: Any) -> Any:
    """All postings of a rank have one name."""
    return lambda name, rank, _: f"{name}/{rank}.0"
