"""A scheduler sends a whole step in one message, and gets its news again until it acknowledges them."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvgrpc.service.rpc.scheduler import HOOKS, STEP_CALLS_MAX
from kvgrpc.service.scheduler.news import NEWS_MAX
from kvgrpc.v1 import common_pb2, scheduler_pb2
from tests.service.api import refused
from tests.service.conftest import Start
from tests.service.engines import Engine, unchanged, wait_until
from tests.service.scheduler.scheduled_pair import PREFILL, Pair, lost
from tests.service.scheduler.schedulers import PROMPT, Scheduler, arrived, finished, intent, new_id, reason
from tests.service.values import content, dur, for_readers, new_key

INVALID_ARGUMENT = 3
"""gRPC's number of the status."""


@pytest.fixture
def pair(source: Engine, destination: Engine) -> Pair:
    """Returns P and D."""
    return Scheduler(source), Scheduler(destination)


# ---- steps


def calls(engine: Engine, id_: str, grant: common_pb2.Grant, target: list[int]) -> Iterator[scheduler_pb2.ScheduleCall]:
    """Yields all calls of a request that finds nothing here. One of them has no content."""
    yield scheduler_pb2.ScheduleCall(request_arrived=arrived(id_, offer=grant))
    yield scheduler_pb2.ScheduleCall(match_tokens=scheduler_pb2.MatchTokensRequest(request_id=id_))
    bad = scheduler_pb2.BlocksAllocatedRequest(request_id=id_, blocks=engine.blocks([0]), external_tokens=40)
    yield scheduler_pb2.ScheduleCall(blocks_allocated=bad)
    yield scheduler_pb2.ScheduleCall()
    good = scheduler_pb2.BlocksAllocatedRequest(request_id=id_, blocks=engine.blocks(target), external_tokens=40)
    yield scheduler_pb2.ScheduleCall(blocks_allocated=good)
    yield scheduler_pb2.ScheduleCall(blocks_loaded=scheduler_pb2.BlocksLoadedRequest(request_id=id_))
    yield scheduler_pb2.ScheduleCall(tokens_computed=scheduler_pb2.TokensComputedRequest(request_id=id_))
    yield scheduler_pb2.ScheduleCall(request_preempted=scheduler_pb2.RequestPreemptedRequest(request_id=id_))
    yield scheduler_pb2.ScheduleCall(request_finished=finished(engine, id_, target))
    yield scheduler_pb2.ScheduleCall(abort_request=scheduler_pb2.AbortRequestRequest(request_id="unheard of"))


@contextmanager
def stepping(scheduler: Scheduler) -> Iterator[Callable[[scheduler_pb2.ScheduleRequest], Any]]:
    """Yields a function that makes steps, all over one stream."""
    said: queue.Queue[scheduler_pb2.ScheduleRequest | None] = queue.Queue()
    answers = scheduler.stub.Schedule(iter(said.get, None), timeout=60)

    def step(request: scheduler_pb2.ScheduleRequest) -> scheduler_pb2.ScheduleResponse:
        said.put(request)
        return next(answers)

    yield step
    said.put(None)
    assert list(answers) == []


def test_hooks_are_the_calls_of_a_step() -> None:
    fields = scheduler_pb2.ScheduleCall.DESCRIPTOR.oneofs_by_name["call"].fields
    assert HOOKS.keys() == {row.name for row in fields}


def test_a_step_says_all_in_one_message_and_a_bad_call_fails_alone(pair: Pair) -> None:
    p, d = pair
    id_, target = new_id(), d.engine.allocate(3)
    grant = p.prefilled(id_, p.engine.allocate(3))
    with stepping(d) as step:
        reply = step(scheduler_pb2.ScheduleRequest(calls=calls(d.engine, id_, grant, target), after_seq=d.seq))
        kinds = [row.WhichOneof("answer") for row in reply.answers]
        assert kinds == [
            "request_arrived", "match_tokens", None, None, "blocks_allocated", "blocks_loaded", "tokens_computed",
            "request_preempted", "request_finished", "abort_request",
        ]  # fmt: skip
        assert reply.answers[1].match_tokens.external_tokens == 40
        refusals = [(row.status_code, reason(row.failure)) for row in reply.answers[2:4]]
        assert refusals == [(INVALID_ARGUMENT, "BLOCK_COUNT_MISMATCH"), (INVALID_ARGUMENT, "INVALID_FIELD")]
        assert reply.answers[2].failure.message
        assert reply.answers[8].request_finished.keep, "they are being filled"
        assert reply.header.incarnation == d.engine.incarnation()
        news: list[scheduler_pb2.SchedulerNews] = []

        def ended() -> bool:
            news[:] = step(scheduler_pb2.ScheduleRequest(after_seq=d.seq)).news
            return bool(news)

        wait_until(ended)
    assert [row.request_id for row in news] == [id_]
    assert news[0].load_ended.HasField("failure"), "its request left before it came"
    p.told("send_ended", id_)


def test_a_step_that_cannot_be_as_a_whole_changes_nothing(pair: Pair) -> None:
    _, d = pair
    one = scheduler_pb2.ScheduleCall(request_arrived=arrived(new_id(), give=PREFILL, intent=intent()))
    many = [scheduler_pb2.ScheduleCall()] * (STEP_CALLS_MAX + 1)
    for step, code, why in (
        (scheduler_pb2.ScheduleRequest(calls=[one], incarnation=7), "ABORTED", "INCARNATION_CHANGED"),
        (scheduler_pb2.ScheduleRequest(calls=[one], after_seq=1 << 60), "INVALID_ARGUMENT", "INVALID_FIELD"),
        (scheduler_pb2.ScheduleRequest(calls=many), "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ):
        with unchanged(d.engine), refused(d.engine.api, code, why):
            d.engine.api.step(step)
    assert not d.aborted(one.request_arrived.request_id)
    assert d.poll() == []


# ---- news


def news_after(scheduler: Scheduler, seq: int, **fields: Any) -> list[tuple[int, str]]:
    request = scheduler_pb2.PollSchedulerNewsRequest(after_seq=seq, **fields)
    return [(news.seq, news.request_id) for news in scheduler.stub.PollSchedulerNews(request).news]


def test_news_are_told_again_until_a_later_number_acknowledges_them(pair: Pair) -> None:
    p, d = pair
    grant = p.prefilled(given := new_id(), p.engine.allocate(3))
    ids = [lost(d, grant) for _ in range(3)]
    start = news_after(d, 0)[0][0] - 1
    rows = [(start + 1 + i, id_) for i, id_ in enumerate(ids)]
    assert news_after(d, start) == news_after(d, start) == rows
    assert news_after(d, start + 1) == rows[1:]
    assert news_after(d, start) == rows[1:], "what was acknowledged is forgotten"
    assert news_after(d, start + 3) == []
    with refused(d.engine.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        news_after(d, start + 4)
    with refused(d.engine.api, "ABORTED", "INCARNATION_CHANGED"):
        news_after(d, start + 3, incarnation=7)
    p.aborted(given)


def test_who_waits_for_news_gets_the_first_one_or_none_in_time(pair: Pair) -> None:
    p, d = pair
    grant = p.prefilled(given := new_id(), p.engine.allocate(3))
    assert news_after(d, d.seq, wait=dur(0.01)) == []
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(news_after, d, d.seq, wait=dur(30)) for _ in range(2)]
        id_ = lost(d, grant)
        assert [[name for _, name in one.result()] for one in waiting] == [[id_]] * 2
    p.aborted(given)


def test_unread_news_keep_new_requests_out(start: Start) -> None:
    (engine,) = start(())
    d = Scheduler(engine)
    offer = for_readers(transfer_key=new_key(), content=content(PROMPT), blocks=engine.blocks(engine.allocate(3)))
    grant = engine.api.handoff.FinishedBlocks(offer).grant
    rows = [
        call
        for i in range(STEP_CALLS_MAX // 2)
        for call in (
            scheduler_pb2.ScheduleCall(request_arrived=arrived(f"r-{i}", None, offer=grant)),
            scheduler_pb2.ScheduleCall(abort_request=scheduler_pb2.AbortRequestRequest(request_id=f"r-{i}")),
        )
    ]
    reply = scheduler_pb2.ScheduleResponse()
    for _ in range(NEWS_MAX // (STEP_CALLS_MAX // 2)):
        reply = engine.api.step(scheduler_pb2.ScheduleRequest(calls=rows))
        assert not any(row.status_code for row in reply.answers)
    assert reply.more
    with refused(engine.api, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
        d.arrived("other")
    assert d.poll()[-1].seq == len(reply.news)
    d.poll()
    d.arrived("other")
