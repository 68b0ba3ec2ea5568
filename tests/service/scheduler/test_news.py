"""News for a scheduler: none is lost before its acknowledgement, and outdated news are not kept."""

import asyncio

import pytest

from kvgrpc.core.policy.values import Provisional, SendEnded
from kvgrpc.errors import Aborted, InvalidRequest, Reason
from kvgrpc.service.scheduler.news import NewsLog

HOUR_S = 3600.0


def log(*requests: str) -> NewsLog:
    made = NewsLog()
    for request in requests:
        made.add(SendEnded(request, None))
    return made


def test_what_is_acknowledged_is_forgotten_and_all_else_stays() -> None:
    made = log("a", "b", "c")
    made.acknowledge(2)
    made.acknowledge(1)
    assert list(made.unread()) == [(3, SendEnded("c", None))]
    with pytest.raises(InvalidRequest):
        made.acknowledge(4)
    assert len(made) == 1


def test_news_about_layers_are_replaced_by_the_next_ones_of_their_request() -> None:
    made = log()
    for request, layers in (("a", 1), ("b", 1), ("a", 2)):
        made.add(Provisional(request, ((0, layers),), 0))
    assert [(seq, news.request_id) for seq, news in made.unread()] == [(2, "b"), (3, "a")]
    made.acknowledge(3)
    made.add(Provisional("a", ((0, 3),), 0))
    assert [seq for seq, _ in made.unread()] == [4]


def test_who_waits_is_woken_by_the_first_news_and_by_the_end_of_the_life() -> None:
    async def scenario() -> None:
        made = log("a")
        await made.wait(HOUR_S)  # returns at once, because there are news
        made.acknowledge(1)
        await made.wait(0)
        waiting = [asyncio.create_task(made.wait(HOUR_S)) for _ in range(2)]
        await asyncio.sleep(0)
        made.add(SendEnded("b", None))
        await asyncio.gather(*waiting)
        made.acknowledge(2)
        late = asyncio.create_task(made.wait(HOUR_S))
        await asyncio.sleep(0)
        made.add(SendEnded("c", None))
        made.begin()
        with pytest.raises(Aborted) as caught:
            await late
        assert caught.value.reason is Reason.INCARNATION_CHANGED
        assert list(made.unread()) == []
        made.add(SendEnded("d", None))
        assert [seq for seq, _ in made.unread()] == [1]

    asyncio.run(scenario())
