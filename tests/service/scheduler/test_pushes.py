"""SchedulerService on two servers: KV moves by push, during or after its computation."""

import json
from typing import Any

import pytest

from kvgrpc.v1 import common_pb2, scheduler_pb2
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import Engine, wait_until
from tests.service.scheduler.scheduled_pair import PREFILL, Pair, at_rest, group_runs, pending, pushed_by
from tests.service.scheduler.schedulers import ABORTED, PUSH, Scheduler, intent, new_id, reason
from tests.service.values import new_key, prompt


@pytest.fixture
def pair(source: Engine, destination: Engine) -> Pair:
    """Returns P and D."""
    return Scheduler(source), Scheduler(destination)


@pytest.mark.parametrize("known", ["source", "peer of the intent", "target"])
def test_a_push_is_registered_by_its_destination_or_by_a_call(pair: Pair, known: str) -> None:
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
    push = scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address))
    d.arrived(id_, push=push, intent=intent(transfer_key=key))
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
    push = scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address))
    d.arrived(id_, chat, push=push, intent=intent(transfer_key=key))
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
    push = scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address))
    d.arrived(id_, push=push, intent=intent(transfer_key=key))
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


@pytest.mark.parametrize("on_loss", ["fail", "recompute"])
def test_a_push_without_its_other_side_ends_in_time_and_returns_blocks(start: Start, on_loss: str) -> None:
    (engine,) = start((), settings=f'{SETTINGS}registration_timeout_s = 0.4\n[scheduler]\non_loss = "{on_loss}"\n')
    d, id_, target = Scheduler(engine), new_id(), engine.allocate(3)
    d.arrived(id_, push=scheduler_pb2.PushOffer(), intent=intent())
    assert d.allocated(id_, target, 16) == 24
    ended = d.told("load_ended", id_)
    assert reason(ended.failure) == "REGISTRATION_TIMEOUT"
    assert ended.on_loss == scheduler_pb2.OnLoss.Value(f"ON_LOSS_{on_loss.upper()}")
    assert (ended.computed_tokens, list(ended.invalid_blocks.groups)) == (16, [group_runs(target[1:])])
    assert d.match(id_, 16) == 0
    given = new_id()
    assert not d.prefilled(given, engine.allocate(3), intent=intent(mode=PUSH)).token
    assert reason(d.told("send_ended", given).failure) == "REGISTRATION_TIMEOUT"
    at_rest(d)
    assert not d.finished(id_, target, 16, outcome=ABORTED).keep
