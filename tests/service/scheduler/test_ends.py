"""SchedulerService on two servers: aborts and losses end a request on both sides."""

from collections.abc import Callable

import pytest

from kvgrpc.v1 import common_pb2, scheduler_pb2
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import Engine, wait_until
from tests.service.scheduler.scheduled_pair import PREFILL, Pair, at_rest, group_runs, pending, pushed_by, transfers
from tests.service.scheduler.schedulers import PULL, PUSH, Scheduler, intent, new_id, reason
from tests.service.values import new_key, prompt


@pytest.fixture
def pair(source: Engine, destination: Engine) -> Pair:
    """Returns P and D."""
    return Scheduler(source), Scheduler(destination)


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
    with p.engine.process.stopped():  # no byte arrives before the abort
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
    push = scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address))
    d.arrived(id_, push=push, intent=intent(transfer_key=key))
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
        wait_until(lambda: bool(pending(p, id_)), what=lambda: transfers(d.engine))  # waits for the push's registration
    if prefill == "has sent a part":
        p.computed(id_, blocks, 32)
        wait_until(lambda: d.engine.read(target[:2]) == written[:2])
    assert d.aborted(id_, "the user left"), "they may still be written"
    ended = d.told("load_ended", id_)
    assert (reason(ended.failure), ended.computed_tokens) == ("CANCELLED", 0)
    assert list(ended.invalid_blocks.groups) == [group_runs(target)]
    if prefill == "is not known":
        p.aborted(id_)
    elif p.finished(id_, blocks).keep:  # the source had not heard of the abort yet
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
    assert (ended.failure.phase, ended.failure.side) == (common_pb2.TRANSFER_PHASE_OPEN, common_pb2.SIDE_SOURCE)
    assert ended.failure.next == common_pb2.NEXT_STEP_FIX_REQUEST
    assert (ended.computed_tokens, ended.on_loss) == (0, scheduler_pb2.ON_LOSS_FAIL)
    runs = [row.runs for row in ended.invalid_blocks.groups]
    assert [list(range(s, s + n)) for run in runs for s, n in zip(run.starts, run.counts, strict=True)] == [target]
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
    assert (reason(lost.failure), lost.on_loss) == ("CANCELLED", scheduler_pb2.ON_LOSS_RECOMPUTE)
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
