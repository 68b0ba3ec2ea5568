"""CallService.StreamCalls: a unary call over a stream acts exactly like a single call."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest

from kvgrpc.v1 import admin_pb2, calls_pb2, handshake_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire.bounds import CALLS_MAX
from tests.service.api import Api, read_refusal
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import CANCELLED, FAILED, SUCCEEDED, Engine, unchanged, wait_until
from tests.service.services import SERVICES
from tests.service.streamed import Streamed, info_of, refused, streaming
from tests.service.values import dur
from tests.service.waits import LONG_S, pulling, receives, waiting

FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "LIMIT_EXCEEDED")
UNKNOWN = (grpc.StatusCode.UNIMPLEMENTED.value[0], "FEATURE_UNAVAILABLE")
INVALID = (grpc.StatusCode.INVALID_ARGUMENT.value[0], "INVALID_FIELD")
LATE = (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "DEADLINE")


@pytest.fixture
def stream(destination: Engine) -> Iterator[Streamed]:
    with streaming(destination.api) as made:
        yield made


def status() -> admin_pb2.GetStatusRequest:
    return admin_pb2.GetStatusRequest()


def wait_for(transfer_id: str, timeout_s: float = LONG_S) -> transfer_pb2.WaitTransferRequest:
    return transfer_pb2.WaitTransferRequest(transfer_id=transfer_id, timeout=dur(timeout_s))


@pytest.fixture
def held(source: Engine, destination: Engine) -> str:
    """Starts a transfer of the destination that goes on until it is cancelled."""
    request = pulling(source, destination, after_step=1, wait=None)
    return destination.api.handoff.PullBlocks(request).transfer.transfer_id


def test_a_pull_over_the_stream_is_a_pull(source: Engine, destination: Engine, stream: Streamed) -> None:
    reply = stream.reply(pulling(source, destination))
    assert (reply.condition_met, reply.transfer.state) == (True, SUCCEEDED)
    assert reply.header.incarnation == destination.incarnation()


def test_every_unary_method_of_the_package_can_be_called(start: Start) -> None:
    """Each call has an empty request, and is answered, or refused for a missing field or a missing registry."""
    (engine,) = start(())
    unary = [
        f"{service.full_name}/{method.name}"
        for service in SERVICES
        if service.full_name.startswith("kvgrpc.v1.")
        for method in service.methods
        if not method.client_streaming and not method.server_streaming
    ]
    assert len(unary) > 30
    with streaming(engine.api) as stream:
        for path in unary:
            stream.send(status(), method=path, request=b"", timeout=dur(5))
            answer = stream.next()
            missing = "fleet.registry" in answer.error.message
            assert answer.WhichOneof("answer") == "reply" or refused(answer) != UNKNOWN or missing, path


@pytest.mark.parametrize(
    "path",
    [
        "kvgrpc.v1.TransferService/WatchTransfers",
        "kvgrpc.v1.LeaseService/KeepAlive",
        "kvgrpc.v1.CallService/StreamCalls",
        "kvgrpc.v1.TransferService/NoSuchMethod",
        "kvgrpc.peer.v1.PeerService/Converse",
        "grpc.health.v1.Health/Check",
        "/kvgrpc.v1.AdminService/GetStatus",
        "",
    ],
)
def test_what_is_no_unary_method_of_the_package_is_unimplemented(stream: Streamed, path: str) -> None:
    assert stream.refusal(status(), method=path) == UNKNOWN
    assert stream.reply(status()).header.incarnation


def test_answers_come_as_they_are_known(destination: Engine, stream: Streamed, held: str) -> None:
    slow, quick = stream.send(wait_for(held), status())
    assert stream.next().call_id == quick
    destination.cancel(held)
    answer = stream.next()
    assert answer.call_id == slow
    assert stream.read(answer).transfer.state == CANCELLED


def test_many_calls_are_under_way_at_once(destination: Engine, stream: Streamed, held: str) -> None:
    waits = stream.send(*[wait_for(held)] * 300)
    assert stream.reply(status()).header.incarnation
    destination.cancel(held)
    ends = [stream.next() for _ in waits]
    assert sorted(answer.call_id for answer in ends) == waits
    assert {stream.read(answer).transfer.state for answer in ends} == {CANCELLED}


def test_calls_begin_in_their_order(destination: Engine, stream: Streamed) -> None:
    counts = [pool_pb2.GroupBlockCount(block_count=1)]
    requests = [pool_pb2.AllocateBlocksRequest(group_block_counts=counts) for _ in range(64)]
    stream.send(*requests)
    ids = [stream.read(stream.next()).blocks.groups[0].runs.starts[0] for _ in requests]
    assert ids == sorted(ids)
    destination._allocated.update(ids)


def test_a_refusal_is_that_of_the_call_by_itself_and_ends_no_other(destination: Engine, stream: Streamed) -> None:
    request = transfer_pb2.GetTransferRequest(transfer_id="unknown")
    alone = destination.api.refusal(lambda: destination.api.transfers.GetTransfer(request))
    stream.send(request, status())
    first, second = stream.next(), stream.next()
    info = info_of(first.error.details)
    assert (first.error.message, info.reason, dict(info.metadata)) == (alone.message, alone.reason, alone.metadata)
    assert stream.read(second).header.incarnation


def test_fields_that_are_wrong_are_named(source: Engine, destination: Engine, stream: Streamed) -> None:
    request = pulling(source, destination, wait=waiting(-1.0))
    with unchanged(destination):
        assert stream.refusal(request) == INVALID


def test_a_request_that_cannot_be_read_is_refused_alone(stream: Streamed) -> None:
    assert stream.refusal(status(), request=b"\xff\xff") == INVALID
    assert stream.reply(status()).header.incarnation


def test_a_request_that_is_kept_while_its_call_stands_is_short(stream: Streamed) -> None:
    unknown_field = b"\xfa\x7f\x80\x80\x01" + bytes(16_384)
    assert stream.refusal(wait_for("t"), request=unknown_field) == INVALID


def test_a_call_that_takes_longer_than_its_time_is_late(stream: Streamed, held: str) -> None:
    assert stream.refusal(wait_for(held), timeout=dur(0.05)) == LATE
    assert stream.reply(status()).header.incarnation


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_call_without_time_does_nothing(destination: Engine, stream: Streamed, timeout_s: float) -> None:
    request = pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)])
    with unchanged(destination):
        assert stream.refusal(request, timeout=dur(timeout_s)) == LATE


def test_a_call_that_is_given_up_is_not_answered(destination: Engine, stream: Streamed, held: str) -> None:
    given_up, kept = stream.send(wait_for(held), wait_for(held))
    stream.cancel(given_up, 10_000)
    assert stream.reply(status()).header.incarnation
    destination.cancel(held)
    assert stream.next().call_id == kept
    stream.send(status())
    assert stream.next().call_id == kept + 2


def test_the_same_key_over_the_stream_and_by_itself_is_one_call(
    source: Engine, destination: Engine, stream: Streamed
) -> None:
    request = pulling(source, destination, idempotency_key="both ways")
    alone = destination.api.handoff.PullBlocks(request).transfer.transfer_id
    assert stream.reply(request).transfer.transfer_id == alone


def test_a_call_has_its_own_trace(source: Engine, destination: Engine, stream: Streamed) -> None:
    traces = [f"{number:032x}" for number in (1, 2)]
    found = [
        stream.reply(pulling(source, destination), traceparent=f"00-{trace}-{7:016x}-01").transfer.trace_id
        for trace in traces
    ]
    assert found == traces


def test_calls_are_counted_with_those_that_are_made_by_themselves(source: Engine, start: Start) -> None:
    limits = f"{SETTINGS}standing_per_connection = 4\nstanding = 4\n"
    (destination,) = start((), settings=limits)
    held = destination.api.handoff.PullBlocks(pulling(source, destination, after_step=1, wait=None))
    with streaming(destination.api) as stream:  # the stream itself takes one place
        calls = stream.send(*[wait_for(held.transfer.transfer_id)] * 4)
        answer = stream.next()
        assert (answer.call_id, refused(answer)) == (calls[-1], FULL)
        alone = destination.api.transfers.WaitTransfer
        refusal = destination.api.refusal(lambda: alone(wait_for(held.transfer.transfer_id)))
        assert refusal.reason == "LIMIT_EXCEEDED"
        stream.cancel(calls[0])
        wait_until(lambda: _answers(lambda: alone(wait_for(held.transfer.transfer_id, 0.0))))


def _answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def test_a_stream_whose_client_makes_no_more_calls_answers_the_last_ones(
    destination: Engine, stream: Streamed, held: str
) -> None:
    (call_id,) = stream.send(wait_for(held))
    stream.finish()
    destination.cancel(held)
    assert stream.next().call_id == call_id
    assert list(stream.stream) == []


def test_what_a_stream_that_is_cut_began_goes_on(source: Engine, destination: Engine) -> None:
    request = pulling(source, destination, after_step=1, idempotency_key="cut")
    with closing(Api(destination.address)) as api, streaming(api) as stream:
        stream.send(request)
        wait_until(lambda: len(receives(destination)) == 1)
    request.wait.timeout.CopyFrom(dur(0))
    again = destination.api.handoff.PullBlocks(request)
    assert [row.transfer_id for row in receives(destination)] == [again.transfer.transfer_id]


def test_a_server_that_ends_answers_what_waits_and_ends_the_stream(source: Engine, start: Start) -> None:
    (destination,) = start(())
    with streaming(destination.api) as stream:
        stream.send(pulling(source, destination, after_step=1))
        wait_until(lambda: len(receives(destination)) == 1)
        destination.process.signal(signal.SIGTERM)
        assert stream.read(stream.next()).transfer.state == FAILED
        assert list(stream.stream) == []
    assert destination.process.wait_exit() == 0


def ends_with(stream: Streamed, message: calls_pb2.StreamCallsRequest) -> tuple[str, str]:
    """Sends a message that must end the stream. Returns the stream's code and reason."""
    stream.sent.put(message)
    with pytest.raises(grpc.RpcError) as caught:
        list(stream.stream)
    found = read_refusal("/kvgrpc.v1.CallService/StreamCalls", caught.value)
    return found.code, found.reason


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [0]])
def test_call_ids_grow(stream: Streamed, ids: list[int]) -> None:
    calls = [stream.call(status(), call_id=id_) for id_ in ids]
    assert ends_with(stream, calls_pb2.StreamCallsRequest(calls=calls)) == ("INVALID_ARGUMENT", "INVALID_FIELD")


def test_a_message_has_so_many_calls(destination: Engine, stream: Streamed) -> None:
    calls = [stream.call(status(), request=b"") for _ in range(CALLS_MAX + 1)]
    message = calls_pb2.StreamCallsRequest(calls=calls)
    assert ends_with(stream, message) == ("OUT_OF_RANGE", "LIMIT_EXCEEDED")
    message = calls_pb2.StreamCallsRequest(cancelled_call_ids=range(CALLS_MAX + 1))
    with streaming(destination.api) as other:
        assert ends_with(other, message) == ("OUT_OF_RANGE", "LIMIT_EXCEEDED")


def test_as_many_calls_as_a_message_may_have_are_answered(stream: Streamed) -> None:
    calls = stream.send(*[transfer_pb2.AcknowledgeTransfersRequest()] * CALLS_MAX)
    assert [stream.next().call_id for _ in calls] == calls


def test_a_message_that_is_too_long_ends_its_stream_and_nothing_else(destination: Engine, stream: Streamed) -> None:
    long = stream.call(status(), request=bytes(5 << 20))
    assert ends_with(stream, calls_pb2.StreamCallsRequest(calls=[long]))[0] == "RESOURCE_EXHAUSTED"
    destination.check_alive()


def test_long_replies_go_out_in_messages_that_can_be_read(stream: Streamed) -> None:
    """All replies together are far longer than a message may be."""
    request = transfer_pb2.WaitTransfersRequest(transfer_ids=[f"{n}{'x' * 20}" for n in range(512)])
    calls = [call_id for _ in range(40) for call_id in stream.send(*[request] * 10)]
    assert sorted(stream.next().call_id for _ in calls) == calls


@pytest.mark.parametrize(
    "garbage",
    [{"method": "x" * 300}, {"call_id": 1 << 60}],
    ids=["long name", "id that no double holds"],
)
def test_a_call_that_is_out_of_bounds_is_refused_alone(
    destination: Engine, stream: Streamed, garbage: dict[str, Any]
) -> None:
    good = stream.call(status())
    with unchanged(destination):
        stream.sent.put(calls_pb2.StreamCallsRequest(calls=[good, stream.call(status(), **garbage)]))
        assert stream.read(stream.next()).header.incarnation
        assert refused(stream.next()) == INVALID


def test_names_and_traces_that_make_no_sense_hurt_nobody(stream: Streamed) -> None:
    assert stream.refusal(status(), method="kvgrpc.v1.\x00/\U0001f600") == UNKNOWN
    assert stream.reply(status(), traceparent="?" * 2000).header.incarnation


def test_a_client_that_does_not_read_is_not_read_either(destination: Engine, stream: Streamed) -> None:
    """The server's memory does not grow with the calls of a client that takes no answers."""
    requests: list[Any] = [handshake_pb2.GetCapabilitiesRequest()] * 512
    sent = [call_id for _ in range(40) for call_id in stream.send(*requests)]
    destination.check_alive()
    answered = [stream.next().call_id for _ in sent]
    assert sorted(answered) == sent, "calls that have waited for long begin in another order"
