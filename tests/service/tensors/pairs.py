"""A source and a consumer in the test's own process, so that all calls of one loop step arrive together."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core.tables.transfers import Direction, Transfer
from kvgrpc.core.tensors.bundles import SHARE
from kvgrpc.core.tensors.descriptions import ANY, ExpectedTensor, Get, LeadAddress, NamedTensor, Put, Release
from kvgrpc.core.tensors.rows import TensorOffer, TensorStage
from kvgrpc.core.values.owners import STORE
from kvgrpc.errors import KVGrpcError, Reason
from kvgrpc.service.tensors.staging_store import StagingStore
from tests.service.tensors.leads import KEY, life_of, named, of_pages

PAGES = 128
MOST = PAGES // SHARE
"""Maximum number of pages of a bundle."""
PATIENCE_S = 20.0
Calls = dict[str, "asyncio.Future[Any]"]
"""Calls by the names of their tensors."""


class Pair:
    """A source and a consumer."""

    def __init__(self, p: StagingStore, d: StagingStore) -> None:
        self.p, self.d = p, d
        self.trace = ""
        """Trace context of puts."""

    def put(self, name: str, pages: int = 1, to: StagingStore | None = None, **fields: Any) -> "asyncio.Future[Any]":
        consumers = (LeadAddress((to or self.d).lead.runner.node.state.life.engine.address),)
        usual: dict[str, Any] = {"consumers": consumers, "timeout_s": PATIENCE_S} | fields
        allocation_id, _ = life_of(self.p).transfers.allocate(pages, "")
        described = usual.pop("described", of_pages(pages))
        return asyncio.ensure_future(self.p.put(Put(named(name), described, allocation_id, **usual), self.trace, STORE))

    def put_all(self, names: str = "abcd", pages: int = 1) -> dict[str, "asyncio.Future[Any]"]:
        return {name: self.put(name, pages) for name in names}

    async def keep(self, names: str = "abcd", pages: int = 1, **fields: Any) -> None:
        """Puts tensors without a consumer."""
        for name in names:
            await self.put(name, pages, consumers=(), **fields)

    def get(self, name: str, expected: ExpectedTensor = ANY, **fields: Any) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self.d.get(Get(named(name), expected, timeout_s=PATIENCE_S, **fields), ""))

    def fetch(self, name: str, expected: ExpectedTensor = ANY) -> "asyncio.Future[Any]":
        return self.get(name, expected, source=LeadAddress(self.p.lead.runner.node.state.life.engine.address))

    def fetch_all(self, names: str = "abcd") -> dict[str, "asyncio.Future[Any]"]:
        return {name: self.fetch(name) for name in names}

    def transfers(self, side: StagingStore, direction: Direction) -> list[Transfer]:
        rows = side.lead.runner.node.state.transfers
        return [row for row in rows if row.direction is direction]

    def pulls(self) -> list[int]:
        """Returns the number of pages of each pull of the consumer."""
        return sorted(row.nbytes // 4096 for row in self.transfers(self.d, Direction.RECEIVE))

    def fill(self) -> str:
        """Takes all free pages of the consumer's store. Returns the allocation."""
        life = life_of(self.d)
        return life.transfers.allocate(life.transfers.free_pages(), "")[0]

    def stages(self) -> dict[str, TensorStage]:
        return {id_.name: row.stage for id_, row in life_of(self.d).table.tensors.items()}

    async def check_empty(self) -> None:
        """Checks at both sides that every page is free, and that no table has an entry left."""
        for staging in (self.p, self.d):
            staging.release(Release(KEY))
            life = life_of(staging)
            await until(lambda life=life: life.transfers.free_pages() == PAGES)  # type: ignore[misc]
            store = staging.store
            sender, kept, fetcher = store.sender, store.kept, store.fetcher
            rows = (sender._ways, sender._bundles, fetcher._calls, fetcher._bundles, store.pages.line)
            await until(lambda rows=rows: not any(map(len, rows)))  # type: ignore[misc]
            assert not sender._sent
            assert not any((kept._kept, kept._lent, kept.ended))
            assert not staging._arriving
            assert not len(staging.lead.runner.node.state.pool.allocator)


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the loop's own state has no event
            await asyncio.sleep(0.001)


async def reason_of(call: "asyncio.Future[Any]") -> Reason:
    with pytest.raises(KVGrpcError) as raised:
        await asyncio.wait_for(call, PATIENCE_S)
    return raised.value.reason


async def ended(calls: dict[str, "asyncio.Future[Any]"]) -> None:
    await asyncio.wait_for(asyncio.gather(*calls.values()), PATIENCE_S)


def relayed(pair: Pair, names: str, **fields: Any) -> Put:
    """Returns a put of a bundle, one page for each tensor, as its consumer gets it after the source's hand-over."""
    put = Put(named(names[0]), of_pages(), bundled=tuple(NamedTensor(named(name), of_pages()) for name in names[1:]))
    transfers = life_of(pair.p).transfers
    offers = [TensorOffer(named(name), of_pages(), 1, transfers.allocate(1, "")[0], (), 0.0) for name in names]
    token, _ = transfers.hand_over(offers, put, 2.0, "")
    for offer in offers:
        transfers.free(offer.allocation_id)
    return replace(put, token=token, timeout_s=20.0, **fields)


async def filled_up(pair: Pair, begin: Callable[[], Calls]) -> tuple[Calls, str]:
    """Returns calls for four tensors, the last three waiting together for room at the consumer, and what fills it."""
    filled = pair.fill()
    calls = begin()
    await until(lambda: len(pair.d.store.pages.line) == 2)
    assert pair.stages() == dict.fromkeys("abcd", TensorStage.ARRIVING)
    return calls, filled
