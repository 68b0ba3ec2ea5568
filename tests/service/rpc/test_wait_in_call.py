"""PullBlocks and ReserveBlocks with `wait`: one call takes the place of two."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import CANCELLED, FAILED, RETURNED, SUCCEEDED, Engine, unchanged, wait_until
from tests.service.values import content, dur, prompt, push_part
from tests.service.waits import LONG_S, PENDING, TOKENS, begun, pulling, receives, reserving, waiting

UNTIL = [transfer_pb2.WAIT_CONDITION_ENDED, transfer_pb2.WAIT_CONDITION_RETURNED]


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("until", UNTIL)
def test_a_pull_answers_at_its_end(source: Engine, destination: Engine, until: Any) -> None:
    reply = destination.api.handoff.PullBlocks(pulling(source, destination, wait=waiting(until=until)))
    assert reply.condition_met
    assert reply.transfer.state == SUCCEEDED
    assert reply.header.event_seq >= reply.transfer.event_seq
    assert reply.transfer.memory == RETURNED


def test_a_pull_of_earlier_answers_at_its_end_once_it_has_its_blocks(source: Engine, destination: Engine) -> None:
    pull = destination.pull(source.hand_over(TOKENS).grant, TOKENS, None)
    request = handoff_pb2.PullBlocksRequest(
        transfer_id=pull.transfer_id, destination=destination.into(destination.allocate()), wait=waiting()
    )
    reply = destination.api.handoff.PullBlocks(request)
    assert reply.condition_met
    assert (reply.transfer.transfer_id, reply.transfer.state) == (pull.transfer_id, SUCCEEDED)


@pytest.mark.parametrize("timeout_s", [0.0, 0.02])
def test_the_end_of_the_time_is_no_error_and_the_transfer_goes_on(
    source: Engine, destination: Engine, timeout_s: float
) -> None:
    reply = destination.api.handoff.PullBlocks(pulling(source, destination, after_step=1, wait=waiting(timeout_s)))
    assert not reply.condition_met
    assert reply.transfer.state == PENDING
    assert destination.get(reply.transfer.transfer_id).state == PENDING


def test_without_a_wait_nothing_is_waited_for(source: Engine, destination: Engine) -> None:
    request = pulling(source, destination, after_step=1, wait=None)
    reply = destination.api.handoff.PullBlocks(request)
    assert not reply.condition_met
    assert reply.transfer.state == PENDING


def test_a_transfer_that_fails_meets_the_condition(source: Engine, destination: Engine) -> None:
    request = pulling(source, destination, content=content(prompt(16, seed=7)))
    reply = destination.api.handoff.PullBlocks(request)
    assert reply.condition_met
    assert reply.transfer.state == FAILED
    assert reply.transfer.failure.reason == common_pb2.FAILURE_REASON_CONTENT_MISMATCH


def test_cancel_transfer_answers_the_call(source: Engine, destination: Engine) -> None:
    with threads() as pool:
        call = pool.submit(destination.api.handoff.PullBlocks, pulling(source, destination, after_step=1))
        destination.cancel(begun(destination).transfer_id)
        reply = call.result()
    assert reply.condition_met
    assert reply.transfer.state == CANCELLED


def test_a_cancelled_call_cancels_no_transfer(source: Engine, destination: Engine) -> None:
    request = pulling(source, destination, after_step=1, idempotency_key="cancelled call")
    call = destination.api.handoff.PullBlocks.future(request)
    transfer_id = begun(destination).transfer_id
    call.cancel()
    request.wait.timeout.CopyFrom(dur(0))
    reply = destination.api.handoff.PullBlocks(request)
    assert (reply.transfer.transfer_id, reply.transfer.state) == (transfer_id, PENDING)


def test_a_call_whose_deadline_is_over_cancels_no_transfer(source: Engine, destination: Engine) -> None:
    request = pulling(source, destination, after_step=1)
    with pytest.raises(grpc.RpcError) as caught:
        destination.api.handoff.PullBlocks(request, timeout=2.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert begun(destination).state == PENDING


def test_the_same_key_finds_the_same_transfer_and_waits_as_it_asks(source: Engine, destination: Engine) -> None:
    request = pulling(source, destination, after_step=1, idempotency_key="again and again")
    with threads() as pool:
        first = pool.submit(destination.api.handoff.PullBlocks, request)
        transfer_id = begun(destination).transfer_id
        second = pool.submit(destination.api.handoff.PullBlocks, request)
        request_of_none = handoff_pb2.PullBlocksRequest()
        request_of_none.CopyFrom(request)
        request_of_none.ClearField("wait")
        at_once = destination.api.handoff.PullBlocks(request_of_none)
        assert (at_once.transfer.transfer_id, at_once.transfer.state) == (transfer_id, PENDING)
        assert not first.done()
        destination.cancel(transfer_id)
        ends = [call.result().transfer for call in (first, second)]
    assert [(end.transfer_id, end.state) for end in ends] == [(transfer_id, CANCELLED)] * 2


def test_the_same_key_with_another_body_is_refused_at_once(source: Engine, destination: Engine) -> None:
    request = pulling(source, destination, after_step=1, idempotency_key="reused", wait=waiting(0.0))
    destination.api.handoff.PullBlocks(request)
    request.priority = 1
    with unchanged(destination), refused(destination.api, "ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED"):
        destination.api.handoff.PullBlocks(request)


def test_validate_only_waits_for_nothing(source: Engine, destination: Engine) -> None:
    request, other = pulling(source, destination), reserving(source, destination)
    request.validate_only = other.validate_only = True
    with unchanged(destination):
        assert not destination.api.handoff.PullBlocks(request).condition_met
        assert not destination.api.handoff.ReserveBlocks(other).condition_met


@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize("make", [pulling, reserving])
def test_a_time_that_is_negative_is_refused_before_anything_is_made(
    source: Engine, destination: Engine, make: Any, validate_only: bool
) -> None:
    request = make(source, destination, wait=waiting(-1.0), validate_only=validate_only)
    handoff = destination.api.handoff
    call = handoff.PullBlocks if make is pulling else handoff.ReserveBlocks
    with unchanged(destination):
        refusal = destination.api.refusal(lambda: call(request))
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert refusal.fields == ("wait.timeout",)


def test_a_wait_that_nothing_can_end_is_refused(source: Engine, destination: Engine) -> None:
    pull, reservation = pulling(source, destination), reserving(source, destination)
    pull.ClearField("destination")
    reservation.ClearField("source")
    handoff = destination.api.handoff
    with unchanged(destination):
        refusals = [
            destination.api.refusal(lambda: handoff.PullBlocks(pull)),
            destination.api.refusal(lambda: handoff.ReserveBlocks(reservation)),
        ]
    assert [refusal.reason for refusal in refusals] == ["INVALID_FIELD"] * 2
    assert [refusal.fields for refusal in refusals] == [("wait",)] * 2


def test_a_reservation_answers_when_its_push_is_over(source: Engine, destination: Engine) -> None:
    request = reserving(source, destination)
    with threads() as pool:
        call = pool.submit(destination.api.handoff.ReserveBlocks, request)
        begun(destination)
        part = push_part(
            transfer_key=request.transfer_key,
            blocks=source.blocks(source.allocate()),
            content=content(TOKENS),
            last=True,
        )
        source.api.handoff.FinishedBlocks(part)
        reply = call.result()
    assert reply.condition_met
    assert reply.transfer.state == SUCCEEDED
    assert reply.grant.token


def test_a_server_that_drains_goes_on_with_what_waits(source: Engine, start: Start) -> None:
    (destination,) = start(())
    with threads() as pool:
        call = pool.submit(destination.api.handoff.PullBlocks, pulling(source, destination, after_step=1))
        transfer_id = begun(destination).transfer_id
        destination.api.admin.StartDrain(admin_pb2.StartDrainRequest())
        assert not call.done()
        destination.cancel(transfer_id)
        assert call.result().transfer.state == CANCELLED


def test_a_server_that_ends_answers_what_waits(source: Engine, start: Start) -> None:
    (destination,) = start(())
    with threads() as pool:
        call = pool.submit(destination.api.handoff.PullBlocks, pulling(source, destination, after_step=1))
        begun(destination)
        destination.process.signal(signal.SIGTERM)
        reply = call.result()
    assert reply.condition_met
    assert reply.transfer.state == FAILED
    assert destination.process.wait_exit() == 0


EACH = 8
PLACES = (
    f"{SETTINGS}calls_per_connection = {EACH}\ncalls = {2 * EACH}\n"
    f"standing_per_connection = {EACH}\nstanding = {2 * EACH}\n"
)


def test_calls_that_wait_leave_room_for_other_calls_and_streams(source: Engine, start: Start) -> None:
    """Waiting calls may take half of all places. Further calls are answered at once, and their transfers are made."""
    (destination,) = start((), settings=PLACES)
    requests = [pulling(source, destination, after_step=1) for _ in range(EACH)]
    calls = [destination.api.handoff.PullBlocks.future(request) for request in requests]
    wait_until(lambda: sum(call.done() for call in calls) == EACH - EACH // 2)
    at_once = [call.result() for call in calls if call.done()]
    assert not any(reply.condition_met for reply in at_once)
    assert len(receives(destination)) == EACH
    watch = destination.api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest(), timeout=LONG_S)
    next(watch)
    watch.cancel()
    for transfer in receives(destination):
        destination.cancel(transfer.transfer_id)
    assert all(call.result().transfer.state == CANCELLED for call in calls if call.result().condition_met)
    # The places are free again.
    again = destination.api.handoff.PullBlocks(pulling(source, destination))
    assert again.condition_met


def test_a_long_request_takes_the_places_of_its_bytes(source: Engine, start: Start) -> None:
    (destination,) = start((), settings=PLACES)
    long = prompt(16 * 2 * EACH * 300)
    request = pulling(source, destination, after_step=1, content=content(long))
    request.destination.CopyFrom(destination.into(destination.allocate()))
    assert request.ByteSize() > 16_384 * EACH // 2
    reply = destination.api.handoff.PullBlocks(request)
    assert not reply.condition_met
    assert destination.get(reply.transfer.transfer_id).transfer_id == reply.transfer.transfer_id
