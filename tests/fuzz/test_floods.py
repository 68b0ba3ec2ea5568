"""Floods: many repetitions of a harmless act. After each flood a new peer is served, and nothing of it is left."""

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvgrpc.core.values.limits import Limits
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_types_pb2, transfer_pb2
from tests.fuzz import inside
from tests.fuzz.inside import State
from tests.fuzz.target import DIALS, LIMITS
from tests.service.api import Api
from tests.service.conftest import starting
from tests.service.consumer import Consumer
from tests.service.engines import SUCCEEDED, Engine, wait_until
from tests.service.footprint import footprint, resident_bytes
from tests.service.values import content, dur, for_readers, new_key, prompt

LEFT_BYTES_MAX = 64 << 20
"""Maximum growth of a server's memory after a flood, in bytes: its allocator's, which held 64 messages of 2 MB at once,
and the records of ended leases. Each flood sends several times as much.
"""
SERVED_S = 5.0
"""Far above what a pull by a new peer takes, and far below what it takes behind a flood, in seconds."""
BACK_S = 15.0
"""Time in which everything that a flood began must end, in seconds."""
TOKENS = prompt(32)
AT_ONCE = 64


class Flooded:
    """An engine, and a check that it serves a peer that it has never heard of."""

    def __init__(self, engine: Engine, state: State, new_peer: Callable[[], Engine]) -> None:
        self.engine, self.api, self._state, self._new_peer = engine, engine.api, state, new_peer
        self._check_served()  # the first peer's lasting state exists before the measurement
        self._before = footprint(engine.process.pid)

    @contextmanager
    def flood(self) -> Iterator[None]:
        """Runs the flood inside the context. Then checks that a new peer is served and nothing is left."""
        resident = self._resident()
        yield
        wait_until(self._answers, BACK_S)
        self._check_served()
        self.engine.reset()
        self.engine.process.check_log()
        pid = self.engine.process.pid
        wait_until(lambda: footprint(pid).same(self._before), BACK_S, lambda: (self._before, footprint(pid)))

        def left() -> int:
            return self._resident() - resident

        wait_until(lambda: left() < LEFT_BYTES_MAX, BACK_S, lambda: f"{left() / 2**20:.1f} MiB more than before")

    def _answers(self) -> bool:
        """Checks that gRPC has taken in earlier input. While very many calls wait for that, it cancels new ones."""
        try:
            self.api.admin.GetStatus(admin_pb2.GetStatusRequest())
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
            return False
        return True

    def _resident(self) -> int:
        self._state.trim()
        return resident_bytes(self.engine.process.pid)

    def _check_served(self) -> None:
        """Checks a pull from the engine by an unknown peer, and one in the other direction."""
        peer = self._new_peer()
        for source, destination in ((self.engine, peer), (peer, self.engine)):
            handed = source.hand_over(TOKENS)
            target = destination.allocate(2)
            began = time.monotonic()
            pulled = destination.pull(handed.grant, TOKENS, target)
            end = destination.wait(pulled.transfer_id)
            assert end.state == SUCCEEDED, end
            assert time.monotonic() - began < SERVED_S
        peer.api.close()
        peer.process.end()


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flooded]:
    where = ("--listen", "127.0.0.8:0")
    with starting(tmp_path_factory.mktemp("floods")) as start:
        settings = f'dial_allow = ["127.0.0.8"]\n{LIMITS}'
        (engine,) = start(where, settings=settings, **inside.ENVIRONMENT)
        with closing(State(engine.process.pid)) as state:
            yield Flooded(engine, state, lambda: start(where, settings=settings)[0])


def calls(call: Callable[[int], Any], count: int) -> list[str]:
    """Makes calls, AT_ONCE at a time, and returns their status codes."""
    codes: list[str] = []
    for first in range(0, count, AT_ONCE):
        for one in [call(i) for i in range(first, min(first + AT_ONCE, count))]:
            codes.append(one.code().name)
    return codes


@pytest.fixture
def after(flooded: Flooded) -> Iterator[Flooded]:
    """Checks after the test that nothing of its flood is left."""
    with flooded.flood():
        yield flooded


def test_honest_calls(after: Flooded) -> None:
    api = after.api
    codes = calls(lambda _: api.admin.GetStatus.future(admin_pb2.GetStatusRequest()), 3_000)
    assert set(codes) == {"OK"}
    leases = lease_pb2.GrantLeaseRequest(
        blocks=after.engine.blocks(after.engine.allocate(3)), content=content(prompt(40))
    )
    assert set(calls(lambda _: api.leases.GrantLease.future(leases), 1_000)) == {"OK"}


def test_more_honest_calls_at_once_than_a_connection_has_streams(after: Flooded) -> None:
    """A caller's library holds back the calls that have no stream yet, and none of them fails."""
    count = 4 * Limits().streams_per_connection
    pending = [after.api.admin.GetStatus.future(admin_pb2.GetStatusRequest()) for _ in range(count)]
    assert {one.code().name for one in pending} == {"OK"}


def test_calls_that_are_refused(after: Flooded) -> None:
    long = for_readers(transfer_key=new_key(), content=content(range(1_000_000)), blocks=after.engine.blocks([1 << 20]))
    short = handoff_pb2.RegisterPushRequest(grant=common_pb2.Grant(token=b"x" * 100))
    named = transfer_pb2.GetTransferRequest(transfer_id="t" * 2_000_000)
    refused = calls(lambda _: after.api.handoff.FinishedBlocks.future(long), 20)
    refused += calls(lambda _: after.api.handoff.RegisterPush.future(short), 2_000)
    refused += calls(lambda _: after.api.transfers.GetTransfer.future(named), 100)
    assert "OK" not in refused


def greeting(engine: Engine, **endpoint: Any) -> handshake_pb2.HandshakeRequest:
    """Returns a handshake of an unknown engine."""
    return handshake_pb2.HandshakeRequest(
        engine=Consumer(engine).engine, endpoints=[pool_types_pb2.RankEndpoint(rank=0, **endpoint)], proof=bytes(32)
    )


def test_handshakes_of_ever_new_engines(after: Flooded) -> None:
    described = greeting(after.engine)

    def shake(number: int) -> Any:
        described.engine.engine_id, described.engine.incarnation = f"flood-{number}", secrets.randbits(52) + 1
        return after.api.handshake.Handshake.future(described)

    calls(shake, 2_000)


def test_lives_of_one_engine(after: Flooded) -> None:
    described = greeting(after.engine)

    def shake(_: int) -> Any:
        described.engine.incarnation = secrets.randbits(52) + 1
        return after.api.handshake.Handshake.future(described)

    calls(shake, 2_000)


@contextmanager
def silent_socket() -> Iterator[str]:
    """Yields the name of a socket for descriptors at which nobody answers."""
    name = f"kvgrpc-flood-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen(1000)
        yield "@" + name


def test_handshakes_that_name_a_socket_that_never_answers(flooded: Flooded) -> None:
    with silent_socket() as path:
        described = greeting(flooded.engine)
        real = flooded.api.handshake.Handshake(described).endpoints[0]
        real.shm.socket_path = path
        described.endpoints[0].CopyFrom(real)

        def shake(number: int) -> Any:
            described.engine.engine_id, described.engine.incarnation = f"silent-{number}", secrets.randbits(52) + 1
            return flooded.api.handshake.Handshake.future(described)

        with flooded.flood():
            calls(shake, 200)


def test_dials_to_addresses_that_never_answer(after: Flooded) -> None:
    with ExitStack() as stack:
        addresses = []
        for _ in range(100):
            listener = stack.enter_context(socket.create_server(("127.0.0.8", 0)))
            addresses.append(f"127.0.0.8:{listener.getsockname()[1]}")

        def dial(number: int) -> Any:
            where = common_pb2.PeerAddress(address=addresses[number % len(addresses)])
            return after.api.handshake.ConnectPeer.future(handshake_pb2.ConnectPeerRequest(peer=where))

        assert set(calls(dial, 400)) == {"UNAVAILABLE"}


def test_dials_to_ever_new_addresses(after: Flooded) -> None:
    with ExitStack() as stack:
        begun = []
        for _ in range(DIALS + AT_ONCE):
            listener = stack.enter_context(socket.create_server(("127.0.0.8", 0)))
            where = common_pb2.PeerAddress(address=f"127.0.0.8:{listener.getsockname()[1]}")
            begun.append(handshake_pb2.ConnectPeerRequest(peer=where))
        calls = [after.api.handshake.ConnectPeer.future(request) for request in begun]
        codes = {call.code().name for call in calls}
    assert codes == {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}


def test_watchers_that_do_not_read(after: Flooded) -> None:
    api, engine = after.api, after.engine
    watches = [api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest()) for _ in range(300)]
    blocks = engine.allocate(3)
    for _ in range(100):
        sent = engine.hand_over(prompt(40), blocks)
        engine.release(sent.lease.lease_id)
    for watch in watches:
        watch.cancel()


def test_callers_that_leave(after: Flooded) -> None:
    api, engine = after.api, after.engine
    sent = engine.hand_over(prompt(40))
    consumer = Consumer(engine)
    consumer.handshake()
    waits = transfer_pb2.WaitTransferRequest(transfer_id=sent.transfer.transfer_id, timeout=dur(60))
    call = peer_pb2.PeerCall(call_id=1, open_access=peer_pb2.OpenAccessRequest())
    opens = peer_pb2.ConverseRequest(caller=consumer.caller, calls=[call])
    for _ in range(40):
        begun: list[Any] = [api.transfers.WaitTransfer.future(waits) for _ in range(AT_ONCE)]
        begun += [api.peer.Converse(iter([opens])) for _ in range(AT_ONCE)]
        begun += [api.peer.KeepLiveness(iter([peer_pb2.KeepLivenessRequest(caller=consumer.caller)])) for _ in range(4)]
        for call in begun:
            call.cancel()


def test_connections_that_say_nothing(after: Flooded) -> None:
    host, _, port = after.engine.address.rpartition(":")
    for _ in range(5):
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))


def test_the_socket_for_descriptors(flooded: Flooded) -> None:
    engine = flooded.engine
    consumer = Consumer(engine)
    address = "\0" + consumer.handshake().endpoints[0].shm.socket_path[1:]
    with ExitStack() as stack, flooded.flood():  # the silent connections are still open at the check
        for number in range(500):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.setblocking(False)
            try:
                client.connect(address)
                if number % 2:
                    client.send(secrets.token_bytes((1, 16, 32, 60_000)[number // 2 % 4]))
            except OSError:  # the socket is full, or the lead has closed it
                continue


def test_streams_that_stand(after: Flooded) -> None:
    each = Limits().streams_per_connection
    with ExitStack() as stack:
        callers = [stack.enter_context(closing(Api(after.engine.address))) for _ in range(2)]
        request = health_pb2.HealthCheckRequest()
        streams = [[api.health.Watch(request) for _ in range(each)] for api in callers]
        for of_one in streams:
            for stream in of_one:
                assert next(stream).status == health_pb2.HealthCheckResponse.SERVING
        # The library holds back all further streams of a connection.
        for api, of_one in zip(callers, streams, strict=True):
            of_one.extend([api.health.Watch(request) for _ in range(8)])
        assert not any(stream.done() for of_one in streams for stream in of_one)
