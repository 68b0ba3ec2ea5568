"""News for a scheduler: none is lost before its acknowledgement, and outdated news are not kept."""

import asyncio

import pytest

from kvgrpc.core.policy.values import Provisional, SendEnded
from kvgrpc.errors import Aborted, InvalidRequest, Reason
from kvgrpc.service.scheduler.news import NewsLog

HOUR_S = 3600.0
ME, OTHER = "me", "another"


def log(*requests: str) -> NewsLog:
    made = NewsLog()
    for request in requests:
        made.add(ME, SendEnded(request, None))
    return made


def test_what_is_acknowledged_is_forgotten_and_all_else_stays() -> None:
    made = log("a", "b", "c")
    made.acknowledge(ME, 2)
    made.acknowledge(ME, 1)
    assert list(made.unread(ME)) == [(3, SendEnded("c", None))]
    with pytest.raises(InvalidRequest):
        made.acknowledge(ME, 4)
    assert made.count(ME) == 1


def test_an_owner_reads_and_acknowledges_its_own_news_alone() -> None:
    made = log("a")
    made.add(OTHER, SendEnded("b", None))
    made.add(ME, SendEnded("c", None))
    made.acknowledge(OTHER, 3)
    assert [seq for seq, _ in made.unread(ME)] == [1, 3]
    assert (list(made.unread(OTHER)), made.count(OTHER)) == ([], 0)


def test_news_about_layers_are_replaced_by_the_next_ones_of_their_request() -> None:
    made = log()
    for request, layers in (("a", 1), ("b", 1), ("a", 2)):
        made.add(ME, Provisional(request, ((0, layers),), 0))
    assert [(seq, news.request_id) for seq, news in made.unread(ME)] == [(2, "b"), (3, "a")]
    made.acknowledge(ME, 3)
    made.add(ME, Provisional("a", ((0, 3),), 0))
    assert [seq for seq, _ in made.unread(ME)] == [4]


def test_who_waits_is_woken_by_the_first_news_and_by_the_end_of_the_life() -> None:
    async def scenario() -> None:
        made = log("a")
        await made.wait(ME, HOUR_S)  # returns at once, because there are news
        made.acknowledge(ME, 1)
        await made.wait(ME, 0)
        waiting = [asyncio.create_task(made.wait(ME, HOUR_S)) for _ in range(2)]
        await asyncio.sleep(0)
        made.add(ME, SendEnded("b", None))
        await asyncio.gather(*waiting)
        made.acknowledge(ME, 2)
        late = asyncio.create_task(made.wait(ME, HOUR_S))
        await asyncio.sleep(0)
        made.add(ME, SendEnded("c", None))
        made.begin()
        with pytest.raises(Aborted) as caught:
            await late
        assert caught.value.reason is Reason.INCARNATION_CHANGED
        assert list(made.unread(ME)) == []
        made.add(ME, SendEnded("d", None))
        assert [seq for seq, _ in made.unread(ME)] == [1]

    asyncio.run(scenario())
