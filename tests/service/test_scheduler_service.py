"""SchedulerService on two servers: a scheduler says what happens to its requests, and KV goes where the policy says."""

import json
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvgrpc.core.content import chain
from kvgrpc.service.news import NEWS_MAX
from kvgrpc.service.scheduler_service import STEP_CALLS_MAX
from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, scheduler_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import Engine, unchanged, wait_until
from tests.service.schedulers import (
    ABORTED,
    COMPLETE,
    PROMPT,
    PULL,
    PUSH,
    Scheduler,
    arrived,
    finished,
    intent,
    new_id,
    reason,
)
from tests.service.values import content, dur, group, new_key, prompt

PREFILL = scheduler_pb2.KvGift()
Pair = tuple[Scheduler, Scheduler]


@pytest.fixture
def pair(source: Engine, destination: Engine) -> Pair:
    """P and D."""
    return Scheduler(source), Scheduler(destination)


def at_rest(*schedulers: Scheduler) -> None:
    """No transfer goes on, and nothing is pinned."""
    wait_until(lambda: not any(one.engine.pins() for one in schedulers))


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
    assert (ended.tokens, ended.HasField("failure"), list(ended.invalid_blocks)) == (40, False, [])
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
    assert d.told("load_ended", id_).tokens == 40
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
    said = intent(request_id=f"chat-{id_}", consumers=2, priority=3, ttl=dur(20))
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    grant = p.prefilled(id_, p.engine.allocate(3), intent=said, traceparent=trace)
    (sent,) = p.engine.api.transfers.ListTransfers(
        transfer_pb2.ListTransfersRequest(filter=transfer_pb2.TransferFilter(request_id=f"chat-{id_}"))
    ).transfers
    assert (sent.consumers, sent.priority, sent.trace_id) == (2, 3, "ab" * 16)
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


# ---- push


@pytest.mark.parametrize("known", ["source", "peer of the intent", "target"])
def test_a_push_is_registered_by_its_destination_or_by_whoever_brings_the_grant(pair: Pair, known: str) -> None:
    p, d = pair
    id_, blocks, target = new_id(), p.engine.allocate(3), d.engine.allocate(3)
    written = p.engine.write(blocks, 1)
    here = common_pb2.PeerAddress(address=p.engine.address, engine_id=p.engine.engine_id)
    said = intent(mode=PUSH)
    push = scheduler_pb2.PushOffer(source=here if known == "source" else None)
    if known == "peer of the intent":
        said.peer.CopyFrom(here)
    d.arrived(id_, push=push, intent=said)
    assert d.allocated(id_, target) == 40
    fields: dict[str, Any] = {"give": PREFILL, "intent": intent(transfer_key=said.transfer_key, mode=PUSH)}
    if known == "target":
        reserved = d.told("reserved_at", id_)
        assert json.loads(reserved.kv_transfer_params)["do_remote_decode"]
        fields["target"] = reserved.grant
    assert not p.prefilled(id_, blocks, **fields).token, "a push has no grant to relay"
    assert not d.told("load_ended", id_).HasField("failure")
    assert d.engine.read(target) == written
    assert not p.told("send_ended", id_).HasField("failure")


def test_a_push_goes_in_chunks_and_ranges_of_layers_while_the_prefill_runs(start: Start) -> None:
    p, d = map(Scheduler, start((), (), settings=f"{SETTINGS}[scheduler]\nlayers_per_part = 1\n"))
    id_, blocks, target, key = new_id(), p.engine.allocate(3), d.engine.allocate(3), new_key()
    written = p.engine.write(blocks, 1)
    d.arrived(id_, push=scheduler_pb2.PushOffer(), intent=intent(transfer_key=key))
    d.allocated(id_, target)
    grant = d.told("reserved_at", id_).grant
    p.arrived(id_, give=scheduler_pb2.KvGift(mode=PUSH), intent=intent(transfer_key=key), target=grant)
    p.computed(id_, blocks, 35)
    wait_until(lambda: d.engine.read(target[:2]) == written[:2])
    p.finished(id_, blocks)
    assert not d.told("load_ended", id_).HasField("failure")
    assert d.engine.read(target) == written
    assert not p.told("send_ended", id_).HasField("failure")


def test_blocks_of_a_preempted_prefill_may_be_reused_at_once_and_its_push_starts_over(pair: Pair) -> None:
    p, d = pair
    id_, blocks, target, key = new_id(), p.engine.allocate(5), d.engine.allocate(3), new_key()
    p.engine.write(blocks[:2], 1)
    d.arrived(id_, push=scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address)),
              intent=intent(transfer_key=key))  # fmt: skip
    d.allocated(id_, target)
    p.arrived(id_, give=PREFILL, intent=intent(transfer_key=key, mode=PUSH))
    p.computed(id_, blocks[:2], 32)
    p.preempted(id_)
    p.preempted(id_)
    assert set(p.engine.free(blocks[:2])) == set(blocks[:2]), "nothing pins them any more"
    written = p.engine.write(blocks[2:], 2)
    p.computed(id_, blocks[2:], 16)
    p.finished(id_, blocks[2:])
    assert not d.told("load_ended", id_).HasField("failure")
    assert d.engine.read(target) == written
    assert not p.told("send_ended", id_).HasField("failure")


def test_layers_are_told_with_their_epoch_so_that_those_of_a_prefill_that_started_over_are_known(pair: Pair) -> None:
    p, d = pair
    id_, key, chat = new_id(), new_key(), prompt(48)
    blocks, target = p.engine.allocate(3), d.engine.allocate(3)
    d.arrived(id_, chat, push=scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address)),
              intent=intent(transfer_key=key))  # fmt: skip
    d.allocated(id_, target)
    p.arrived(id_, chat, give=PREFILL, intent=intent(transfer_key=key, mode=PUSH))
    written: list[bytes] = []
    for epoch in (0, 1):
        written = p.engine.write(blocks, 1 + epoch)
        p.computed(id_, blocks, 48)
        told = iter(lambda: d.told("provisional", id_), None)
        layers = next(row for row in told if row.layers_done)
        assert layers == scheduler_pb2.ProvisionalLayers(layers_done=[common_pb2.LayerRange(count=2)], part_epoch=epoch)
        if epoch == 0:
            p.preempted(id_)
    p.finished(id_, blocks, 48)
    assert not d.told("load_ended", id_).HasField("failure")
    assert d.engine.read(target) == written


def test_a_prefill_that_fails_tells_the_destination_of_its_push(pair: Pair) -> None:
    p, d = pair
    id_, key = new_id(), new_key()
    d.arrived(id_, push=scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address)),
              intent=intent(transfer_key=key))  # fmt: skip
    d.allocated(id_, d.engine.allocate(3))
    p.arrived(id_, give=PREFILL, intent=intent(transfer_key=key, mode=PUSH))
    assert not p.finished(id_, [], 0, outcome=ABORTED).keep
    assert reason(d.told("load_ended", id_).failure) == "SOURCE_FAILED"


@pytest.mark.parametrize("order", ["prefill first", "hit first", "a router brings the grant"])
def test_a_full_hit_on_a_push_ends_its_source_at_once(pair: Pair, order: str) -> None:
    p, d = pair
    id_, said = new_id(), intent()

    def prefill(**fields: Any) -> None:
        p.arrived(id_, give=scheduler_pb2.KvGift(mode=PUSH), intent=said, **fields)
        assert p.finished(id_, p.engine.allocate(3)).keep

    if order == "prefill first":
        prefill()
    routed = order == "a router brings the grant"
    d.arrived(id_, push=scheduler_pb2.PushOffer() if routed else pushed_by(p), intent=said)
    assert d.allocated(id_, d.engine.allocate(3), 40) == 0
    if routed:
        prefill(target=d.told("reserved_at", id_).grant)
    elif order == "hit first":
        prefill()
    assert not p.told("send_ended", id_).HasField("failure")
    wait_until(lambda: not pending(p, id_) + pending(d, id_))
    at_rest(p, d)
    assert not d.finished(id_, []).keep


def pushed_by(p: Scheduler) -> scheduler_pb2.PushOffer:
    return scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address))


def pending(scheduler: Scheduler, id_: str) -> list[transfer_pb2.Transfer]:
    """Transfers of a request that are not over."""
    over = (transfer_pb2.TRANSFER_STATE_PENDING, transfer_pb2.TRANSFER_STATE_ACTIVE)
    return [row for row in transfers(scheduler.engine) if row.request_id == id_ and row.state in over]


@pytest.mark.parametrize("on_loss", ["fail", "recompute"])
def test_a_push_of_which_one_side_does_not_come_ends_in_time_and_gives_the_blocks_back(
    start: Start, on_loss: str
) -> None:
    (engine,) = start((), settings=f'{SETTINGS}registration_timeout_s = 0.4\n[scheduler]\non_loss = "{on_loss}"\n')
    d, id_, target = Scheduler(engine), new_id(), engine.allocate(3)
    d.arrived(id_, push=scheduler_pb2.PushOffer(), intent=intent())
    assert d.allocated(id_, target, 16) == 24
    ended = d.told("load_ended", id_)
    assert reason(ended.failure) == "REGISTRATION_TIMEOUT"
    assert ended.on_loss == scheduler_pb2.OnLoss.Value(f"ON_LOSS_{on_loss.upper()}")
    assert (ended.tokens, ended.invalid_blocks) == (16, [group_runs(target[1:])])
    assert d.match(id_, 16) == 0
    given = new_id()
    assert not d.prefilled(given, engine.allocate(3), intent=intent(mode=PUSH)).token
    assert reason(d.told("send_ended", given).failure) == "REGISTRATION_TIMEOUT"
    at_rest(d)
    assert not d.finished(id_, target, 16, outcome=ABORTED).keep


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
        assert p.told("load_ended", "turn").tokens == 48
        assert p.engine.read(target[:3]) == written
    assert not d.told("send_ended", id_).HasField("failure")
    assert p.finished("turn", target, len(turn)).grant.token_count == len(turn)
    p.aborted("turn")
    p.told("send_ended", "turn")


@pytest.mark.parametrize("on_loss", ["fail", "recompute"])
@pytest.mark.parametrize("late", ["the offer expired", "the decode engine died"])
def test_history_that_is_asked_for_too_late_is_computed_or_fails_the_request_and_pins_nothing(
    start: Start, late: str, on_loss: str
) -> None:
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
        assert (ended.failure, list(ended.invalid_blocks)) == (lost.failure, [group_runs(target[:3])])
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
    assert d.told("load_ended", id_).tokens == 39
    id_, key, here = new_id(), new_key(), common_pb2.PeerAddress(address=p.engine.address)
    d.arrived(id_, push=scheduler_pb2.PushOffer(source=here), intent=intent(transfer_key=key))
    assert d.allocated(id_, d.engine.allocate(3)) == 39
    p.arrived(id_, give=scheduler_pb2.KvGift(mode=PUSH), intent=intent(transfer_key=key))
    assert p.finished(id_, p.engine.allocate(3), 39).handed_over
    ended = d.told("load_ended", id_)
    assert (ended.tokens, ended.HasField("failure")) == (39, False)


# ---- aborts


ABORTS: dict[str, tuple[bool, Callable[[Scheduler, str], object]]] = {
    "unknown": (False, lambda *_: None),
    "arrived": (False, lambda *_: None),
    "allocated": (True, lambda d, id_: d.allocated(id_, d.engine.allocate(3))),
    "all was found here": (False, lambda d, id_: d.allocated(id_, d.engine.allocate(3), 40)),
}


@pytest.mark.parametrize("state", ABORTS)
def test_an_abort_of_what_is_taken_ends_it_on_both_sides(pair: Pair, state: str) -> None:
    p, d = pair
    keep, reach = ABORTS[state]
    id_ = new_id()
    grant = p.prefilled(id_, p.engine.allocate(3))
    if state != "unknown":
        d.arrived(id_, offer=grant)
    with p.engine.process.stopped():  # nothing arrives before the abort
        reach(d, id_)
        assert d.aborted(id_, "the user left") is keep
        d.aborted(id_)
    if keep:
        assert reason(d.told("load_ended", id_).failure) == "CANCELLED"
    if state == "unknown":
        p.aborted(id_)
    p.told("send_ended", id_)
    at_rest(p, d)


def test_an_abort_of_what_is_waited_for_by_push_frees_the_source(pair: Pair) -> None:
    p, d = pair
    id_, key = new_id(), new_key()
    p.arrived(id_, give=PREFILL, intent=intent(transfer_key=key, mode=PUSH))
    p.finished(id_, p.engine.allocate(3))
    d.arrived(id_, push=scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address)),
              intent=intent(transfer_key=key))  # fmt: skip
    assert not d.aborted(id_), "no blocks were allocated"
    p.told("send_ended", id_)
    at_rest(p, d)


@pytest.mark.parametrize("prefill", ["is not known", "computes nothing yet", "has sent a part"])
def test_an_abort_of_a_push_into_blocks_gives_them_back_and_frees_its_source(pair: Pair, prefill: str) -> None:
    p, d = pair
    id_, said, blocks, target = new_id(), intent(), p.engine.allocate(3), d.engine.allocate(3)
    written = p.engine.write(blocks, 1)
    p.arrived(id_, give=scheduler_pb2.KvGift(mode=PUSH), intent=said)
    d.arrived(id_, push=scheduler_pb2.PushOffer() if prefill == "is not known" else pushed_by(p), intent=said)
    assert d.allocated(id_, target) == 40
    if prefill != "is not known":
        wait_until(lambda: bool(pending(p, id_)), what=lambda: transfers(d.engine))  # the push is registered
    if prefill == "has sent a part":
        p.computed(id_, blocks, 32)
        wait_until(lambda: d.engine.read(target[:2]) == written[:2])
    assert d.aborted(id_, "the user left"), "they may still be written"
    ended = d.told("load_ended", id_)
    assert (reason(ended.failure), ended.tokens) == ("CANCELLED", 0)
    assert ended.invalid_blocks == [group_runs(target)]
    if prefill == "is not known":
        p.aborted(id_)
    elif p.finished(id_, blocks).keep:  # it had not heard of the abort yet
        p.told("send_ended", id_)
    at_rest(p, d)
    assert p.finished(id_, blocks).keep is False, "it is forgotten"


@pytest.mark.parametrize("mode", [PULL, PUSH])
@pytest.mark.parametrize("state", ["arrived", "computed", "finished"])
def test_an_abort_of_what_is_given_takes_it_back(pair: Pair, state: str, mode: "common_pb2.TransferMode") -> None:
    p, _ = pair
    id_, blocks = new_id(), p.engine.allocate(3)
    p.arrived(id_, give=PREFILL, intent=intent(mode=mode))
    if state != "arrived":
        p.computed(id_, blocks, 32)
    if state == "finished":
        assert p.finished(id_, blocks).keep
    p.aborted(id_, "the user left")
    if state == "finished":
        assert reason(p.told("send_ended", id_).failure) == "CANCELLED"
    at_rest(p)
    assert not p.finished(id_, blocks).keep, "it is forgotten"


# ---- losses


def test_swapped_grants_are_a_loss_that_names_its_blocks(pair: Pair) -> None:
    p, d = pair
    mine, other, target = new_id(), new_id(), d.engine.allocate(3)
    p.prefilled(mine, p.engine.allocate(3))
    p.arrived(other, prompt(40, seed=7), give=PREFILL, intent=intent())
    d.arrived(mine, offer=p.finished(other, p.engine.allocate(3)).grant)
    d.allocated(mine, target)
    ended = d.told("load_ended", mine)
    assert reason(ended.failure) == "CONTENT_MISMATCH"
    (pull,) = [transfer for transfer in transfers(d.engine) if transfer.request_id == mine]
    assert ended.failure == pull.failure
    assert (ended.failure.phase, ended.failure.side) == ("open", common_pb2.SIDE_SOURCE)
    assert ended.failure.next == common_pb2.NEXT_STEP_FIX_REQUEST
    assert (ended.tokens, ended.on_loss) == (0, scheduler_pb2.ON_LOSS_FAIL)
    assert [list(range(s, s + n)) for row in ended.invalid_blocks
            for s, n in zip(row.blocks.starts, row.blocks.counts, strict=True)] == [target]  # fmt: skip
    for id_ in (mine, other):
        p.aborted(id_)


def test_what_is_gone_before_blocks_are_there_is_computed_here(start: Start) -> None:
    p, d = map(Scheduler, start((), (), settings=f'{SETTINGS}[scheduler]\non_loss = "recompute"\n'))
    id_ = new_id()
    grant = p.prefilled(id_, p.engine.allocate(3))
    p.aborted(id_)
    p.told("send_ended", id_)
    d.arrived(id_, offer=grant)
    lost = d.told("take_lost", id_)
    assert (reason(lost.failure), lost.on_loss) == ("LEASE_RELEASED", scheduler_pb2.ON_LOSS_RECOMPUTE)
    assert d.match(id_) == 0


def test_blocks_that_the_server_refuses_are_a_loss_and_nothing_stays_pinned(pair: Pair) -> None:
    p, d = pair
    id_ = new_id()
    d.arrived(id_, offer=p.prefilled(id_, p.engine.allocate(3)))
    d.allocated(id_, [500, 501, 502])
    assert reason(d.told("load_ended", id_).failure) == "BLOCK_NOT_ALLOCATED"
    p.told("send_ended", id_)
    p.arrived(other := new_id(), give=PREFILL, intent=intent())
    handed = p.finished(other, [500, 501, 502])
    assert (handed.keep, handed.handed_over, handed.grant.token) == (True, False, b"")
    assert reason(p.told("send_ended", other).failure) == "BLOCK_NOT_ALLOCATED"
    at_rest(p, d)


def test_a_source_that_dies_is_a_loss(start: Start) -> None:
    p, d = map(Scheduler, start((), ()))
    id_ = new_id()
    d.arrived(id_, offer=p.prefilled(id_, p.engine.allocate(3)))
    p.engine.process.kill()
    d.allocated(id_, d.engine.allocate(3))
    assert d.told("load_ended", id_).HasField("failure")


# ---- staged engines


def test_a_staged_engine_is_told_what_to_save_and_what_to_load(start: Start) -> None:
    p, d = map(Scheduler, start((), (), settings=f"{SETTINGS}[scheduler]\nstaged = true\n"))
    id_, blocks, target = new_id(), p.engine.allocate(3), d.engine.allocate(3)
    p.arrived(id_, give=PREFILL, intent=intent())
    p.computed(id_, blocks, 32)
    assert p.told("save", id_).blocks == [group_runs(blocks[:2])]
    grant = p.finished(id_, blocks).grant
    assert p.told("save", id_).blocks == [group_runs(blocks[2:])]
    d.arrived(id_, offer=grant)
    d.allocated(id_, target)
    assert d.told("load", id_).blocks == [group_runs(target)]
    d.loaded(id_)
    assert d.told("load_ended", id_).tokens == 40


def group_runs(ids: list[int]) -> common_pb2.GroupBlocks:
    """As one run, the way a server writes it."""
    return common_pb2.GroupBlocks(blocks=common_pb2.BlockRuns(starts=ids[:1], counts=[len(ids)]))


# ---- repeats, and what is refused


def test_every_call_may_be_repeated(pair: Pair) -> None:
    p, d = pair
    id_, blocks, target = new_id(), p.engine.allocate(3), d.engine.allocate(3)
    request = arrived(id_, give=PREFILL, intent=intent())
    assert [p.stub.RequestArrived(request).prompt_tokens for _ in range(2)] == [40, 40]
    first, again = p.finished(id_, blocks), p.finished(id_, blocks)
    assert (first.keep, first.handed_over, first.grant) == (again.keep, again.handed_over, again.grant)
    offer = arrived(id_, offer=first.grant)
    for _ in range(2):
        d.stub.RequestArrived(offer)
    for _ in range(2):
        d.allocated(id_, target, external_tokens=40)
    assert d.told("load_ended", id_).tokens == 40
    d.allocated(id_, target, external_tokens=40)
    d.loaded(id_)
    d.preempted(id_)
    p.told("send_ended", id_)
    assert [news.request_id for one in pair for news in one.poll()] == []
    assert [d.finished(id_, target).keep for _ in range(2)] == [False, False]


def test_another_request_of_the_same_name_is_refused(pair: Pair) -> None:
    p, _ = pair
    p.arrived(id_ := new_id(), intent=intent(transfer_key=b"k" * 16), give=PREFILL)
    for other in (
        arrived(id_, prompt(40, seed=1), intent=intent(transfer_key=b"k" * 16), give=PREFILL),
        arrived(id_, intent=intent(), give=PREFILL),
        arrived(id_),
    ):
        with unchanged(p.engine), refused(p.engine.api, "ALREADY_EXISTS", "TRANSFER_EXISTS"):
            p.stub.RequestArrived(other)
    assert not p.aborted(id_)


GRANT = "a READ grant"
BAD_ARRIVALS: list[tuple[dict[str, Any], str, str]] = [
    ({"request_id": ""}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"request_id": "x" * 257}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"give": PREFILL}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"give": PREFILL, "intent": intent(transfer_key=b"short")}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"push": scheduler_pb2.PushOffer()}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"push": scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(engine_id="p")), "intent": intent()},
     "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"push": scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address="10.9.9.9:1")), "intent": intent()},
     "PERMISSION_DENIED", "DIAL_REFUSED"),
    ({"offer": common_pb2.Grant(token=b"nonsense")}, "INVALID_ARGUMENT", "GRANT_INVALID"),
    ({"offer": GRANT, "intent": intent()}, "PERMISSION_DENIED", "TRANSFER_KEY_MISMATCH"),
    ({"give": PREFILL, "intent": intent(mode=PUSH), "target": GRANT}, "FAILED_PRECONDITION", "GRANT_WRONG_ACCESS"),
    ({"give": PREFILL, "intent": intent(), "target": GRANT}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"give": PREFILL, "intent": intent(ttl=dur(-1))}, "INVALID_ARGUMENT", "TTL_INVALID"),
    ({"give": PREFILL, "intent": intent(consumers=1025)}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": content([])}, "INVALID_ARGUMENT", "CONTENT_REQUIRED"),
    ({"prompt": content([1], weights_revision="v9")}, "INVALID_ARGUMENT", "WEIGHTS_MISMATCH"),
    ({"incarnation": 7}, "ABORTED", "INCARNATION_CHANGED"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "why"), BAD_ARRIVALS)
def test_what_a_request_brings_is_checked_before_it_is_known(
    pair: Pair, fields: dict[str, Any], code: str, why: str
) -> None:
    p, d = pair
    grant = p.prefilled(given := new_id(), p.engine.allocate(3))
    made: dict[str, Any] = {key: grant if value is GRANT else value for key, value in fields.items()}
    request = arrived(made.pop("request_id", id_ := new_id()), **made)
    with unchanged(d.engine), refused(d.engine.api, code, why):
        d.stub.RequestArrived(request)
    assert d.match(id_) == 0
    p.aborted(given)


def test_a_target_that_the_server_does_not_take_refuses_its_request(pair: Pair) -> None:
    p, d = pair
    key = new_key()
    d.arrived(id_ := new_id(), push=scheduler_pb2.PushOffer(), intent=intent(transfer_key=key))
    d.allocated(id_, d.engine.allocate(3))
    grant = d.told("reserved_at", id_).grant
    cancel = transfer_pb2.CancelTransferRequest(transfer_key=key)
    p.engine.api.transfers.CancelTransfer(cancel)
    request = arrived(id_, give=PREFILL, intent=intent(transfer_key=key, mode=PUSH), target=grant)
    with unchanged(p.engine), refused(p.engine.api, "FAILED_PRECONDITION", "CANCELLED"):
        p.stub.RequestArrived(request)
    assert not p.finished(id_, p.engine.allocate(3)).keep, "it is not known"
    d.aborted(id_)
    d.told("load_ended", id_)


BAD_TABLES = [
    ({"blocks": [group([520, 0, 1])]}, "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE"),
    ({"blocks": [group([0, 1, 0])]}, "INVALID_ARGUMENT", "BLOCK_DUPLICATE"),
    ({"blocks": [group([0, 1, 2], 1)]}, "INVALID_ARGUMENT", "GROUP_MISMATCH"),
    ({"blocks": [group(range(70_000))]}, "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ({"blocks": [group([0, 1])]}, "INVALID_ARGUMENT", "BLOCK_COUNT_MISMATCH"),
    ({"blocks": [group([0, 1])], "dropped_blocks": [1]}, "INVALID_ARGUMENT", "BLOCK_COUNT_MISMATCH"),
    ({"dropped_blocks": [0, 1]}, "INVALID_ARGUMENT", "GROUP_MISMATCH"),
    ({"dropped_blocks": [70_000]}, "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ({"dropped_blocks": [2**32 - 1]}, "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ({"incarnation": 7}, "ABORTED", "INCARNATION_CHANGED"),
    ({"request_id": ""}, "INVALID_ARGUMENT", "INVALID_FIELD"),
]


@pytest.mark.parametrize(("fields", "code", "why"), BAD_TABLES)
def test_blocks_that_cannot_be_are_refused_and_nothing_has_changed(
    pair: Pair, fields: dict[str, Any], code: str, why: str
) -> None:
    p, d = pair
    id_, target = new_id(), d.engine.allocate(3)
    d.arrived(id_, offer=p.prefilled(id_, p.engine.allocate(3)))
    wait_until(lambda: any(t.waiting_for == "blocks" for t in transfers(d.engine)))
    usual = {"request_id": id_, "blocks": [group(target)], "external_tokens": 40}
    with unchanged(d.engine), refused(d.engine.api, code, why):
        d.stub.BlocksAllocated(scheduler_pb2.BlocksAllocatedRequest(**{**usual, **fields}))
    with unchanged(d.engine), refused(d.engine.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        d.allocated(id_, target, external_tokens=39)
    d.allocated(id_, target)
    assert d.told("load_ended", id_).tokens == 40
    giving = new_id()
    p.arrived(giving, give=PREFILL, intent=intent(mode=PUSH))
    blocks = p.engine.allocate(3)
    table = {"request_id": giving, "blocks": [group(blocks)], "computed_tokens": 40}
    with unchanged(p.engine), refused(p.engine.api, code, why):
        p.stub.TokensComputed(scheduler_pb2.TokensComputedRequest(**{**table, **fields}))
    with unchanged(p.engine), refused(p.engine.api, code, why):
        p.stub.RequestFinished(scheduler_pb2.RequestFinishedRequest(outcome=COMPLETE, **{**table, **fields}))
    p.aborted(giving)


def transfers(engine: Engine) -> list[transfer_pb2.Transfer]:
    return list(engine.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest()).transfers)


def test_what_is_handed_over_has_a_name_and_an_outcome(pair: Pair) -> None:
    p, _ = pair
    id_, blocks = new_id(), p.engine.allocate(3)
    p.arrived(id_, give=scheduler_pb2.KvGift(decodes=True), intent=intent())
    with unchanged(p.engine), refused(p.engine.api, "OUT_OF_RANGE", "CONTENT_RANGE"):
        p.finished(id_, blocks, 48)
    with unchanged(p.engine), refused(p.engine.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        p.finished(id_, blocks, outcome=0)
    assert p.finished(id_, blocks, 48, content=content(prompt(50))).grant.token_count == 48
    p.aborted(id_)


def test_a_server_that_drains_takes_no_request_that_moves_anything(start: Start) -> None:
    (engine,) = start(("--drain-s", "60"))
    p = Scheduler(engine)
    p.prefilled(id_ := new_id(), engine.allocate(3))
    engine.process.popen.terminate()
    draining, status = admin_pb2.ADMISSION_DRAINING, admin_pb2.GetStatusRequest()
    wait_until(lambda: engine.api.admin.GetStatus(status).admission == draining)
    with refused(engine.api, "UNAVAILABLE", "DRAINING"):
        p.arrived(new_id(), give=PREFILL, intent=intent())
    assert p.aborted(id_)
    assert engine.process.wait_exit() == 0


def test_a_server_without_a_pool_says_so(start: Start) -> None:
    (engine,) = start(("--no-pool",))
    with refused(engine.api, "UNAVAILABLE", "NO_POOL"):
        engine.api.scheduler.RequestArrived(arrived("r"))
    assert not engine.api.scheduler.ScheduleStep(scheduler_pb2.ScheduleStepRequest()).news


# ---- steps


def calls(id_: str, grant: common_pb2.Grant, target: list[int]) -> Iterator[scheduler_pb2.ScheduleCall]:
    """All of a request that finds nothing here; one of them is nonsense."""
    yield scheduler_pb2.ScheduleCall(request_arrived=arrived(id_, offer=grant))
    yield scheduler_pb2.ScheduleCall(match_tokens=scheduler_pb2.MatchTokensRequest(request_id=id_))
    bad = scheduler_pb2.BlocksAllocatedRequest(request_id=id_, blocks=[group([0])], external_tokens=40)
    yield scheduler_pb2.ScheduleCall(blocks_allocated=bad)
    yield scheduler_pb2.ScheduleCall()
    good = scheduler_pb2.BlocksAllocatedRequest(request_id=id_, blocks=[group(target)], external_tokens=40)
    yield scheduler_pb2.ScheduleCall(blocks_allocated=good)
    yield scheduler_pb2.ScheduleCall(blocks_loaded=scheduler_pb2.BlocksLoadedRequest(request_id=id_))
    yield scheduler_pb2.ScheduleCall(tokens_computed=scheduler_pb2.TokensComputedRequest(request_id=id_))
    yield scheduler_pb2.ScheduleCall(request_preempted=scheduler_pb2.RequestPreemptedRequest(request_id=id_))
    yield scheduler_pb2.ScheduleCall(request_finished=finished(id_, target))
    yield scheduler_pb2.ScheduleCall(abort_request=scheduler_pb2.AbortRequestRequest(request_id="unheard of"))


Stepper = Callable[[scheduler_pb2.ScheduleStepRequest], scheduler_pb2.ScheduleStepResponse]


@contextmanager
def stepping(scheduler: Scheduler, by: str) -> Iterator[Stepper]:
    """Makes steps, each by a call or all in one stream: the messages are the same."""
    if by == "unary":
        yield scheduler.stub.ScheduleStep
        return
    said: queue.Queue[scheduler_pb2.ScheduleRequest | None] = queue.Queue()
    answers = scheduler.stub.Schedule(iter(said.get, None), timeout=60)

    def step(request: scheduler_pb2.ScheduleStepRequest) -> scheduler_pb2.ScheduleStepResponse:
        said.put(scheduler_pb2.ScheduleRequest.FromString(request.SerializeToString()))
        return scheduler_pb2.ScheduleStepResponse.FromString(next(answers).SerializeToString())

    yield step
    said.put(None)
    assert list(answers) == []


@pytest.mark.parametrize("by", ["unary", "stream"])
def test_a_step_says_all_in_one_message_and_a_bad_call_fails_alone(pair: Pair, by: str) -> None:
    p, d = pair
    id_, target = new_id(), d.engine.allocate(3)
    grant = p.prefilled(id_, p.engine.allocate(3))
    with stepping(d, by) as step:
        reply = step(scheduler_pb2.ScheduleStepRequest(calls=calls(id_, grant, target), after_seq=d.seq))
        kinds = [row.WhichOneof("answer") for row in reply.answers]
        assert kinds == [
            "request_arrived", "match_tokens", None, None, "blocks_allocated", "blocks_loaded", "tokens_computed",
            "request_preempted", "request_finished", "abort_request",
        ]  # fmt: skip
        assert reply.answers[1].match_tokens.tokens == 40
        refusals = [(row.code, reason(row.failure)) for row in reply.answers[2:4]]
        assert refusals == [("INVALID_ARGUMENT", "BLOCK_COUNT_MISMATCH"), ("INVALID_ARGUMENT", "INVALID_FIELD")]
        assert reply.answers[2].failure.message
        assert reply.answers[8].request_finished.keep, "they are being filled"
        assert reply.header.incarnation == d.engine.incarnation()
        news: list[scheduler_pb2.SchedulerNews] = []

        def ended() -> bool:
            news[:] = step(scheduler_pb2.ScheduleStepRequest(after_seq=d.seq)).news
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
        (scheduler_pb2.ScheduleStepRequest(calls=[one], incarnation=7), "ABORTED", "INCARNATION_CHANGED"),
        (scheduler_pb2.ScheduleStepRequest(calls=[one], after_seq=1 << 60), "INVALID_ARGUMENT", "INVALID_FIELD"),
        (scheduler_pb2.ScheduleStepRequest(calls=many), "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ):
        with unchanged(d.engine), refused(d.engine.api, code, why):
            d.stub.ScheduleStep(step)
    assert not d.aborted(one.request_arrived.request_id)
    assert d.poll() == []


# ---- news


def lost(scheduler: Scheduler, grant: common_pb2.Grant) -> str:
    """A request that is told at once that it takes nothing."""
    scheduler.arrived(id_ := new_id(), None, offer=grant)
    return id_


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


def test_news_that_nobody_reads_keep_new_requests_out(start: Start) -> None:
    (engine,) = start(())
    d = Scheduler(engine)
    offer = handoff_pb2.FinishedBlocksRequest(
        transfer_key=new_key(), last=True, content=content(PROMPT), blocks=[group(engine.allocate(3))]
    )
    grant = engine.api.handoff.FinishedBlocks(offer).grant
    rows = [
        call
        for i in range(STEP_CALLS_MAX // 2)
        for call in (
            scheduler_pb2.ScheduleCall(request_arrived=arrived(f"r-{i}", None, offer=grant)),
            scheduler_pb2.ScheduleCall(abort_request=scheduler_pb2.AbortRequestRequest(request_id=f"r-{i}")),
        )
    ]
    reply = scheduler_pb2.ScheduleStepResponse()
    for _ in range(NEWS_MAX // (STEP_CALLS_MAX // 2)):
        reply = engine.api.scheduler.ScheduleStep(scheduler_pb2.ScheduleStepRequest(calls=rows))
        assert not any(row.code for row in reply.answers)
    assert reply.more
    with refused(engine.api, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
        d.arrived("other")
    assert d.poll()[-1].seq == len(reply.news)
    d.poll()
    d.arrived("other")
