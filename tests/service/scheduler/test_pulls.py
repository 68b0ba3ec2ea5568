"""SchedulerService on two servers: KV moves by pull, and back for the next turn."""

import json

import pytest

from kvgrpc.core.values.content import chain
from kvgrpc.v1 import common_pb2, pool_pb2, scheduler_pb2, transfer_pb2
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import Engine
from tests.service.scheduler.scheduled_pair import PREFILL, Pair, at_rest, group_runs
from tests.service.scheduler.schedulers import ABORTED, PUSH, Scheduler, intent, new_id, reason
from tests.service.values import content, dur, new_key, prompt


@pytest.fixture
def pair(source: Engine, destination: Engine) -> Pair:
    """Returns P and D."""
    return Scheduler(source), Scheduler(destination)


# ---- pull


def test_a_request_that_was_prefilled_elsewhere_gets_its_kv_by_pull(pair: Pair) -> None:
    p, d = pair
    id_, blocks, target = new_id(), p.engine.allocate(3), d.engine.allocate(3)
    written = p.engine.write(blocks, 1)
    admitted = p.arrived(id_, give=PREFILL, intent=intent())
    assert (admitted.prompt_tokens, admitted.one_token) == (40, True)
    handed = p.finished(id_, blocks)
    assert (handed.keep, handed.handed_over) == (True, True)
    assert not d.arrived(id_, offer=handed.grant).one_token
    assert d.allocated(id_, target) == 40
    ended = d.told("load_ended", id_)
    assert (ended.computed_tokens, ended.HasField("failure"), ended.HasField("invalid_blocks")) == (40, False, False)
    assert d.engine.read(target) == written
    assert not p.told("send_ended", id_).HasField("failure")
    assert not d.finished(id_, target).keep


def test_the_grant_comes_in_the_form_of_todays_routers_too(pair: Pair) -> None:
    p, _ = pair
    p.arrived(id_ := new_id(), give=PREFILL, intent=intent())
    handed = p.finished(id_, p.engine.allocate(3))
    params = json.loads(handed.kv_transfer_params)
    assert params["remote_request_id"] == handed.grant.lease_id
    assert params["do_remote_prefill"]
    p.aborted(id_)


def test_only_what_is_missing_comes(pair: Pair) -> None:
    p, d = pair
    id_, blocks, target = new_id(), p.engine.allocate(3), d.engine.allocate(3)
    written, held = p.engine.write(blocks, 1), d.engine.write(target, 2)
    d.arrived(id_, offer=p.prefilled(id_, blocks))
    assert d.allocated(id_, target, 16) == 24
    assert d.told("load_ended", id_).computed_tokens == 40
    assert d.engine.read(target) == [held[0], *written[1:]]


def test_a_full_hit_lets_the_producer_free_its_blocks_at_once(pair: Pair) -> None:
    p, d = pair
    id_ = new_id()
    d.arrived(id_, offer=p.prefilled(id_, p.engine.allocate(3)))
    assert d.allocated(id_, d.engine.allocate(3), 40) == 0
    assert not p.told("send_ended", id_).HasField("failure")
    assert not d.finished(id_, []).keep


def test_transfers_are_called_and_made_as_the_router_said(pair: Pair) -> None:
    p, _ = pair
    id_ = new_id()
    said = intent(request_id=f"chat-{id_}", consumer_count=2, priority=3, ttl=dur(20))
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    grant = p.prefilled(id_, p.engine.allocate(3), intent=said, traceparent=trace)
    (sent,) = p.engine.api.transfers.ListTransfers(
        transfer_pb2.ListTransfersRequest(filter=transfer_pb2.TransferFilter(request_id=f"chat-{id_}"))
    ).transfers
    assert (sent.consumer_count, sent.priority, sent.trace_id) == (2, 3, "ab" * 16)
    assert grant.ttl.seconds == 20
    p.aborted(id_)


def test_a_prompt_without_token_ids_is_told_that_it_takes_nothing(pair: Pair) -> None:
    p, d = pair
    id_ = new_id()
    d.arrived(id_, None, offer=p.prefilled(id_, p.engine.allocate(3)))
    assert reason(d.told("take_lost", id_).failure) == "CONTENT_REQUIRED"
    assert d.match(id_) == 0
    assert not d.aborted(id_)


def test_a_prompt_may_be_stated_by_its_digests(pair: Pair) -> None:
    p, d = pair
    id_, blocks, target = new_id(), p.engine.allocate(3), d.engine.allocate(3)
    written = p.engine.write(blocks, 1)
    tokens = prompt(64)
    made = common_pb2.Content(chain=common_pb2.ContentChain(digests=chain(tokens).digests, token_count=64))
    d.arrived(id_, None, prompt=made, offer=p.prefilled(id_, blocks))
    assert d.allocated(id_, target) == 32, "whole units only: nobody said what its first 40 tokens are"
    assert not d.told("load_ended", id_).HasField("failure")
    assert d.engine.read(target)[:2] == written[:2]


# ---- the next turn


@pytest.mark.parametrize(("threshold", "tokens"), [(16, 48), (49, 0)])
def test_history_goes_back_if_enough_of_it_is_missing(start: Start, threshold: int, tokens: int) -> None:
    settings = f"{SETTINGS}[scheduler]\nrecompute_threshold_tokens = {threshold}\n"
    p, d = map(Scheduler, start((), (), settings=settings))
    id_, blocks = new_id(), d.engine.allocate(3)
    written = d.engine.write(blocks, 3)
    chat = prompt(48)
    d.arrived(id_, chat[:40], give=scheduler_pb2.KvGift(decodes=True), intent=intent())
    handed = d.finished(id_, blocks, 48, content=content(chat))
    assert handed.handed_over
    turn = [*chat, *prompt(90, seed=6)]
    target = p.engine.allocate(9)
    p.arrived("turn", turn, offer=handed.grant, give=PREFILL, intent=intent())
    assert p.allocated("turn", target) == tokens
    if tokens:
        assert p.told("load_ended", "turn").computed_tokens == 48
        assert p.engine.read(target[:3]) == written
    assert not d.told("send_ended", id_).HasField("failure")
    assert p.finished("turn", target, len(turn)).grant.token_count == len(turn)
    p.aborted("turn")
    p.told("send_ended", "turn")


@pytest.mark.parametrize("on_loss", ["fail", "recompute"])
@pytest.mark.parametrize("late", ["the offer expired", "the decode engine died"])
def test_late_history_is_lost_and_freed(start: Start, late: str, on_loss: str) -> None:
    rules = f'[scheduler]\nrecompute_threshold_tokens = 16\non_loss = "{on_loss}"\n'
    p, d = map(Scheduler, start((), (), settings=SETTINGS + rules))
    expires, turn = late == "the offer expired", prompt(130)
    said = intent(ttl=dur(0.2)) if expires else intent()
    grant = d.prefilled("chat", d.engine.allocate(3), give=scheduler_pb2.KvGift(decodes=True), intent=said)
    if expires:
        assert reason(d.told("send_ended", "chat").failure) == "LEASE_EXPIRED"
    else:
        d.engine.process.kill()
    target = p.engine.allocate(9)
    p.arrived("turn", turn, offer=grant, give=PREFILL, intent=intent())
    lost = p.told("take_lost", "turn")
    assert reason(lost.failure) == "LEASE_EXPIRED" or not expires
    assert lost.on_loss == scheduler_pb2.OnLoss.Value(f"ON_LOSS_{on_loss.upper()}")
    at_rest(p)
    if on_loss == "fail":
        assert p.allocated("turn", target) == 40, "whoever asks all the same"
        ended = p.told("load_ended", "turn")
        assert (ended.failure, list(ended.invalid_blocks.groups)) == (lost.failure, [group_runs(target[:3])])
        assert not p.finished("turn", target, 0, outcome=ABORTED).keep
    else:
        assert p.allocated("turn", target) == 0
        assert p.finished("turn", target, len(turn)).grant.token_count == len(turn)
        p.aborted("turn")
        p.told("send_ended", "turn")
    at_rest(p)


def test_the_decode_engine_may_compute_the_end_of_a_prompt_itself(start: Start) -> None:
    p, d = map(Scheduler, start((), (), settings=f"{SETTINGS}[scheduler]\nprefill_backoff_tokens = 1\n"))
    id_ = new_id()
    assert p.arrived(id_, give=PREFILL, intent=intent()).prompt_tokens == 39
    grant = p.finished(id_, p.engine.allocate(3), 39).grant
    d.arrived(id_, offer=grant)
    assert d.allocated(id_, d.engine.allocate(3)) == 39
    assert d.told("load_ended", id_).computed_tokens == 39
    id_, key, here = new_id(), new_key(), common_pb2.PeerAddress(address=p.engine.address)
    d.arrived(id_, push=scheduler_pb2.PushOffer(source=here), intent=intent(transfer_key=key))
    assert d.allocated(id_, d.engine.allocate(3)) == 39
    p.arrived(id_, give=scheduler_pb2.KvGift(mode=PUSH), intent=intent(transfer_key=key))
    assert p.finished(id_, p.engine.allocate(3), 39).handed_over
    ended = d.told("load_ended", id_)
    assert (ended.computed_tokens, ended.HasField("failure")) == (39, False)


# ---- staged engines


def test_a_staged_engine_is_told_what_to_save_and_what_to_load(start: Start) -> None:
    p, d = map(Scheduler, start((), (), settings=f"{SETTINGS}[scheduler]\nstaged = true\n"))
    id_, blocks, target = new_id(), p.engine.allocate(3), d.engine.allocate(3)
    p.arrived(id_, give=PREFILL, intent=intent())
    p.computed(id_, blocks, 32)
    assert list(p.told("save", id_).blocks.groups) == [group_runs(blocks[:2])]
    grant = p.finished(id_, blocks).grant
    assert list(p.told("save", id_).blocks.groups) == [group_runs(blocks[2:])]
    d.arrived(id_, offer=grant)
    d.allocated(id_, target)
    assert list(d.told("load", id_).blocks.groups) == [group_runs(target)]
    d.loaded(id_)
    assert d.told("load_ended", id_).computed_tokens == 40


# ---- missing blocks


def needed(pair: Pair, count: int) -> pool_pb2.Reclaimed:
    rows = [pool_pb2.GroupBlockCount(group=0, block_count=count)]
    return pair[0].stub.BlocksNeeded(scheduler_pb2.BlocksNeededRequest(group_block_counts=rows)).reclaimed


def test_a_scheduler_that_lacks_blocks_gets_those_that_nobody_came_for(pair: Pair) -> None:
    p, _ = pair
    id_, blocks = new_id(), p.engine.allocate(3)
    p.arrived(id_, give=PREFILL, intent=intent(firm_ttl=dur(0.0)))
    p.finished(id_, blocks)
    answer = needed(pair, 3)
    assert answer.enough
    assert [row.request_id for row in answer.leases] == [id_]
    assert p.told("send_ended", id_).failure.reason == common_pb2.FAILURE_REASON_LEASE_RECLAIMED


def test_blocks_that_are_lacking_are_asked_for_in_a_step_too(pair: Pair) -> None:
    p, _ = pair
    rows = [pool_pb2.GroupBlockCount(group=0, block_count=1)]
    call = scheduler_pb2.ScheduleCall(blocks_needed=scheduler_pb2.BlocksNeededRequest(group_block_counts=rows))
    bad = scheduler_pb2.ScheduleCall(blocks_needed=scheduler_pb2.BlocksNeededRequest())
    found = p.engine.api.step(scheduler_pb2.ScheduleRequest(calls=[call, bad], after_seq=p.seq)).answers
    assert found[0].HasField("blocks_needed")
    assert found[1].failure.reason == common_pb2.FAILURE_REASON_INVALID_FIELD
