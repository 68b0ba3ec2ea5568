"""Planted bugs in the bridge between ranks that differ; see `bugs`."""

from typing import Any


def first_heads(shares: Any) -> Any:
    """Every destination rank reads from the first head of a source rank that has several."""
    return lambda *sides: [share._replace(source_first=0) for share in shares(*sides)]


def by_rank(_: Any) -> Any:
    """All postings of a rank have one name."""
    return lambda name, rank, _: f"{name}/{rank}.0"


def own_number(common: Any) -> Any:
    """Stages exchange blocks only with the stage of the same number."""
    return lambda *sides: [pair for pair in common(*sides) if pair[0] == pair[1]]


def first_stage(all_shares: Any) -> Any:
    """Layers of every stage are read from the ranks of the source's first stage."""

    def shares(self: Any) -> Any:
        ranks = self._source.stage_ranks
        return [(group, share._replace(source_rank=share.source_rank % ranks)) for group, share in all_shares(self)]

    return shares
