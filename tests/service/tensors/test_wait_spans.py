"""Every wait of a call about tensors has a span of its own."""

import asyncio

import pytest

from kvgrpc.core.values.owners import STORE
from tests.service.kept_spans import SAMPLED, Kept, recording
from tests.service.tensors.leads import life_of
from tests.service.tensors.pairs import Pair, ended, relayed, until

TURN, RETRY, PAGES, TENSOR = (f"kvgrpc.wait.{name}" for name in ("turn", "retry", "pages", "tensor"))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return recording(monkeypatch)


async def test_puts_that_wait_for_others_to_the_same_consumer(pair: Pair, kept: Kept) -> None:
    pair.trace = SAMPLED
    await ended(pair.put_all("abcd"))
    assert pair.pulls() == [1, 3]
    assert len(kept.named(TURN)) == 3, "the first went at once"
    await pair.check_empty()


async def test_a_put_whose_consumer_has_no_room(pair: Pair, kept: Kept) -> None:
    pair.trace, filled = SAMPLED, pair.fill()
    put = pair.put("a")
    await until(lambda: len(kept.named(RETRY)) == 1)
    life_of(pair.d).transfers.free(filled)
    await put
    assert kept.named(PAGES), "the consumer waited for room before it refused"
    await pair.check_empty()


async def test_a_put_of_what_is_on_its_way_already(pair: Pair, kept: Kept) -> None:
    filled, put = pair.fill(), relayed(pair, "a")
    first = asyncio.ensure_future(pair.d.put(put, "", STORE))
    await until(lambda: len(pair.d.store.pages.line) == 1)
    second = asyncio.ensure_future(pair.d.put(put, SAMPLED, STORE))
    await asyncio.sleep(0)
    assert not kept.named(TENSOR)
    life_of(pair.d).transfers.free(filled)
    await ended({"first": first, "second": second})
    assert len(kept.named(TENSOR)) == 1
    await pair.check_empty()
