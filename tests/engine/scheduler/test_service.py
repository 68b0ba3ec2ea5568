"""SchedulerService for attached engines: the engines own the blocks, and the scheduler is another process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvgrpc.core.values.layout import Group, GroupKind, PoolKind, uniform_layout
from kvgrpc.v1 import common_pb2, scheduler_pb2
from tests.engine.conftest import SETTINGS, Attach, Leads
from tests.engine.made import LAYER_BYTES, layout
from tests.engine.support import Lead, new_key, tokens
from tests.service.api import Api, read_refusal
from tests.service.engines import WAIT_S, wait_until
from tests.service.values import content, dur, group, named_blocks

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
R = "r1"


def news(api: Api, wait_s: float = WAIT_S, incarnation: int = 0) -> list[scheduler_pb2.SchedulerNews]:
    request = scheduler_pb2.PollSchedulerNewsRequest(wait=dur(wait_s), incarnation=incarnation)
    return list(api.scheduler.PollSchedulerNews(request).news)


def prefilled(api: Api) -> common_pb2.Grant:
    """Hands over a request that was computed in SOURCE. Returns its grant."""
    gift, intent = scheduler_pb2.KvGift(), common_pb2.Intent(transfer_key=new_key())
    arrived = api.scheduler.RequestArrived(
        scheduler_pb2.RequestArrivedRequest(request_id=R, prompt=content(PROMPT), give=gift, intent=intent)
    )
    incarnation = arrived.header.incarnation
    over = scheduler_pb2.RequestFinishedRequest(
        request_id=R,
        blocks=named_blocks(incarnation, group(SOURCE)),
        computed_tokens=40,
        outcome=scheduler_pb2.REQUEST_OUTCOME_COMPLETE,
    )
    return api.scheduler.RequestFinished(over).grant


def test_another_process_schedules_blocks_and_their_sessions_hear_nothing(leads: Leads, attach: Attach) -> None:
    p, d = (attach(lead, kind=PoolKind.ENGINE_MANAGED) for lead in leads)
    written = p.fill(SOURCE, seed=1)
    api = d.api
    api.scheduler.RequestArrived(
        scheduler_pb2.RequestArrivedRequest(request_id=R, prompt=content(PROMPT), offer=prefilled(p.api))
    )
    api.scheduler.BlocksAllocated(
        scheduler_pb2.BlocksAllocatedRequest(
            request_id=R, blocks=named_blocks(d.engine.incarnation, group(TARGET)), external_tokens=40
        )
    )
    (ended,) = news(api)
    assert ended.load_ended == scheduler_pb2.LoadEnded(computed_tokens=40)
    assert np.array_equal(d.read(TARGET), written)
    (sent,) = news(p.api)
    assert sent.HasField("send_ended")
    assert not sent.send_ended.HasField("failure")
    assert (p.engine.poll(0), d.engine.poll(0)) == ([], [])


def test_layers_of_a_push_are_told_as_they_come(leads: Leads, attach: Attach, tmp_path: Path) -> None:
    source, key = Lead(tmp_path, "L", settings=f"{SETTINGS}[scheduler]\nlayers_per_part = 1\n").wait_ready(), new_key()
    try:
        p, d = attach(source), attach(leads[1])
        written, api = p.fill(SOURCE, seed=1), d.api
        intent = common_pb2.Intent(transfer_key=key, mode=common_pb2.TRANSFER_MODE_PUSH)
        intent.peer.address = p.engine.address
        wanted: dict[str, Any] = {"request_id": R, "prompt": content(PROMPT), "intent": intent}
        api.scheduler.RequestArrived(scheduler_pb2.RequestArrivedRequest(**wanted, push=scheduler_pb2.PushOffer()))
        table: dict[str, Any] = {"request_id": R, "blocks": named_blocks(d.engine.incarnation, group(TARGET))}
        api.scheduler.BlocksAllocated(scheduler_pb2.BlocksAllocatedRequest(**table, external_tokens=40))
        p.api.scheduler.RequestArrived(scheduler_pb2.RequestArrivedRequest(**wanted, give=scheduler_pb2.KvGift()))
        table["blocks"] = named_blocks(p.engine.incarnation, group(SOURCE))
        over: dict[str, Any] = {**table, "computed_tokens": 40, "step": 1}
        p.api.scheduler.RequestFinished(
            scheduler_pb2.RequestFinishedRequest(**over, outcome=scheduler_pb2.REQUEST_OUTCOME_COMPLETE)
        )
        p.ranks[0].layers_done(1, 0, 1)
        (first,) = news(api)
        assert list(first.provisional.layers_done) == [common_pb2.LayerRange(first=0, count=1)]
        p.ranks[0].step_done(1)
        wait_until(lambda: any(row.HasField("load_ended") for row in news(api)))
        assert not news(api)[-1].load_ended.HasField("failure")
        assert np.array_equal(d.read(TARGET), written)
        p.close()
    finally:
        source.close()


WINDOW = replace(layout().groups[0], kind=GroupKind.SLIDING_WINDOW, window_tokens=20)
STATE = replace(layout().groups[0], kind=GroupKind.STATE)


@pytest.mark.parametrize(("kind", "goes", "dropped"), [(WINDOW, 2, [1]), (STATE, 1, [])], ids=["window", "state"])
def test_blocks_outside_a_window_stay(leads: Leads, attach: Attach, kind: Group, goes: int, dropped: list[int]) -> None:
    p, d = (attach(lead, pool=uniform_layout(kind, LAYER_BYTES)) for lead in leads)
    written, source, target = p.fill(SOURCE[-goes:], seed=1), p.api.scheduler, d.api.scheduler
    before = d.fill(TARGET[:-goes], seed=2)
    intent, gift = common_pb2.Intent(transfer_key=new_key()), scheduler_pb2.KvGift()
    wanted: dict[str, Any] = {"request_id": R, "prompt": content(PROMPT)}
    source.RequestArrived(scheduler_pb2.RequestArrivedRequest(**wanted, give=gift, intent=intent))
    listed = len(dropped)
    table: dict[str, Any] = {"request_id": R, "dropped_block_counts": dropped}
    table["blocks"] = named_blocks(p.engine.incarnation, group(SOURCE[listed:]))
    source.TokensComputed(scheduler_pb2.TokensComputedRequest(**table, computed_tokens=40))
    over: dict[str, Any] = {"computed_tokens": 40, "outcome": scheduler_pb2.REQUEST_OUTCOME_COMPLETE}
    grant = source.RequestFinished(scheduler_pb2.RequestFinishedRequest(**table, **over)).grant
    assert (grant.block_count, grant.token_count) == (goes, 40)
    target.RequestArrived(scheduler_pb2.RequestArrivedRequest(**wanted, offer=grant))
    table["blocks"] = named_blocks(d.engine.incarnation, group(TARGET[listed:]))
    target.BlocksAllocated(scheduler_pb2.BlocksAllocatedRequest(**table, external_tokens=40))
    (ended,) = news(d.api)
    assert ended.load_ended == scheduler_pb2.LoadEnded(computed_tokens=40)
    assert np.array_equal(d.read(TARGET[-goes:]), written)
    assert np.array_equal(d.read(TARGET[:-goes]), before)


def test_what_a_scheduler_knew_ends_with_the_life_of_its_engine(leads: Leads, attach: Attach) -> None:
    lead = leads[0]
    p = attach(lead)
    prefilled(p.api)
    request = scheduler_pb2.PollSchedulerNewsRequest(wait=dur(WAIT_S), incarnation=lead.status().header.incarnation)
    waiting = p.api.scheduler.PollSchedulerNews.future(request)
    p.api.scheduler.MatchTokens(scheduler_pb2.MatchTokensRequest(request_id=R))  # behind it, on the same connection
    p.engine.close()
    with pytest.raises(grpc.RpcError) as caught:
        waiting.result()
    refusal = read_refusal("/kvgrpc.v1.SchedulerService/PollSchedulerNews", caught.value)
    assert (refusal.code, refusal.reason) == ("ABORTED", "INCARNATION_CHANGED")
    lead.wait_no_engine()
    again = attach(lead)
    assert news(again.api, 0) == []
    assert prefilled(again.api).token, "the name is free again"
