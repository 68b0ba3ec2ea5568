"""Tensors that are put together: those that wait for one consumer are one transfer, but stay separate tensors."""

import asyncio
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from kvgrpc.core.events import CancelScope
from kvgrpc.core.tables.transfers import Direction, State
from kvgrpc.core.tensors.bundles import TENSORS_MAX
from kvgrpc.core.tensors.descriptions import DIMENSIONS_MAX, Description, ExpectedTensor, NamedTensor, Release
from kvgrpc.core.tensors.line import RESERVED
from kvgrpc.core.tensors.rows import TensorStage
from kvgrpc.errors import Reason
from tests.service.tensors.leads import KEY, PAGE, life_of, named, of_pages, served
from tests.service.tensors.pairs import MOST, PAGES, Calls, Pair, ended, filled_up, reason_of, relayed, until

RESERVED_PAGES = PAGES // RESERVED
REST = "bcd"
"""Names of tensors that are put while `a` is in flight."""


async def test_what_waits_for_one_consumer_goes_together(pair: Pair) -> None:
    await ended(pair.put_all())
    assert pair.pulls() == [1, 3]
    assert pair.stages() == dict.fromkeys("abcd", TensorStage.STORED)
    of = {row.transfer_id for row in life_of(pair.d).table.tensors.values() if row.id.name in REST}
    assert len(of) == 1
    ends = [row.state for side in (pair.p, pair.d) for row in side.lead.runner.node.state.transfers]
    assert ends == [State.SUCCEEDED] * 4
    await pair.check_empty()


async def test_each_of_them_is_released_and_held_by_itself(pair: Pair) -> None:
    await ended(pair.put_all())
    life = life_of(pair.d)
    for left, name in zip((3, 2, 1), REST, strict=True):
        got = await pair.get(name)
        (found,), (allocation_id, pages) = got.tensors, got.pages
        assert (found.stage, len(pages)) == (TensorStage.HELD, 1)
        assert pair.d.release(Release(KEY, (named(name),))) == 1
        assert life.transfers.free_pages() == PAGES - left
        assert not pair.d.lead.runner.node.state.pool.allocator.known(allocation_id)
    await pair.check_empty()


async def test_a_bundle_has_no_more_pages_and_tensors_than_it_may(pair: Pair) -> None:
    await ended(pair.put_all("abc", pages=MOST // 2 + 1))
    assert pair.pulls() == [MOST // 2 + 1] * 3
    names = [f"n{i}" for i in range(TENSORS_MAX + 2)]
    life_of(pair.d).table.release(Release(KEY, tuple(map(named, "abc"))), Reason.TRANSFER_ENDED, 0.0)
    pair.d._perform()
    await ended({name: pair.put(name) for name in names})
    assert max(pair.pulls()[:-3]) <= MOST
    await pair.check_empty()


async def test_the_largest_bundle_goes_at_once_however_its_tensors_are_described(pair: Pair) -> None:
    described = Description("uint8", (*[1] * (DIMENSIONS_MAX - 1), PAGE), PAGE, content_digest=b"d" * 64)
    names = [f"{i:0>256}" for i in range(TENSORS_MAX + 1)]
    await ended({name: pair.put(name, described=described) for name in names})
    assert pair.pulls() == [1, TENSORS_MAX]
    await pair.check_empty()


async def test_what_a_consumer_says_of_its_limit_is_remembered(pair: Pair) -> None:
    async with served(pages=8) as small:
        for _ in range(2):
            await ended({name: pair.put(name, to=small._staging) for name in "abcdefg"})
            assert set(life_of(small._staging).table.tensors) == {named(name) for name in "abcdefg"}
            small._staging.release(Release(KEY, tuple(named(name) for name in "abcdefg")))
            small._staging.store.table.ended.expire(inf)
            pair.p.store.table.kept.sent.expire(inf)
        found = sorted(row.nbytes // 4096 for row in pair.transfers(small._staging, Direction.RECEIVE))
        assert found == [1] * 8 + [2, 4], "the first bundle, of six, was refused; those after it were of four and two"
    await pair.check_empty()


async def test_one_that_the_consumer_refuses_hinders_no_other(pair: Pair) -> None:
    pair.d.release(Release(KEY, (named("c"),)))
    asked = pair.get("b", ExpectedTensor(dtype="float32"))
    await asyncio.sleep(0)
    calls = pair.put_all()
    assert await reason_of(calls.pop("c")) is Reason.TRANSFER_ENDED
    assert await reason_of(calls.pop("b")) is Reason.CONTENT_MISMATCH
    assert await reason_of(asked) is Reason.CONTENT_MISMATCH
    await ended(calls)
    assert pair.stages() == dict.fromkeys("ad", TensorStage.STORED)
    await pair.check_empty()


async def test_one_that_is_at_the_consumer_already_hinders_no_other(pair: Pair) -> None:
    await pair.put("c")
    pair.p.store.table.kept.sent.expire(inf)
    await ended(pair.put_all())
    assert pair.stages() == dict.fromkeys("abcd", TensorStage.STORED)
    await pair.check_empty()


async def on_the_way(pair: Pair) -> tuple[Calls, str]:
    """Puts tensors as `filled_up` says."""
    return await filled_up(pair, pair.put_all)


async def test_one_that_its_source_takes_back_is_gone_and_the_others_come(pair: Pair) -> None:
    calls, filled = await on_the_way(pair)
    assert pair.p.release(Release(KEY, (named("c"),))) == 1
    assert await reason_of(calls.pop("c")) is Reason.TRANSFER_ENDED
    life_of(pair.d).transfers.free(filled)
    await ended(calls)
    assert pair.stages() == dict.fromkeys("abd", TensorStage.STORED)
    await pair.check_empty()


async def test_one_that_its_source_takes_back_before_its_turn_never_goes(pair: Pair) -> None:
    calls = pair.put_all()
    await asyncio.sleep(0)
    assert pair.p.release(Release(KEY, (named("c"),))) == 1
    assert await reason_of(calls.pop("c")) is Reason.TRANSFER_ENDED
    await ended(calls)
    assert pair.pulls() == [1, 2]
    await pair.check_empty()


async def test_one_that_its_consumer_releases_on_the_way_is_gone_and_the_others_come(pair: Pair) -> None:
    calls, filled = await on_the_way(pair)
    pair.d.release(Release(KEY, (named("c"),)))
    assert await reason_of(calls.pop("c")) is Reason.TRANSFER_ENDED
    life_of(pair.d).transfers.free(filled)
    await ended(calls)
    assert pair.stages() == dict.fromkeys("abd", TensorStage.STORED)
    await pair.check_empty()


@pytest.mark.parametrize("side", ["p", "d"])
async def test_the_end_of_a_request_ends_all_of_a_bundle(pair: Pair, side: str) -> None:
    calls, filled = await on_the_way(pair)
    getattr(pair, side).release(Release(KEY))
    for call in calls.values():
        assert await reason_of(call) in {Reason.TRANSFER_ENDED, Reason.CANCELLED}
    life_of(pair.d).transfers.free(filled)
    await pair.check_empty()


async def test_a_bundle_whose_transfer_is_cancelled_is_not_sent_again(pair: Pair) -> None:
    calls, filled = await on_the_way(pair)
    row = life_of(pair.p).table.offers[named("b")]
    life_of(pair.p).transfers.end(row.transfer_id, "an operator's", CancelScope.BOTH)
    assert not {named(name) for name in REST} & set(life_of(pair.p).table.offers)
    life_of(pair.d).transfers.free(filled)
    await calls.pop("a")
    for call in calls.values():
        assert await reason_of(call) in {Reason.CANCELLED, Reason.LEASE_RELEASED}
    assert pair.stages() == {"a": TensorStage.STORED}
    await pair.check_empty()


async def test_a_bundle_for_which_there_is_no_room_is_put_one_by_one_until_there_is(pair: Pair) -> None:
    calls, filled = await on_the_way(pair)
    await until(lambda: len(pair.d.store.pages.line) == 4)
    life_of(pair.d).transfers.free(filled)
    await ended(calls)
    assert pair.stages() == dict.fromkeys("abcd", TensorStage.STORED)
    await pair.check_empty()


async def test_what_the_consumers_engine_waits_for_takes_its_bundle_with_it(pair: Pair) -> None:
    filled = pair.fill()
    calls = pair.put_all()
    await until(lambda: len(pair.d.store.pages.line) == 2)
    asked = pair.get("c")
    await asyncio.sleep(0)
    place = pair.d.store.pages.line.head(life_of(pair.d).time())
    assert place is not None
    assert (place.id, place.pages, place.urgent) == (named("b"), 3, True)
    life_of(pair.d).transfers.free(filled)
    await ended(calls)
    assert (await asked).tensors[0].stage is TensorStage.HELD
    await pair.check_empty()


async def test_one_whose_time_is_over_fails_and_the_others_come(pair: Pair) -> None:
    filled = pair.fill()
    calls = {"a": pair.put("a"), "b": pair.put("b", timeout_s=0.2), "c": pair.put("c")}
    assert await reason_of(calls.pop("b")) in {Reason.DEADLINE, Reason.POOL_EXHAUSTED}
    life_of(pair.d).transfers.free(filled)
    await ended(calls)
    assert pair.stages() == dict.fromkeys("ac", TensorStage.STORED)
    await pair.check_empty()


async def test_puts_that_differ_in_more_than_their_names_go_apart(pair: Pair) -> None:
    options: list[dict[str, Any]] = [{}, {}, {}, {"ttl_s": 9.0}, {"ttl_s": 9.0}, {"request_id": "another"}]
    calls = {name: pair.put(name, **fields) for name, fields in zip("abcdef", options, strict=True)}
    await ended(calls)
    assert pair.pulls() == [1, 1, 1, 1, 2], "`b` and `c` go together"
    await pair.check_empty()


async def test_an_asynchronous_put_is_over_when_it_waits_and_its_pages_come_back(pair: Pair) -> None:
    calls = {name: pair.put(name, asynchronous=True) for name in "abcd"}
    await asyncio.wait_for(asyncio.gather(*calls.values()), 20.0)
    await until(lambda: pair.stages() == dict.fromkeys("abcd", TensorStage.STORED))
    await until(lambda: life_of(pair.p).transfers.free_pages() == PAGES)
    await pair.check_empty()


async def test_pages_that_their_engine_freed_before_their_turn_are_not_sent(pair: Pair) -> None:
    calls = pair.put_all()
    await asyncio.sleep(0)
    life = life_of(pair.p)
    life.transfers.free(life.table.offers[named("c")].allocation_id)
    assert await reason_of(calls.pop("c")) is Reason.BLOCK_NOT_ALLOCATED
    await ended(calls)
    assert pair.stages() == dict.fromkeys("abd", TensorStage.STORED)
    await pair.check_empty()


async def test_a_bundle_goes_when_its_time_has_come_though_the_alarm_rang_before(pair: Pair) -> None:
    pair.fill()
    calls = {"a": pair.put("a")}
    await until(lambda: len(pair.d.store.pages.line) == 1)
    sender = pair.p.store.sender
    sender._alarm.set(asyncio.get_running_loop().time())
    calls["b"] = pair.put("b")
    await until(lambda: "b" in pair.stages(), 2.0)
    pair.p.release(Release(KEY))
    for call in calls.values():
        assert await reason_of(call) is Reason.TRANSFER_ENDED


async def test_others_than_one_that_is_released_at_the_consumer_while_their_bytes_move_come(pair: Pair) -> None:
    async with served(pages=PAGES, bandwidth_limit_bytes_per_s=100_000.0) as server:
        slow = server._staging
        transfers = slow.lead.runner.node.state.transfers
        calls = {name: pair.put(name, 4, to=slow) for name in "abcd"}
        await until(lambda: sum(row.state is State.ACTIVE for row in transfers) == 1)
        await calls.pop("a")
        await until(lambda: any(row.state is State.ACTIVE and row.blocks != 4 for row in transfers))
        slow.release(Release(KEY, (named("b"),)))
        assert await reason_of(calls.pop("b")) is Reason.TRANSFER_ENDED
        await ended(calls)
        assert {id_.name for id_ in life_of(slow).table.tensors} == set("acd")
    await pair.check_empty()


async def test_what_is_for_tensors_that_the_engine_waits_for_is_not_for_others_of_their_bundle(pair: Pair) -> None:
    life = life_of(pair.d)
    two, _ = life.transfers.allocate(RESERVED_PAGES + 2, "")
    filled = pair.fill()
    calls = pair.put_all()
    asked = pair.get("c")
    await until(lambda: len(pair.d.store.pages.line) == 2)
    life.transfers.free(two)
    await asyncio.wait_for(asyncio.gather(asked, calls["a"], calls["b"]), 20.0)
    assert life.transfers.free_pages() >= RESERVED_PAGES - 1
    assert not calls["d"].done()
    life.transfers.free(filled)
    await ended(calls)
    await pair.check_empty()


async def test_a_put_that_is_refused_at_once_leaves_nothing_and_may_be_made_again(pair: Pair) -> None:
    state, usual = pair.p.lead.runner.node.state, pair.p.lead.runner.node.state.limits
    state.ledger.limits = replace(usual, transfers=0)
    refused = pair.put("a")
    assert await reason_of(refused) is Reason.QUEUE_FULL
    assert not life_of(pair.p).table.offers
    state.ledger.limits = usual
    await pair.put("a")
    for allocation_id in list(state.pool.allocator._numbers):
        life_of(pair.p).transfers.free(allocation_id)  # the refusal left the allocation to its caller
    await pair.check_empty()


async def test_the_pages_of_what_was_sent_by_itself_are_free_while_others_of_its_bundle_wait(pair: Pair) -> None:
    two, _ = life_of(pair.d).transfers.allocate(RESERVED_PAGES + 2, "")
    calls, filled = await on_the_way(pair)
    await until(lambda: len(pair.d.store.pages.line) == 4)
    life_of(pair.d).transfers.free(two)
    await asyncio.wait_for(asyncio.gather(calls["a"], calls["b"]), 20.0)
    assert not calls["d"].done()
    await until(lambda: life_of(pair.p).transfers.free_pages() == PAGES - 2)
    life_of(pair.d).transfers.free(filled)
    await ended(calls)
    await pair.check_empty()


async def test_a_source_that_stops_ends_what_waits(pair: Pair) -> None:
    calls, _ = await on_the_way(pair)
    waiting = [pair.put(name) for name in "ef"]
    await asyncio.sleep(0)
    pair.p._end_life()
    for call in [*calls.values(), *waiting]:
        assert await reason_of(call) in {Reason.INCARNATION_CHANGED, Reason.ENGINE_LOST}


# -- bundles that others make


async def test_a_bundle_may_be_relayed_and_is_stored_as_it_is_described(pair: Pair) -> None:
    found = await pair.d.put(relayed(pair, "abc"), "")
    assert [row.id for row in found] == [named(name) for name in "abc"]
    assert pair.pulls() == [3]
    await pair.check_empty()


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            {"bundled": (NamedTensor(named("c"), of_pages()), NamedTensor(named("b"), of_pages()))},
            Reason.CONTENT_MISMATCH,
        ),
        ({"bundled": (NamedTensor(named("b"), of_pages()),)}, Reason.INCOMPATIBLE_POOLS),
        ({"bundled": (NamedTensor(named("b"), of_pages()), NamedTensor(named("b"), of_pages()))}, Reason.INVALID_FIELD),
        ({"bundled": (NamedTensor(named("b"), of_pages()), NamedTensor(named("a"), of_pages()))}, Reason.INVALID_FIELD),
        ({"bundled": ()}, Reason.INCOMPATIBLE_POOLS),
    ],
    ids=str,
)
async def test_a_relayed_bundle_that_is_not_the_sources_moves_nothing(
    pair: Pair, told: dict[str, Any], reason: Reason
) -> None:
    bundle = relayed(pair, "abc", **told)
    assert await reason_of(asyncio.ensure_future(pair.d.put(bundle, ""))) is reason
    assert (pair.stages(), len(life_of(pair.d).table.waits)) == ({}, 0)
    await until(lambda: life_of(pair.d).transfers.free_pages() == PAGES)


async def test_a_bundle_that_is_put_twice_is_refused_the_second_time_and_stays(pair: Pair) -> None:
    bundle = relayed(pair, "abc")
    await pair.d.put(bundle, "")
    assert await reason_of(asyncio.ensure_future(pair.d.put(bundle, ""))) is Reason.TRANSFER_EXISTS
    assert pair.stages() == dict.fromkeys("abc", TensorStage.STORED)
    await pair.check_empty()
