"""Bugs of pairs of ranks that are not alike, as in `bugs`."""

from typing import Any


def first_heads(shares: Any) -> Any:
    """Where a rank of the source has several heads, all ranks that read it read from its first one on."""
    return lambda *sides: [share._replace(source_first=0) for share in shares(*sides)]


def by_rank(_: Any) -> Any:
    """All postings of a rank have one name."""
    return lambda name, rank, _: f"{name}/{rank}.0"


def own_number(common: Any) -> Any:
    """Stages exchange blocks with those of their own number only."""
    return lambda *sides: [pair for pair in common(*sides) if pair[0] == pair[1]]


def first_stage(all_shares: Any) -> Any:
    """Layers of every stage are read from ranks of the source's first one."""

    def shares(self: Any) -> Any:
        ranks = self._source.stage_ranks
        return [(group, share._replace(source_rank=share.source_rank % ranks)) for group, share in all_shares(self)]

    return shares
