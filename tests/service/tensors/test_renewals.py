"""A call for a tensor renews everything that is kept of its request, however much that is. An error leaves nothing."""

import asyncio
from typing import Any

import pytest

from kvgrpc.core.tensors.descriptions import ANY, Get, Put, TensorId
from kvgrpc.core.tensors.rows import AnswerCall, Effect, Renew, TensorOffer, TensorWait
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import STORE
from kvgrpc.errors import DeadlineExceeded, Exhausted, InternalError, Reason
from kvgrpc.service.tensors.staging_store import StagingStore
from tests.service.tensors.leads import life_of, named, of_pages, served, stored
from tests.service.tensors.pairs import Pair, relayed

NAMES = "abcde"


async def keep(staging: StagingStore, **fields: Any) -> None:
    """Puts tensors without a consumer."""
    for name in NAMES:
        allocation_id, _ = life_of(staging).transfers.allocate(1, "")
        await staging.put(Put(named(name), of_pages(), allocation_id, **fields), "", STORE)


def rows(staging: StagingStore) -> tuple[int, int]:
    """Returns the number of waiting calls and of their answers."""
    return len(life_of(staging).table.waits), len(staging.store.waiting._answers)


def get(staging: StagingStore, name: str = "never put", timeout_s: float = 0.05) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(staging.get(Get(named(name), ANY, timeout_s=timeout_s), ""))


@pytest.mark.parametrize("most", [1, 2, 5])
async def test_more_is_kept_and_renewed_than_goes_into_one_call(most: int) -> None:
    async with served(limits=Limits(renewals_per_call=most)) as server:
        staging = server._staging
        await keep(staging, ttl_s=30.0)
        life = life_of(staging)
        leases = [life.transfers.find(offer.transfer_id).lease_id for offer in life.table.offers.values()]  # type: ignore[union-attr]
        ends = [staging.lead.runner.node.state.send.leases.find(lease_id).deadline for lease_id in leases]  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded):
            await get(staging)
        after = [staging.lead.runner.node.state.send.leases.find(lease_id).deadline for lease_id in leases]  # type: ignore[union-attr]
        assert all(new > old for new, old in zip(after, ends, strict=True))
        assert len(leases) == len(NAMES)
        assert rows(staging) == (0, 0)


@pytest.fixture
def broken(staging: StagingStore, monkeypatch: pytest.MonkeyPatch) -> InternalError:
    """Makes every renewal fail with this error."""
    error = InternalError(Reason.INTERNAL_DEFECT, "broken")

    def fail(_offers: Any) -> None:
        raise error

    monkeypatch.setattr(life_of(staging).transfers, "renew", fail)
    return error


async def test_a_renewal_that_fails_leaves_no_call_behind(staging: StagingStore, broken: InternalError) -> None:
    await keep(staging)
    with pytest.raises(InternalError, match=str(broken)):
        await asyncio.wait_for(get(staging), 5.0)
    assert rows(staging) == (0, 0)
    with pytest.raises(DeadlineExceeded):  # no renewal is repeated within a second
        await asyncio.wait_for(get(staging), 5.0)
    assert rows(staging) == (0, 0)


async def test_what_is_behind_a_renewal_that_fails_is_done_and_the_alarm_is_set(
    staging: StagingStore, broken: InternalError
) -> None:
    await keep(staging)
    life = life_of(staging)
    tensor = stored(life, "here")
    with pytest.raises(InternalError):
        await get(staging)
    given = get(staging, "later", timeout_s=20.0)
    await asyncio.sleep(0)
    (number,) = life.table.waits._rows
    life.table.effects = [_renewal(life.table.offers[named("a")]), AnswerCall(number, tensor)]
    staging._alarm.clear()
    with pytest.raises(InternalError):
        life.perform()
    assert (await asyncio.wait_for(given, 5.0)).tensors == (tensor,)
    assert staging._alarm._timer is not None


def _renewal(offer: TensorOffer) -> Effect:
    return Renew((offer,))


async def test_who_fails_in_the_moment_of_its_answer_has_taken_nothing(
    staging: StagingStore, broken: InternalError
) -> None:
    await keep(staging)
    life = life_of(staging)
    tensor = stored(life, "here")
    life.table.effects = [_renewal(life.table.offers[named("a")])]
    with pytest.raises(InternalError):
        await get(staging, "here")
    assert (tensor.given, tensor.holder) == (0, "")
    assert rows(staging) == (0, 0)


async def test_a_source_that_cannot_be_asked_leaves_no_call_behind(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any) -> None:
        raise InternalError(Reason.INTERNAL_DEFECT, "broken")

    monkeypatch.setattr(pair.d.store.fetcher, "add", fail)
    with pytest.raises(InternalError):
        await pair.fetch("a")
    assert rows(pair.d) == (0, 0)


@pytest.mark.parametrize("refused_at", [1, 2])
async def test_a_put_whose_calls_have_no_room_leaves_neither_tensors_nor_calls(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, refused_at: int
) -> None:
    table, asked = life_of(pair.d).table, list[TensorId]()
    ask = table.ask

    def full(wait: TensorWait, now: float) -> None:
        asked.append(wait.id)
        if len(asked) == refused_at:
            raise Exhausted(Reason.LIMIT_EXCEEDED, "full")
        ask(wait, now)

    monkeypatch.setattr(table, "ask", full)
    with pytest.raises(Exhausted, match="full"):
        await pair.d.put(relayed(pair, "ab"), "")
    assert (pair.stages(), rows(pair.d)) == ({}, (0, 0))
    await pair.check_empty()
