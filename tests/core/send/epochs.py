"""Helpers for a push that starts over: its parts are replaced, or taken back."""

from typing import Any

from kvgrpc.core import events
from kvgrpc.core.actions import PartsReturnedNews
from tests.core.pairs import Pair


def lease_of(pair: Pair) -> str:
    lease_id: str = next(iter(pair.p.state.transfers)).lease_id
    return lease_id


def returned(pair: Pair) -> list[str]:
    """Returns the leases of parts whose blocks were returned."""
    return [news.lease_id for news in pair.told["p"] if isinstance(news, PartsReturnedNews)]


def start_over(pair: Pair, void: bool, *blocks: Any, epoch: int = 1, **fields: Any) -> None:
    """Hands over the next epoch's first part; with `void`, the engine takes the last epoch's blocks back before."""
    if void:
        pair.feed(pair.p, events.LeasesVoided((lease_of(pair),)))
    pair.finish(32, *(blocks or ((5, 6),)), part_epoch=epoch, **fields)
