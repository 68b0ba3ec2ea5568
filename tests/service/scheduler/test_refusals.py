"""A scheduler's repeated call acts once, and an invalid call is refused and changes nothing."""

from typing import Any

import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, scheduler_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.conftest import Start
from tests.service.engines import Engine, unchanged, wait_until
from tests.service.scheduler.scheduled_pair import PREFILL, Pair, transfers
from tests.service.scheduler.schedulers import COMPLETE, PUSH, Scheduler, arrived, intent, new_id
from tests.service.values import content, dur, group, new_key, prompt


@pytest.fixture
def pair(source: Engine, destination: Engine) -> Pair:
    """Returns P and D."""
    return Scheduler(source), Scheduler(destination)


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
    assert d.told("load_ended", id_).computed_tokens == 40
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
    ({"give": PREFILL, "intent": intent(consumer_count=1025)}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"prompt": content([])}, "INVALID_ARGUMENT", "CONTENT_REQUIRED"),
    ({"prompt": content([1], weights_revision="v9")}, "INVALID_ARGUMENT", "WEIGHTS_MISMATCH"),
    ({"incarnation": 7}, "ABORTED", "INCARNATION_CHANGED"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "why"), BAD_ARRIVALS)
def test_what_a_request_brings_is_checked_first(pair: Pair, fields: dict[str, Any], code: str, why: str) -> None:
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
    ({"blocks": [group([0, 1])], "dropped_block_counts": [1]}, "INVALID_ARGUMENT", "BLOCK_COUNT_MISMATCH"),
    ({"dropped_block_counts": [0, 1]}, "INVALID_ARGUMENT", "GROUP_MISMATCH"),
    ({"dropped_block_counts": [70_000]}, "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ({"dropped_block_counts": [2**32 - 1]}, "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ({"incarnation": 7}, "ABORTED", "INCARNATION_CHANGED"),
    ({"request_id": ""}, "INVALID_ARGUMENT", "INVALID_FIELD"),
]


@pytest.mark.parametrize(("fields", "code", "why"), BAD_TABLES)
def test_bad_blocks_are_refused_and_change_nothing(pair: Pair, fields: dict[str, Any], code: str, why: str) -> None:
    p, d = pair
    id_, target = new_id(), d.engine.allocate(3)
    d.arrived(id_, offer=p.prefilled(id_, p.engine.allocate(3)))
    wait_until(lambda: any(t.waiting_for == transfer_pb2.WAITING_FOR_BLOCKS for t in transfers(d.engine)))
    usual = {"request_id": id_, "blocks": [group(target)], "external_tokens": 40}
    with unchanged(d.engine), refused(d.engine.api, code, why):
        d.stub.BlocksAllocated(scheduler_pb2.BlocksAllocatedRequest(**d.engine.of_this_life({**usual, **fields})))
    with unchanged(d.engine), refused(d.engine.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        d.allocated(id_, target, external_tokens=39)
    d.allocated(id_, target)
    assert d.told("load_ended", id_).computed_tokens == 40
    giving = new_id()
    p.arrived(giving, give=PREFILL, intent=intent(mode=PUSH))
    blocks = p.engine.allocate(3)
    table = {"request_id": giving, "blocks": [group(blocks)], "computed_tokens": 40}
    with unchanged(p.engine), refused(p.engine.api, code, why):
        p.stub.TokensComputed(scheduler_pb2.TokensComputedRequest(**p.engine.of_this_life({**table, **fields})))
    with unchanged(p.engine), refused(p.engine.api, code, why):
        p.stub.RequestFinished(
            scheduler_pb2.RequestFinishedRequest(outcome=COMPLETE, **p.engine.of_this_life({**table, **fields}))
        )
    p.aborted(giving)


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
    draining, status = handshake_pb2.ADMISSION_DRAINING, admin_pb2.GetStatusRequest()
    wait_until(lambda: engine.api.admin.GetStatus(status).admission == draining)
    with refused(engine.api, "FAILED_PRECONDITION", "DRAINING"):
        p.arrived(new_id(), give=PREFILL, intent=intent())
    assert p.aborted(id_)
    assert engine.process.wait_exit() == 0


def test_a_server_without_a_pool_says_so(start: Start) -> None:
    (engine,) = start(("--no-pool",))
    with refused(engine.api, "UNAVAILABLE", "NO_POOL"):
        engine.api.scheduler.RequestArrived(arrived("r"))
    assert not engine.api.step(scheduler_pb2.ScheduleRequest()).news
