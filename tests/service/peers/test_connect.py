"""Engines that connect to each other, also where no engine answers or another one does."""

import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.service.peers.port import CALL_TIMEOUT_S
from kvgrpc.v1 import common_pb2, handshake_pb2, pool_types_pb2
from tests.service.api import refused
from tests.service.conftest import SETTINGS, SHARED
from tests.service.consumer import Consumer
from tests.service.descriptions import capabilities, check
from tests.service.engines import RETURNED, Engine, ServeProcess, memory_unchanged, unchanged
from tests.service.pushes import finish, reason_of, register, reserve
from tests.service.rogue import Rogue
from tests.service.values import new_key, prompt

Engines = dict[str, Engine]


def connect(engine: Engine, address: str, engine_id: str = "") -> handshake_pb2.Peer:
    peer = common_pb2.PeerAddress(address=address, engine_id=engine_id)
    return engine.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=peer)).peer


def test_a_handshake_for_another_engine_is_refused(source: Engine) -> None:
    request = handshake_pb2.HandshakeRequest(
        engine=Consumer(source).engine,
        endpoints=[pool_types_pb2.RankEndpoint()],
        expected_engine_id="somebody-else",
        proof=bytes(32),
    )
    with unchanged(source), refused(source.api, "FAILED_PRECONDITION", "WRONG_ENGINE"):
        source.api.handshake.Handshake(request)


def test_a_handshake_tells_how_to_reach_every_rank_once_for_each_peer(source: Engine) -> None:
    replies = [Consumer(source).handshake() for _ in range(2)]
    for reply in replies:
        (endpoint,) = reply.endpoints
        assert reply.engine.engine_id == source.engine_id
        assert (endpoint.rank, endpoint.HasField("shm"), endpoint.HasField("nixl")) == (0, True, False)
    assert replies[0].endpoints[0].shm.token != replies[1].endpoints[0].shm.token


def test_connecting_a_peer_tells_the_data_path_and_why(source: Engine, destination: Engine) -> None:
    with unchanged(source, destination):
        peer = connect(destination, source.address, source.engine_id)
        again = connect(destination, source.address)
    assert (peer.engine_id, peer.incarnation) == (source.engine_id, source.incarnation())
    assert peer.state == handshake_pb2.PEER_STATE_CONNECTED
    assert (again.engine_id, again.incarnation) == (peer.engine_id, peer.incarnation)
    (path,) = peer.paths
    assert path.data_path == common_pb2.DATA_PATH_SHM
    assert "same host" in path.why


def test_a_peer_is_refused_where_another_engine_answers(source: Engine, destination: Engine) -> None:
    with unchanged(source, destination), refused(destination.api, "FAILED_PRECONDITION", "WRONG_ENGINE"):
        connect(destination, source.address, "somebody-else")


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yields a port that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def dead_port() -> int:
    """Returns a port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_an_address_without_a_peer_is_unreachable(destination: Engine, dead_port: int) -> None:
    with unchanged(destination), refused(destination.api, "UNAVAILABLE", "PEER_UNREACHABLE"):
        connect(destination, f"127.0.0.1:{dead_port}")


@pytest.mark.parametrize("address", ["169.254.169.254:80", "example.org:443", "[2001:db8::1]:1"])
def test_an_address_off_the_dial_list_is_never_dialled(destination: Engine, address: str) -> None:
    with unchanged(destination), refused(destination.api, "PERMISSION_DENIED", "DIAL_REFUSED"):
        connect(destination, address)


@pytest.mark.parametrize("address", ["", "unix:/tmp/x"])
def test_what_is_no_host_and_port_is_never_dialled(destination: Engine, address: str) -> None:
    with unchanged(destination):
        refusal = destination.api.refusal(lambda: connect(destination, address))
    assert (refusal.code, refusal.reason) in {
        ("INVALID_ARGUMENT", "INVALID_FIELD"),
        ("PERMISSION_DENIED", "DIAL_REFUSED"),
    }


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Yields engines that the shared ones cannot exchange blocks with."""
    folder: Path = tmp_path_factory.mktemp("others")
    flags = {
        "dtype": ("--dtype", "bfloat16"),
        "weights": ("--weights-revision", "v2"),
        "path": ("--data-paths", "cma"),
        "empty": ("--no-pool",),
    }
    settings = SETTINGS + "connect_timeout_s = 0.5\n"
    processes = {name: ServeProcess(folder / name, *SHARED, *row, settings=settings) for name, row in flags.items()}
    engines = {name: Engine(process) for name, process in processes.items()}
    yield engines
    for engine in engines.values():
        engine.close()


def test_a_peer_whose_ranks_need_longer_than_a_call_may_take_is_connected(destination: Engine) -> None:
    """Ranks make endpoints while they start or compute. A handshake waits for them up to its own limit."""
    rogue = Rogue(destination)  # type: ignore[abstract]  # it serves what this needs

    def wait(_: object) -> None:
        threading.Event().wait(CALL_TIMEOUT_S + 0.5)

    rogue.changes["Handshake"] = wait
    try:
        assert connect(destination, rogue.engine.address).state == handshake_pb2.PEER_STATE_CONNECTED
    finally:
        rogue.close()


def test_a_peer_that_never_answers_is_unreachable_in_time(others: Engines, silent_port: int) -> None:
    hasty = others["weights"]
    with unchanged(hasty), refused(hasty.api, "UNAVAILABLE", "PEER_UNREACHABLE"):
        connect(hasty, f"127.0.0.1:{silent_port}")


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("dtype", "FAILED_PRECONDITION", "INCOMPATIBLE_POOLS"),
        ("weights", "FAILED_PRECONDITION", "WEIGHTS_MISMATCH"),
        ("path", "FAILED_PRECONDITION", "NO_DATA_PATH"),
        ("empty", "UNAVAILABLE", "NO_POOL"),
    ],
)
def test_unlike_engines_do_not_connect(destination: Engine, others: Engines, name: str, code: str, reason: str) -> None:
    with unchanged(destination), refused(destination.api, code, reason):
        connect(destination, others[name].address)


@pytest.mark.parametrize(
    ("name", "reason", "step"),
    [
        ("dtype", common_pb2.FAILURE_REASON_INCOMPATIBLE_POOLS, common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER),
        ("weights", common_pb2.FAILURE_REASON_WEIGHTS_MISMATCH, common_pb2.NEXT_STEP_RECOMPUTE),
        ("path", common_pb2.FAILURE_REASON_NO_DATA_PATH, common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER),
    ],
)
def test_pulls_of_unlike_engines_fail(destination: Engine, others: Engines, name: str, reason: int, step: int) -> None:
    tokens = [secrets.randbits(30) for _ in range(16)]
    grant = others[name].hand_over(tokens).grant
    blocks = destination.allocate(1)
    with memory_unchanged(destination):
        pulled = destination.pull(grant, tokens, blocks)
        end = destination.wait(pulled.transfer_id)
    assert (end.failure.reason, end.failure.phase, end.failure.next) == (
        reason,
        common_pb2.TRANSFER_PHASE_HANDSHAKE,
        step,
    )
    others[name].reset()


def test_a_push_without_a_data_path_fails_at_once(destination: Engine, others: Engines) -> None:
    source, tokens, key = others["path"], prompt(16), new_key()
    blocks, target = source.allocate(1), destination.allocate(1)
    with memory_unchanged(destination):
        reserved = reserve(destination, key, tokens, target)
        register(source, reserved.grant)
        finish(source, key, tokens, blocks)
        end = destination.wait(reserved.transfer.transfer_id)
    assert (reason_of(end), end.failure.phase, end.memory) == (
        "SOURCE_FAILED",
        common_pb2.TRANSFER_PHASE_RENDEZVOUS,
        RETURNED,
    )
    assert "no data path" in end.failure.message
    source.reset()


def test_without_a_pool_calls_that_need_one_say_so(others: Engines) -> None:
    empty = others["empty"]
    with refused(empty.api, "UNAVAILABLE", "NO_POOL"):
        empty.counts()
    with refused(empty.api, "UNAVAILABLE", "NO_POOL"):
        empty.allocate()
    with refused(empty.api, "UNAVAILABLE", "NO_POOL"):
        empty.hand_over([1], [0])
    with refused(empty.api, "UNAVAILABLE", "NO_POOL"):
        check(empty, Consumer(others["dtype"]).engine)
    assert not capabilities(empty).engine.HasField("pool")


def test_a_pull_of_an_engine_from_itself_gets_its_own_blocks(source: Engine) -> None:
    tokens = [secrets.randbits(30) for _ in range(32)]
    blocks, target = source.allocate(2), source.allocate(2)
    written = source.write(blocks, seed=11)
    pulled = source.pull(source.hand_over(tokens, blocks).grant, tokens, target)
    source.wait(pulled.transfer_id)
    assert source.read(target) == written
