"""HandshakeService: who is there, and whether two engines can exchange blocks, field by field."""

import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvgrpc import __version__
from kvgrpc.core.ids import peer_key
from kvgrpc.core.limits import Limits
from kvgrpc.v1 import common_pb2, handshake_pb2, pool_types_pb2
from tests.service.api import refused
from tests.service.conftest import SETTINGS, SHARED
from tests.service.consumer import Consumer
from tests.service.engines import BLOCK_BYTES, RETURNED, Engine, ServeProcess, memory_unchanged, unchanged
from tests.service.pushes import finish, reason_of, register, reserve
from tests.service.values import new_key, prompt, seconds

Description = handshake_pb2.EngineDescription
Change = Callable[[Description], None]
WEIGHTS = ("weights_revision", True)
"""No engine of these tests states its weights."""


def capabilities(engine: Engine) -> handshake_pb2.GetCapabilitiesResponse:
    return engine.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest())


def connect(engine: Engine, address: str, engine_id: str = "") -> handshake_pb2.Peer:
    peer = common_pb2.PeerAddress(address=address, engine_id=engine_id)
    return engine.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=peer)).peer


def test_capabilities_say_what_the_engine_is_and_offers(source: Engine) -> None:
    found = capabilities(source)
    assert (found.engine.engine_id, found.engine.address) == (source.engine_id, source.address)
    assert found.engine.incarnation == found.header.incarnation
    assert found.version == __version__
    assert [(path.name, path.available) for path in found.data_paths] == [("shm", True)]
    (group,) = found.engine.pool.groups
    assert (group.layers, group.kv_heads, group.head_dim, group.blocks) == (2, 2, 8, 520)
    assert sum(region.block_bytes for region in found.engine.pool.regions) == BLOCK_BYTES


def test_capabilities_state_every_limit(source: Engine) -> None:
    limits, defaults = capabilities(source).limits, Limits()
    assert seconds(limits.lease_ttl) == 300.0
    assert seconds(limits.settle_timeout) == defaults.settle_timeout_s
    assert seconds(limits.lease_cap) == defaults.lease_cap_s
    assert seconds(limits.transfer_timeout) == defaults.transfer_timeout_s
    assert limits.blocks_per_request == defaults.blocks_per_request
    assert limits.message_bytes == defaults.message_bytes
    assert all(value for _, value in limits.ListFields())
    assert len(limits.ListFields()) == len(limits.DESCRIPTOR.fields)


def group_of(engine: Description) -> pool_types_pb2.Group:
    return engine.pool.groups[0]


def other_order(engine: Description) -> None:
    group_of(engine).order = "head_major"


def other_dtype(engine: Description) -> None:
    group_of(engine).dtype = "bfloat16"


def more_heads(engine: Description) -> None:
    group_of(engine).kv_heads = 4


def longer_heads(engine: Description) -> None:
    group_of(engine).head_dim = 16


def larger_blocks(engine: Description) -> None:
    group_of(engine).block_tokens = 32


def windowed(engine: Description) -> None:
    group_of(engine).window_tokens = 4096


def latent(engine: Description) -> None:
    group_of(engine).kind = pool_types_pb2.GROUP_KIND_MLA
    for region in engine.pool.regions:
        region.tensor = pool_types_pb2.TENSOR_KIND_LATENT


def fewer_layers(engine: Description) -> None:
    group_of(engine).layers = 1
    del engine.pool.regions[1:]


def packed_layers(engine: Description) -> None:
    region = engine.pool.regions[0]
    del engine.pool.regions[1:]
    region.layers, region.block_bytes, region.stride_bytes = 2, BLOCK_BYTES, BLOCK_BYTES


def keys_and_values_apart(engine: Description) -> None:
    for region in list(engine.pool.regions):
        region.block_bytes = region.stride_bytes = region.block_bytes // 2
        values = engine.pool.regions.add()
        values.CopyFrom(region)
        values.offset += region.block_bytes * group_of(engine).blocks
        region.tensor, values.tensor = pool_types_pb2.TENSOR_KIND_KEY, pool_types_pb2.TENSOR_KIND_VALUE


def two_groups(engine: Description) -> None:
    engine.pool.groups.add().CopyFrom(group_of(engine))
    engine.pool.groups[1].name = "other"
    for region in list(engine.pool.regions):
        engine.pool.regions.add().CopyFrom(region)
        engine.pool.regions[-1].group = 1
        engine.pool.regions[-1].offset += engine.pool.total_bytes
    engine.pool.total_bytes *= 2


def more_ranks(engine: Description) -> None:
    engine.world_size = 2


def other_weights(engine: Description) -> None:
    engine.weights_revision = "another"


def newer_protocol(engine: Description) -> None:
    engine.protocol_min = engine.protocol_max = 99


def newer_feature(engine: Description) -> None:
    engine.features.append("not built yet")
    engine.required_features.append("not built yet")


BLOCKING = [
    (other_order, "pool.groups[0].order", "INCOMPATIBLE_POOLS"),
    (other_dtype, "pool.groups[0].dtype", "INCOMPATIBLE_POOLS"),
    (more_heads, "pool.groups[0].kv_heads", "INCOMPATIBLE_POOLS"),
    (longer_heads, "pool.groups[0].head_dim", "INCOMPATIBLE_POOLS"),
    (larger_blocks, "pool.groups[0].block_tokens", "INCOMPATIBLE_POOLS"),
    (windowed, "pool.groups[0].window_tokens", "INCOMPATIBLE_POOLS"),
    (latent, "pool.groups[0].kind", "INCOMPATIBLE_POOLS"),
    (fewer_layers, "pool.groups[0].layers", "INCOMPATIBLE_POOLS"),
    (packed_layers, "pool.regions", "INCOMPATIBLE_POOLS"),
    (keys_and_values_apart, "pool.regions", "INCOMPATIBLE_POOLS"),
    (two_groups, "pool.groups", "INCOMPATIBLE_POOLS"),
    (more_ranks, "world_size", "INCOMPATIBLE_POOLS"),
    (other_weights, "weights_revision", "WEIGHTS_MISMATCH"),
    (newer_protocol, "protocol_max", "PROTOCOL_UNSUPPORTED"),
    (newer_feature, "required_features", "PROTOCOL_UNSUPPORTED"),
]


def check(engine: Engine, description: Description) -> handshake_pb2.CheckCompatibilityResponse:
    request = handshake_pb2.CheckCompatibilityRequest(engine=description)
    return engine.api.handshake.CheckCompatibility(request)


def test_two_engines_of_one_kind_are_compatible(source: Engine, destination: Engine) -> None:
    with unchanged(source):
        reply = check(source, capabilities(destination).engine)
    assert reply.compatible
    assert [(d.field, d.bridgeable) for d in reply.differences] == [WEIGHTS]


def test_pools_of_different_sizes_are_compatible_and_the_difference_is_told(source: Engine) -> None:
    other = Consumer(source).engine
    group_of(other).blocks = 128
    reply = check(source, other)
    assert reply.compatible
    assert [(d.field, d.here, d.there, d.bridgeable) for d in reply.differences if d.field != WEIGHTS[0]] == [
        ("pool.groups[0].blocks", "520", "128", True)
    ]


def test_weights_that_nobody_states_are_told_at_the_handshake_and_logged_once(source: Engine) -> None:
    consumer = Consumer(source)
    for _ in range(2):
        assert [(d.field, d.bridgeable) for d in consumer.handshake().differences] == [WEIGHTS]
    key = peer_key(consumer.engine.engine_id, consumer.engine.incarnation)
    logged = [line for line in source.process.log.splitlines() if key in line]
    assert len(logged) == 1
    assert "weights" in logged[0]


@pytest.mark.parametrize(("change", "field", "reason"), BLOCKING, ids=[row[0].__name__ for row in BLOCKING])
def test_what_cannot_be_bridged_is_named_by_its_field_and_refused_at_the_handshake(
    source: Engine, change: Change, field: str, reason: str
) -> None:
    consumer = Consumer(source)
    change(consumer.engine)
    reply = check(source, consumer.engine)
    assert not reply.compatible
    (difference,) = (d for d in reply.differences if d.field == field)
    assert not difference.bridgeable
    assert difference.why
    assert difference.here != difference.there
    with unchanged(source), refused(source.api, "FAILED_PRECONDITION", reason):
        consumer.handshake()
    assert field in source.api.refusal(consumer.handshake).fields


def unnamed(engine: Description) -> None:
    engine.engine_id = ""


def long_named(engine: Description) -> None:
    engine.engine_id = "e" * 256


def unborn(engine: Description) -> None:
    engine.incarnation = 0


def no_ranks(engine: Description) -> None:
    engine.world_size = 0


def far_too_many_ranks(engine: Description) -> None:
    engine.world_size = 4_294_967_295


def no_pool(engine: Description) -> None:
    engine.ClearField("pool")


def unknown_kind(engine: Description) -> None:
    engine.pool.kind = 77  # type: ignore[assignment]


def unknown_group_kind(engine: Description) -> None:
    group_of(engine).kind = 77  # type: ignore[assignment]


def no_blocks(engine: Description) -> None:
    group_of(engine).blocks = 0


def past_the_memory(engine: Description) -> None:
    engine.pool.total_bytes -= 1


def overlapping(engine: Description) -> None:
    engine.pool.regions[1].offset -= 1


def beyond_64_bits(engine: Description) -> None:
    engine.pool.regions[0].offset = 2**64 - 1


def endless_layers(engine: Description) -> None:
    group_of(engine).layers = engine.pool.regions[0].layers = 4_294_967_295


def missing_region(engine: Description) -> None:
    del engine.pool.regions[0]


def unknown_group(engine: Description) -> None:
    engine.pool.regions[0].group = 9


MALFORMED = [
    unnamed, long_named, unborn, no_ranks, far_too_many_ranks, no_pool, unknown_kind, unknown_group_kind, no_blocks,
    past_the_memory, overlapping, beyond_64_bits, endless_layers, missing_region, unknown_group,
]  # fmt: skip


@pytest.mark.parametrize("change", MALFORMED, ids=lambda change: change.__name__)
def test_a_description_that_cannot_be_is_refused(source: Engine, change: Change) -> None:
    consumer = Consumer(source)
    change(consumer.engine)
    with unchanged(source):
        with refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
            check(source, consumer.engine)
        with refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
            consumer.handshake()


@pytest.mark.parametrize("ranks", [[], [1], [0, 0], [0, 1], [4_294_967_295]], ids=str)
def test_a_handshake_takes_one_endpoint_for_each_rank(source: Engine, ranks: list[int]) -> None:
    endpoints = [pool_types_pb2.RankEndpoint(rank=rank) for rank in ranks]
    request = handshake_pb2.HandshakeRequest(engine=Consumer(source).engine, endpoints=endpoints)
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.api.handshake.Handshake(request)


def test_a_handshake_for_another_engine_is_refused(source: Engine) -> None:
    request = handshake_pb2.HandshakeRequest(
        engine=Consumer(source).engine,
        endpoints=[pool_types_pb2.RankEndpoint()],
        expected_engine_id="somebody-else",
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
    assert path.data_path == "shm"
    assert "same host" in path.why


def test_a_peer_is_refused_where_another_engine_answers(source: Engine, destination: Engine) -> None:
    with unchanged(source, destination), refused(destination.api, "FAILED_PRECONDITION", "WRONG_ENGINE"):
        connect(destination, source.address, "somebody-else")


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def dead_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_peer_that_nobody_is_is_unreachable(destination: Engine, dead_port: int) -> None:
    with unchanged(destination), refused(destination.api, "UNAVAILABLE", "PEER_UNREACHABLE"):
        connect(destination, f"127.0.0.1:{dead_port}")


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1:50051", "169.254.169.254:80", "example.org:443", "[2001:db8::1]:1", "0.0.0.0:1", "127.0.0.1.x:1"],
)
def test_an_address_off_the_dial_list_is_never_dialled(destination: Engine, address: str) -> None:
    with unchanged(destination), refused(destination.api, "PERMISSION_DENIED", "DIAL_REFUSED"):
        connect(destination, address)


@pytest.mark.parametrize("address", ["", "nonsense", "unix:/tmp/x", "dns:///127.0.0.1:1", "127.0.0.1", ":1", "[::1"])
def test_what_is_no_host_and_port_is_never_dialled(destination: Engine, address: str) -> None:
    with unchanged(destination):
        refusal = destination.api.refusal(lambda: connect(destination, address))
    assert (refusal.code, refusal.reason) in {
        ("INVALID_ARGUMENT", "INVALID_FIELD"),
        ("PERMISSION_DENIED", "DIAL_REFUSED"),
    }


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Engines that the shared ones cannot exchange blocks with."""
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


def test_a_peer_that_never_answers_is_unreachable_in_time(others: dict[str, Engine], silent_port: int) -> None:
    hasty = others["weights"]
    with unchanged(hasty), refused(hasty.api, "UNAVAILABLE", "PEER_UNREACHABLE"):
        connect(hasty, f"127.0.0.1:{silent_port}")


@pytest.mark.parametrize(
    ("other", "code", "reason"),
    [
        ("dtype", "FAILED_PRECONDITION", "INCOMPATIBLE_POOLS"),
        ("weights", "FAILED_PRECONDITION", "WEIGHTS_MISMATCH"),
        ("path", "FAILED_PRECONDITION", "NO_DATA_PATH"),
        ("empty", "UNAVAILABLE", "NO_POOL"),
    ],
)
def test_engines_that_cannot_exchange_blocks_do_not_connect(
    destination: Engine, others: dict[str, Engine], other: str, code: str, reason: str
) -> None:
    with unchanged(destination), refused(destination.api, code, reason):
        connect(destination, others[other].address)


@pytest.mark.parametrize(
    ("other", "reason", "next_step"),
    [
        ("dtype", common_pb2.FAILURE_REASON_INCOMPATIBLE_POOLS, common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER),
        ("weights", common_pb2.FAILURE_REASON_WEIGHTS_MISMATCH, common_pb2.NEXT_STEP_RECOMPUTE),
        ("path", common_pb2.FAILURE_REASON_NO_DATA_PATH, common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER),
    ],
)
def test_a_pull_from_such_an_engine_fails_with_the_reason_and_returns_its_blocks(
    destination: Engine, others: dict[str, Engine], other: str, reason: int, next_step: int
) -> None:
    tokens = [secrets.randbits(30) for _ in range(16)]
    grant = others[other].hand_over(tokens).grant
    blocks = destination.allocate(1)
    with memory_unchanged(destination):
        pulled = destination.pull(grant, tokens, blocks)
        end = destination.wait(pulled.transfer_id)
    assert (end.failure.reason, end.failure.phase, end.failure.next) == (reason, "handshake", next_step)
    others[other].reset()


def test_a_push_from_an_engine_that_no_data_path_reaches_fails_at_once(
    destination: Engine, others: dict[str, Engine]
) -> None:
    source, tokens, key = others["path"], prompt(16), new_key()
    blocks, target = source.allocate(1), destination.allocate(1)
    with memory_unchanged(destination):
        reserved = reserve(destination, key, tokens, target)
        register(source, reserved.grant)
        finish(source, key, tokens, blocks)
        end = destination.wait(reserved.transfer.transfer_id)
    assert (reason_of(end), end.failure.phase, end.memory) == ("SOURCE_FAILED", "rendezvous", RETURNED)
    assert "no data path" in end.failure.message
    source.reset()


def test_without_a_pool_calls_that_need_one_say_so(others: dict[str, Engine]) -> None:
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
