"""Scheduler calls become values or a typed refusal, and scheduler news are what the policy said."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kvgrpc.core.policy.spec import Offer, Source
from kvgrpc.core.policy.values import (
    Give,
    Load,
    LoadEnded,
    Loss,
    ModeChoice,
    News,
    OnLoss,
    Outcome,
    Provisional,
    ReservedAt,
    Rules,
    Save,
    SendEnded,
    Take,
    TakeLost,
)
from kvgrpc.core.tables.transfers import Side
from kvgrpc.core.values import grants
from kvgrpc.core.values.content import ContentId, chain
from kvgrpc.errors import InvalidRequest, KVGrpcError, NextStep, OutOfRange, Reason
from kvgrpc.v1 import common_pb2, scheduler_pb2
from kvgrpc.wire import scheduler
from kvgrpc.wire.scheduler import NamedRequest
from tests.wire.messages import messages, outcome

KEY = b"k" * 16
LOST = Loss(Reason.PEER_LOST, "gone", NextStep.RETRY_OTHER_CONSUMER, "wire", Side.DESTINATION, 0)


def token(access: grants.AccessKind) -> bytes:
    claims = grants.Claims(access, "p", 7, "127.0.0.1:50051", "l-1", KEY, 30.0, 3, 40)
    return grants.mint(claims, grants.signing_key(b"s" * 32))


READ, WRITE = token(grants.AccessKind.READ), token(grants.AccessKind.WRITE)


def wanted(**fields: Any) -> NamedRequest:
    return scheduler.arrived(scheduler_pb2.RequestArrivedRequest(**{"request_id": "r", **fields}), "w", "trace")


def tokens(ids: list[int]) -> common_pb2.Content:
    return common_pb2.Content(tokens=common_pb2.TokenContent(token_ids=ids))


@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_any_arrival_is_a_request_or_a_typed_refusal(data: st.DataObject) -> None:
    message = data.draw(messages(scheduler_pb2.RequestArrivedRequest))
    found = outcome(lambda: scheduler.arrived(message, "w", ""))
    assert isinstance(found, NamedRequest | KVGrpcError)


def test_a_request_has_what_its_router_said() -> None:
    intent = common_pb2.Intent(
        transfer_key=KEY, request_id="chat-1", consumer_count=3, priority=-2, on_abort=common_pb2.ON_ABORT_KEEP
    )
    intent.ttl.seconds = 9
    found = wanted(give=scheduler_pb2.KvGift(decodes=True), intent=intent, needs_all_outputs=True)
    assert (found.label, found.consumers, found.priority, found.ttl_s) == ("chat-1", 3, -2, 9.0)
    assert (found.on_abort, found.transfer_key) == (grants.OnAbort.KEEP, KEY)
    assert (found.give, found.take, found.needs_all_outputs) == (Give(ModeChoice.PULL, prefill=False), None, True)
    assert (found.prompt, found.prompt_tokens) == (None, 0)


def test_what_is_left_out_is_the_request_s_own_or_the_call_s() -> None:
    assert (wanted().label, wanted().consumers, wanted().traceparent) == ("r", 1, "trace")
    assert wanted(traceparent="other").traceparent == "other"


@pytest.mark.parametrize(
    ("gift", "intent", "mode"),
    [
        (common_pb2.TRANSFER_MODE_UNSPECIFIED, common_pb2.TRANSFER_MODE_UNSPECIFIED, ModeChoice.PULL),
        (common_pb2.TRANSFER_MODE_UNSPECIFIED, common_pb2.TRANSFER_MODE_PUSH, ModeChoice.PUSH),
        (common_pb2.TRANSFER_MODE_PULL, common_pb2.TRANSFER_MODE_PUSH, ModeChoice.PULL),
        (99, common_pb2.TRANSFER_MODE_PUSH, ModeChoice.PULL),
    ],
)
def test_what_is_given_goes_as_it_says_itself_or_else_as_its_intent(gift: Any, intent: Any, mode: ModeChoice) -> None:
    said = common_pb2.Intent(transfer_key=KEY, mode=intent)
    assert wanted(give=scheduler_pb2.KvGift(mode=gift), intent=said).give == Give(mode)


def test_what_is_taken_has_its_source_from_the_offer_the_push_or_the_intent() -> None:
    offer = common_pb2.Grant(token=READ)
    assert wanted(offer=offer).take == Offer(READ)
    assert wanted(offer=offer).arrival(Rules(())).take == Take(ModeChoice.PULL, 40)
    intent = common_pb2.Intent(transfer_key=KEY)
    assert wanted(push=scheduler_pb2.PushOffer(keep=True), intent=intent).take == Source(keep=True)
    intent.peer.address = "p:1"
    assert wanted(push=scheduler_pb2.PushOffer(), intent=intent).take == Source("p:1")
    source = common_pb2.PeerAddress(address="q:2", engine_id="q")
    found = wanted(push=scheduler_pb2.PushOffer(source=source), intent=intent)
    assert found.take == Source("q:2", "q")
    assert list(found.addresses) == ["q:2"]
    assert list(wanted(offer=offer).addresses) == ["127.0.0.1:50051"]
    push = common_pb2.Intent(transfer_key=KEY, mode=common_pb2.TRANSFER_MODE_PUSH)
    target = wanted(give=scheduler_pb2.KvGift(), intent=push, target=common_pb2.Grant(token=WRITE))
    assert (target.target, list(target.addresses)) == (WRITE, ["127.0.0.1:50051"])


def test_the_same_request_again_is_the_same_in_another_trace_too() -> None:
    message = scheduler_pb2.RequestArrivedRequest(request_id="r", prompt=tokens([1, 2]))
    assert scheduler.arrived(message, "w", "a") == scheduler.arrived(message, "w", "b")
    message.prompt.tokens.token_ids[0] = 7
    assert scheduler.arrived(message, "w", "a") != wanted(prompt=tokens([1, 2]))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 39, 40])
def test_tokens_name_every_beginning_of_them(count: int) -> None:
    found = scheduler.named(tokens(list(range(40))), "w")
    assert found is not None
    assert found.first(count) == chain(range(count), weights_revision="w")
    assert found.with_digest(count).has_digest(count)


def test_a_chain_and_an_opaque_id_name_what_they_name() -> None:
    made = common_pb2.Content(chain=common_pb2.ContentChain(digests=chain(range(40)).digests, token_count=40))
    found = scheduler.named(made, "w")
    assert found is not None
    assert found.first(32) == chain(range(32))
    with pytest.raises(OutOfRange):
        found.first(39)
    opaque = scheduler.named(common_pb2.Content(opaque_id=b"x", opaque_tokens=40), "w")
    assert opaque is not None
    assert opaque.first(40) == ContentId(40, opaque=b"x")
    assert scheduler.named(common_pb2.Content(), "w") is None


def test_a_prompt_that_is_kept_does_not_keep_the_message_that_brought_it() -> None:
    message = scheduler_pb2.RequestArrivedRequest(request_id="r", prompt=tokens([1, 2]))
    found = scheduler.arrived(message, "w", "")
    message.prompt.tokens.token_ids[:] = [8, 9]
    assert found.prompt is not None
    assert found.prompt.first(1) == chain([1], weights_revision="w")


@pytest.mark.parametrize(("value", "found"), [(1, Outcome.COMPLETE), (2, Outcome.ABORTED), (99, Outcome.ABORTED)])
def test_only_what_says_that_it_is_complete_is(value: int, found: Outcome) -> None:
    assert scheduler.outcome(value) is found


def test_an_outcome_is_said() -> None:
    with pytest.raises(InvalidRequest):
        scheduler.outcome(0)


def told(*rows: News) -> scheduler_pb2.PollSchedulerNewsResponse:
    reply = scheduler_pb2.PollSchedulerNewsResponse()
    scheduler.put_news(enumerate(rows, 5), reply, 7)
    return reply


def test_news_say_what_the_policy_says() -> None:
    blocks = ((3, 4, 9), ())
    reply = told(
        LoadEnded("a", 40, None, (), OnLoss.FAIL), LoadEnded("b", 16, LOST, blocks, OnLoss.RECOMPUTE),
        SendEnded("c", None), SendEnded("d", LOST), TakeLost("e", LOST, OnLoss.FAIL), Save("f", blocks),
        Load("g", blocks), ReservedAt("h", WRITE), Provisional("i", ((0, 2),), 0), Provisional("j", (), 1),
    )  # fmt: skip
    assert [(news.seq, news.request_id) for news in reply.news] == list(enumerate("abcdefghij", 5))
    assert not reply.more
    came, lost, sent, unsent, untaken, save, load, reserved, layers, none = reply.news
    failure = common_pb2.Failure(
        reason=common_pb2.FAILURE_REASON_PEER_LOST, message="gone", next=common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER,
        phase=common_pb2.TRANSFER_PHASE_WIRE, side=common_pb2.SIDE_DESTINATION, rank=0,
    )  # fmt: skip
    rows = common_pb2.Blocks(
        incarnation=7,
        groups=[common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[3, 9], counts=[2, 1]))],
    )
    assert came.load_ended == scheduler_pb2.LoadEnded(computed_tokens=40)
    assert lost.load_ended == scheduler_pb2.LoadEnded(
        computed_tokens=16, failure=failure, invalid_blocks=rows, on_loss=scheduler_pb2.ON_LOSS_RECOMPUTE
    )
    assert sent.HasField("send_ended")
    assert not sent.send_ended.HasField("failure")
    assert unsent.send_ended.failure == failure
    assert untaken.take_lost == scheduler_pb2.TakeLost(failure=failure, on_loss=scheduler_pb2.ON_LOSS_FAIL)
    assert save.save.blocks == load.load.blocks == rows
    assert reserved.reserved_at.grant.token == WRITE
    assert grants.from_json(json.loads(reserved.reserved_at.kv_transfer_params)) == WRITE
    assert list(layers.provisional.layers_done) == [common_pb2.LayerRange(count=2)]
    assert (layers.provisional.part_epoch, none.provisional.part_epoch) == (0, 1)
    assert none.HasField("provisional")


def test_a_reply_has_so_many_news_and_bytes_and_says_that_there_are_more() -> None:
    many = told(*[SendEnded("r", None)] * (scheduler.NEWS_PER_REPLY + 1))
    assert (len(many.news), many.more) == (scheduler.NEWS_PER_REPLY, True)
    assert not told(*[SendEnded("r", None)] * scheduler.NEWS_PER_REPLY).more
    scattered = tuple(range(0, 120_000, 2))
    large = told(*[Save("r", (scattered,))] * 9)
    assert large.more
    assert scheduler.NEWS_BYTES_MAX <= large.ByteSize() < 2 * scheduler.NEWS_BYTES_MAX
