"""Open calls of a server are bounded for each connection and in total, and each connection keeps a minimum."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.service.places import OWN
from kvgrpc.service.rpc.method import STANDING_BYTES_MAX
from kvgrpc.service.watchers import WATCHES_OF_CONNECTION_MAX
from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, handshake_pb2, lease_pb2, scheduler_pb2, transfer_pb2
from tests.service.api import Api, read_refusal, refused
from tests.service.conftest import SETTINGS, Start, starting
from tests.service.consumer import Consumer
from tests.service.engines import Engine, wait_until
from tests.service.values import content, dur, prompt

EACH = 8
SMALL = f"{SETTINGS}standing_per_connection = {EACH}\nstanding = {2 * EACH}\npeer_grace_s = 120.0\n"
OPEN_S = 60.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with starting(tmp_path_factory.mktemp("places")) as begin:
        yield begin((), settings=SMALL)[0]


@contextmanager
def caller(engine: Engine) -> Iterator[Api]:
    """Yields a new connection."""
    with closing(Api(engine.address)) as api:
        yield api


class Held:
    """Calls that are open, and end with the test."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.calls: list[Any] = []

    def requests(self, *first: Message) -> Iterator[Any]:
        """Yields these requests, then waits until the end of the test."""
        yield from first
        self._over.wait()

    def add(self, call: Any) -> Any:
        self.calls.append(call)
        return call

    def close(self) -> None:
        self._over.set()
        for call in self.calls:
            call.cancel()


@pytest.fixture
def held() -> Iterator[Held]:
    with closing(Held()) as made:
        yield made


def _reflection(version: str) -> Callable[[Api, Held, str], Any]:
    def opened(api: Api, held: Held, _: str) -> Any:
        method = api.plain.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        return method(held.requests(), timeout=OPEN_S)

    return opened


# Each opens a call that its caller may keep open. The text is the id of a transfer that goes on.
KINDS: dict[str, Callable[[Api, Held, str], Any]] = {
    "KeepAlive": lambda api, held, _: api.leases.KeepAlive(held.requests(), timeout=OPEN_S),
    "Schedule": lambda api, held, _: api.scheduler.Schedule(held.requests(), timeout=OPEN_S),
    "KeepLiveness": lambda api, held, _: api.peer.KeepLiveness(held.requests(), timeout=OPEN_S),
    "Converse": lambda api, held, _: api.peer.Converse(held.requests(), timeout=OPEN_S),
    "StreamCalls": lambda api, held, _: api.calls.StreamCalls(held.requests(), timeout=OPEN_S),
    "WatchTransfers": lambda api, *_: api.transfers.WatchTransfers(
        transfer_pb2.WatchTransfersRequest(), timeout=OPEN_S
    ),
    "WaitTransfer": lambda api, _, transfer_id: api.transfers.WaitTransfer.future(
        transfer_pb2.WaitTransferRequest(transfer_id=transfer_id, timeout=dur(OPEN_S))
    ),
    "PollSchedulerNews": lambda api, *_: api.scheduler.PollSchedulerNews.future(
        scheduler_pb2.PollSchedulerNewsRequest(wait=dur(OPEN_S))
    ),
    "health": lambda api, *_: api.health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=OPEN_S),
    "reflection": _reflection("v1"),
    "reflection of before": _reflection("v1alpha"),
}


def fill(api: Api, held: Held, count: int) -> None:
    """Opens streams that stay open."""
    for _ in range(count):
        stream = held.add(api.leases.KeepAlive(held.requests(lease_pb2.KeepAliveRequest()), timeout=OPEN_S))
        next(stream)


def refusal_of(call: Any) -> tuple[str, str]:
    """Waits for a call's refusal, and returns its code and reason. It must say when to come back and how to proceed."""
    wait_until(call.done)
    found = read_refusal("", call.exception() if call.exception() is not None else call)
    assert found.retry_delay_s
    assert "end first" in found.message or "come back" in found.message
    return found.code, found.reason


FULL = ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_has_so_many_open_calls_and_one_more_is_refused(engine: Engine, held: Held, kind: str) -> None:
    transfer_id = engine.hand_over(prompt(16)).transfer.transfer_id
    with caller(engine) as api:
        calls = [held.add(KINDS[kind](api, held, transfer_id)) for _ in range(EACH + 1)]
        wait_until(lambda: any(call.done() for call in calls))
        (over,) = [call for call in calls if call.done()]
        assert refusal_of(over) == FULL
        calls.remove(over)
        calls.pop().cancel()

        def taken() -> bool:  # retries until the ended call's place is free
            again = held.add(KINDS[kind](api, held, transfer_id))
            settled = held.add(KINDS[kind](api, held, transfer_id))  # one of the two is always refused in the end
            wait_until(lambda: again.done() or settled.done())
            return not (again.done() and settled.done())

        wait_until(taken)
        assert not any(call.done() for call in calls)
    engine.reset()


def test_a_full_server_has_places_for_the_life_of_each_connection(engine: Engine, held: Held) -> None:
    with ExitStack() as stack:
        flooding, honest = (stack.enter_context(caller(engine)) for _ in range(2))
        fill(flooding, held, EACH)
        fill(honest, held, OWN)
        assert refusal_of(held.add(honest.leases.KeepAlive(held.requests(), timeout=OPEN_S))) == FULL


def test_streams_that_stand_take_no_place_of_other_calls(engine: Engine, held: Held) -> None:
    lease_id = engine.hand_over(prompt(16)).lease.lease_id
    with caller(engine) as api:
        fill(api, held, EACH)
        renewed = api.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=[lease_pb2.LeaseRef(lease_id=lease_id)]))
        assert renewed.leases[0].reason == 0
    engine.reset()


def test_places_come_free_with_the_connection(engine: Engine, held: Held) -> None:
    with caller(engine) as api:
        fill(api, held, EACH)
    with caller(engine) as other:
        wait_until(lambda: _fits(other, EACH))


def _fits(api: Api, count: int) -> bool:
    with closing(Held()) as held:
        try:
            fill(api, held, count)
        except grpc.RpcError:
            return False
    return True


def test_one_life_over_one_connection_has_one_liveness_stream_the_last(engine: Engine, held: Held) -> None:
    consumer = Consumer(engine)
    consumer.handshake()
    beat = peer_pb2.KeepLivenessRequest(caller=consumer.caller)
    last = first = held.add(engine.api.peer.KeepLiveness(held.requests(beat), timeout=OPEN_S))
    next(first)
    for _ in range(3 * EACH):
        last = held.add(engine.api.peer.KeepLiveness(held.requests(beat), timeout=OPEN_S))
        next(last)
        assert list(first) == []
        first = last
    with caller(engine) as api:  # a stream on another connection does not replace it
        next(held.add(api.peer.KeepLiveness(held.requests(beat), timeout=OPEN_S)))
        assert not last.done()


@pytest.mark.parametrize(
    "path",
    [
        "kvgrpc.v1.TransferService/WaitTransfer",
        "kvgrpc.v1.TransferService/WatchTransfers",
        "kvgrpc.v1.SchedulerService/PollSchedulerNews",
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_a_request_that_is_kept_while_its_call_is_open_is_short(engine: Engine, held: Held, path: str) -> None:
    unknown_field = b"\xfa\x7f" + _varint(STANDING_BYTES_MAX)
    body = unknown_field + bytes(STANDING_BYTES_MAX)
    plain: Any = engine.api.plain
    if path.endswith("Info"):
        call = plain.stream_stream(f"/{path}")(iter([body]), timeout=OPEN_S)
    else:
        call = plain.unary_stream(f"/{path}")(body, timeout=OPEN_S)
    held.add(call)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    found = read_refusal(path, caught.value)
    assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD"), found
    assert str(STANDING_BYTES_MAX) in found.message


def _varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def test_watches_are_shared_by_connections(start: Start, held: Held) -> None:
    (engine,) = start(())
    with ExitStack() as stack:
        flooding, honest = (stack.enter_context(caller(engine)) for _ in range(2))
        request = transfer_pb2.WatchTransfersRequest()
        for _ in range(WATCHES_OF_CONNECTION_MAX):
            next(held.add(flooding.transfers.WatchTransfers(request, timeout=OPEN_S)))
        assert refusal_of(held.add(flooding.transfers.WatchTransfers(request, timeout=OPEN_S))) == FULL
        next(held.add(honest.transfers.WatchTransfers(request, timeout=OPEN_S)))


@pytest.fixture
def silent() -> Iterator[str]:
    """Yields an address that never answers. Calls that dial it wait."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def waiting(api: Api, held: Held, address: str) -> Any:
    """Starts a call that is in flight until the test ends."""
    return held.add(api.handshake.ConnectPeer.future(_to(address), timeout=OPEN_S))


def _to(address: str) -> handshake_pb2.ConnectPeerRequest:
    return handshake_pb2.ConnectPeerRequest(peer=common_pb2.PeerAddress(address=address))


CALLS = f"{SETTINGS}calls_per_connection = {EACH}\ncalls = {2 * EACH}\nstanding_per_connection = {EACH}\n"


def test_calls_under_way_are_bounded_and_leases_are_renewed_meanwhile(start: Start, held: Held, silent: str) -> None:
    (engine,) = start((), settings=f"{CALLS}connect_timeout_s = 60.0\n")
    sent = engine.hand_over(prompt(16))
    renewal = lease_pb2.RenewLeasesRequest(leases=[lease_pb2.LeaseRef(lease_id=sent.lease.lease_id)])
    with ExitStack() as stack:
        flooding, other = (stack.enter_context(caller(engine)) for _ in range(2))
        calls = [waiting(flooding, held, silent) for _ in range(EACH + 1)]
        wait_until(lambda: any(call.done() for call in calls))
        assert [refusal_of(call) for call in calls if call.done()] == [FULL]
        for _ in range(2 * EACH):
            assert other.leases.RenewLeases(renewal).leases[0].reason == 0
        assert next(other.leases.KeepAlive(iter([lease_pb2.KeepAliveRequest(leases=renewal.leases)]))).leases
        owned = [waiting(other, held, silent) for _ in range(OWN + 1)]
        wait_until(lambda: any(call.done() for call in owned))
        assert [refusal_of(call) for call in owned if call.done()] == [FULL]
        for call in held.calls:
            call.cancel()
        wait_until(lambda: _answers(flooding, renewal))


def _answers(api: Api, renewal: lease_pb2.RenewLeasesRequest) -> bool:
    try:
        return bool(api.leases.RenewLeases(renewal).leases)
    except grpc.RpcError:
        return False


def test_calls_whose_request_never_comes_are_held_back_where_they_are_made(start: Start, held: Held) -> None:
    (engine,) = start((), settings=CALLS)
    status = admin_pb2.GetStatusRequest()
    with ExitStack() as stack:
        flooding, honest = (stack.enter_context(caller(engine)) for _ in range(2))
        flooding.admin.GetStatus(status)
        never: Any = flooding.plain.stream_unary("/kvgrpc.v1.AdminService/GetStatus")
        for _ in range(2 * EACH):
            held.add(never.future(held.requests(), timeout=OPEN_S))
        more = held.add(flooding.admin.GetStatus.future(status, timeout=OPEN_S))
        for _ in range(10 * EACH):
            honest.admin.GetStatus(status)
        assert not more.done()
        held.calls[0].cancel()
        assert more.result().header.engine_id


def test_connections_are_bounded_and_one_that_ends_makes_room(start: Start) -> None:
    (engine,) = start((), settings=f"{SETTINGS}connections = {EACH}\n")
    with ExitStack() as stack:
        callers = [engine.api, *(stack.enter_context(caller(engine)) for _ in range(EACH - 1))]
        for api in callers:
            api.admin.GetStatus(admin_pb2.GetStatusRequest())
        with caller(engine) as over, pytest.raises(grpc.RpcError) as caught:
            over.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        callers.pop().close()
        with caller(engine) as late:
            wait_until(lambda: _serves(late))


def _serves(api: Api) -> bool:
    try:
        return bool(api.admin.GetStatus(admin_pb2.GetStatusRequest()).header.engine_id)
    except grpc.RpcError:
        return False


def test_connections_that_say_nothing_do_not_last(start: Start) -> None:
    (engine,) = start((), settings=f"{SETTINGS}connections = {EACH}\nconnect_timeout_s = 0.2\n")
    host, _, port = engine.address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(2 * EACH):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=OPEN_S))
        with caller(engine) as late:
            wait_until(lambda: _serves(late))


def test_handshakes_that_callers_cause_by_the_addresses_they_name_are_bounded(start: Start, held: Held) -> None:
    settings = f"{SETTINGS}dials_per_connection = {EACH}\nconnect_timeout_s = 60.0\n"
    engine, peer = start((), (), settings=settings)
    token = peer.hand_over(prompt(16)).grant
    with ExitStack() as stack:
        flooding, honest = (stack.enter_context(caller(engine)) for _ in range(2))
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(EACH)]
        for port in ports:
            port.settimeout(OPEN_S)
            waiting(flooding, held, f"127.0.0.1:{port.getsockname()[1]}")
            stack.enter_context(port.accept()[0])
        before = engine.transfers_state()
        pull = handoff_pb2.PullBlocksRequest(grant=token, content=content(prompt(16)))
        with refused(flooding, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
            flooding.handoff.PullBlocks(pull)
        assert refusal_of(waiting(flooding, held, peer.address)) == FULL
        assert engine.transfers_state() == before
        honest.handshake.ConnectPeer(_to(peer.address))
        flooding.handoff.PullBlocks(pull)  # succeeds, because the peer is connected now
        engine.reset()
