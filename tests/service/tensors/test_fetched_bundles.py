"""Tensors that are fetched together: those of one source are one transfer, but stay separate tensors."""

import asyncio
from typing import Any

import pytest

from kvgrpc.core.events import CancelScope
from kvgrpc.core.tables.transfers import Direction, State
from kvgrpc.core.tensors.descriptions import ANY, ExpectedTensor, Get, Release, WantedTensor
from kvgrpc.core.tensors.rows import TensorStage
from kvgrpc.errors import Reason
from tests.service.tensors.leads import KEY, life_of, named
from tests.service.tensors.pairs import MOST, PAGES, Calls, Pair, ended, filled_up, reason_of, until


async def test_what_is_wanted_of_one_source_comes_together(pair: Pair) -> None:
    await pair.keep()
    calls = pair.fetch_all()
    await ended(calls)
    assert pair.pulls() == [1, 3]
    assert pair.stages() == dict.fromkeys("abcd", TensorStage.HELD)
    sent = pair.transfers(pair.p, Direction.SEND)
    assert [(row.state, row.consumers_done, row.nbytes_done) for row in sent] == [
        (State.SUCCEEDED, 1, row.nbytes) for row in sent
    ]
    assert len(sent) == 5, "one for each, and that of the bundle"
    await until(lambda: life_of(pair.p).transfers.free_pages() == PAGES)
    await pair.check_empty()


async def test_one_that_is_not_there_yet_comes_when_it_is_and_holds_up_no_other(pair: Pair) -> None:
    await pair.keep("abd")
    calls = pair.fetch_all()
    late = calls.pop("c")
    await ended(calls)
    assert not late.done()
    await pair.keep("c")
    await late
    assert pair.pulls() == [1, 1, 2]
    await pair.check_empty()


async def test_one_that_is_kept_for_several_comes_by_itself(pair: Pair) -> None:
    await pair.keep("abd")
    await pair.keep("c", consumer_count=2)
    await ended(pair.fetch_all())
    assert pair.pulls() == [1, 1, 2]
    assert set(life_of(pair.p).table.offers) == {named("c")}
    await pair.check_empty()


async def test_one_that_is_not_what_is_expected_is_refused_and_hinders_no_other(pair: Pair) -> None:
    await pair.keep()
    calls = {name: pair.fetch(name, ExpectedTensor(dtype="float32") if name == "c" else ANY) for name in "abcd"}
    assert await reason_of(calls.pop("c")) is Reason.CONTENT_MISMATCH
    await ended(calls)
    assert set(life_of(pair.p).table.offers) == {named("c")}
    await pair.check_empty()


async def test_one_that_was_put_here_meanwhile_is_not_fetched(pair: Pair) -> None:
    await pair.keep("abd")
    calls = pair.fetch_all()
    await pair.put("c")
    await ended(calls)
    assert pair.stages() == dict.fromkeys("abcd", TensorStage.HELD)
    await pair.check_empty()


async def test_more_than_a_bundle_may_take_comes_in_several(pair: Pair) -> None:
    await pair.keep("abc", pages=MOST // 2 + 1)
    await ended(pair.fetch_all("abc"))
    assert pair.pulls() == [MOST // 2 + 1] * 3
    await pair.check_empty()


async def on_the_way(pair: Pair) -> tuple[Calls, str]:
    """Fetches tensors as `filled_up` says."""
    await pair.keep()
    return await filled_up(pair, pair.fetch_all)


async def test_one_that_its_source_takes_back_is_refused_and_the_others_come(pair: Pair) -> None:
    calls, filled = await on_the_way(pair)
    assert pair.p.release(Release(KEY, (named("c"),))) == 1
    life_of(pair.d).transfers.free(filled)
    assert await reason_of(calls.pop("c")) is Reason.TRANSFER_ENDED
    await ended(calls)
    assert pair.stages() == dict.fromkeys("abd", TensorStage.HELD)
    await pair.check_empty()


async def test_one_whose_own_lease_ends_is_not_given_and_the_others_come(pair: Pair) -> None:
    calls, filled = await on_the_way(pair)
    row = life_of(pair.p).table.offers[named("c")]
    life_of(pair.p).transfers.end(row.transfer_id, "an operator's", CancelScope.BOTH)
    life_of(pair.d).transfers.free(filled)
    for name in "abd":
        await calls[name]
    assert not calls["c"].done(), "it may be put again"
    pair.d.release(Release(KEY, (named("c"),)))
    assert await reason_of(calls["c"]) is Reason.TRANSFER_ENDED
    await pair.check_empty()


async def test_a_call_that_leaves_takes_no_other_with_it(pair: Pair) -> None:
    calls, filled = await on_the_way(pair)
    calls.pop("b").cancel()
    life_of(pair.d).transfers.free(filled)
    await ended(calls)
    assert pair.stages() == dict.fromkeys("acd", TensorStage.HELD) | {"b": TensorStage.STORED}
    await pair.check_empty()


async def test_calls_that_leave_before_their_source_is_asked_leave_nothing(pair: Pair) -> None:
    await pair.keep()
    calls = pair.fetch_all()
    await asyncio.sleep(0)
    for name in "bcd":
        calls.pop(name).cancel()
    await ended(calls)
    assert pair.pulls() == [1]
    await pair.check_empty()


async def test_a_bundle_that_is_lost_is_fetched_again_one_by_one(pair: Pair) -> None:
    calls, filled = await on_the_way(pair)
    (bundle,) = (life_of(pair.p).transfers.find(next(iter(pair.p.store.kept._lent))),)
    assert bundle is not None
    life_of(pair.p).transfers.end(bundle.id, "lost", CancelScope.BOTH)
    life_of(pair.d).transfers.free(filled)
    await ended(calls)
    assert pair.pulls()[-4:] == [1, 1, 1, 3]
    await pair.check_empty()


# -- a source that is asked


def asked(pair: Pair, names: str, most_pages: int = MOST, expected: ExpectedTensor = ANY) -> "asyncio.Future[Any]":
    wanted = tuple(WantedTensor(named(name), expected) for name in names)
    get = Get(wanted[0].id, expected, as_offer=True, bundled=wanted[1:], most_pages=most_pages)
    return asyncio.ensure_future(pair.p.get(get, ""))


async def test_a_source_gives_what_it_has_and_no_more_pages_than_are_wanted(pair: Pair) -> None:
    await pair.keep("abd")
    got = await asked(pair, "xabcda", most_pages=2)
    assert [row.id for row in got.tensors] == [named("a"), named("b")]
    alone = await asked(pair, "abd")
    assert ([row.id for row in alone.tensors], alone.token) == (
        [named("d")],
        life_of(pair.p).table.offers[named("d")].token,
    )
    await pair.check_empty()


@pytest.mark.parametrize("wrong", ["none", "pages", "other", "lent"])
async def test_a_source_that_has_none_of_them_says_so_at_once_and_keeps_what_it_has(pair: Pair, wrong: str) -> None:
    await pair.keep("ab")
    before = len(pair.transfers(pair.p, Direction.SEND))
    if wrong == "lent":
        await asked(pair, "ab")
        before += 1
    names, most, expected = ("xy" if wrong == "none" else "ab"), (0 if wrong == "pages" else MOST), ANY
    if wrong == "other":
        expected = ExpectedTensor(dtype="float32")
    assert await reason_of(asked(pair, names, most, expected)) is Reason.DEADLINE
    assert len(pair.transfers(pair.p, Direction.SEND)) == before
    await pair.check_empty()


async def test_what_is_asked_for_by_itself_may_be_read_though_it_was_given_with_others(pair: Pair) -> None:
    await pair.keep("ab")
    await asked(pair, "ab")
    await pair.fetch("a")
    assert set(life_of(pair.p).table.offers) == {named("b")}
    await pair.fetch("b")
    await pair.check_empty()
