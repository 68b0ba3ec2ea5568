"""Engines, pools and endpoints survive a round trip, and invalid ones of peers are refused."""

from collections.abc import Callable

import pytest
from google.protobuf.message import Message
from hypothesis import given, strategies as st

from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.transfers import RankPath
from kvgrpc.core.values.bridge import bridges
from kvgrpc.core.values.compatibility import EngineDescription, side_of
from kvgrpc.core.values.endpoints import MemoryKind, RankEndpoint
from kvgrpc.core.values.layout import (
    Group,
    GroupKind,
    PoolKind,
    PoolLayout,
    Region,
    Section,
    Strides,
    TensorKind,
    uniform_layout,
)
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.obstacles import Difference
from kvgrpc.errors import InvalidRequest, KVGrpcError
from kvgrpc.v1 import common_pb2, handshake_pb2, pool_types_pb2
from kvgrpc.wire import description, endpoints
from kvgrpc.wire.endpoints import endpoint_from_proto, endpoint_to_proto
from kvgrpc.wire.limits import limits_from_proto, limits_to_proto
from tests.core.nodes import describe
from tests.wire.endpoints import ENDPOINTS, PRINTED, TEXT, U32
from tests.wire.messages import messages, outcome

Name = Callable[[int], str]

SMALL = st.integers(1, 8)


@st.composite
def layouts(draw: st.DrawFn) -> PoolLayout:
    group = Group(
        name=draw(TEXT),
        kind=draw(st.sampled_from(GroupKind)),
        layers=2 * draw(SMALL),
        block_tokens=draw(SMALL),
        blocks=draw(SMALL),
        kv_heads=draw(SMALL),
        head_dim=draw(SMALL),
        dtype=draw(st.sampled_from(["float16", "float8_e4m3fn"])),
        order=draw(st.sampled_from(["token_major", "head_major"])),
        window_tokens=draw(st.integers(0, 8192)),
    )
    return uniform_layout(group, draw(st.integers(1, 4096)), draw(st.sampled_from([1, 2])))


STATES = PoolLayout(
    (Group("s", GroupKind.STATE, 1, 16, 4, 1, 9, "float32", sections=(Section(24, 48), Section(12, 12))),),
    (Region(0, 0, 1, 0, 40, 36, TensorKind.STATE),),
    160,
)
COLUMNS = PoolLayout(
    (Group("c", GroupKind.FULL_ATTENTION, 1, 4, 4, 2, 8, "uint8"),),
    (Region(0, 0, 1, 0, 128, 128, strides=Strides(0, 32, 64, 8, 4)),),
    512,
)


@pytest.mark.parametrize("pool", [STATES, COLUMNS], ids=["sections", "columns"])
def test_what_is_known_of_the_inside_of_blocks_comes_back_as_it_went(pool: PoolLayout) -> None:
    message = sent(description.pool_to_proto(pool, PoolKind.ENGINE_MANAGED))
    assert isinstance(message, pool_types_pb2.PoolDescription)
    assert description.pool_from_proto(message, "pool") == pool


def test_more_sections_than_a_state_may_have_are_refused() -> None:
    message = description.pool_to_proto(STATES, PoolKind.ENGINE_MANAGED)
    message.groups[0].state_sections.extend([message.groups[0].state_sections[0]] * 64)
    with pytest.raises(KVGrpcError, match="state_sections"):
        description.pool_from_proto(message, "pool")


ENGINES = st.builds(
    EngineDescription,
    engine_id=st.text(PRINTED, min_size=1, max_size=63),
    incarnation=st.integers(1, 2**53 - 1),
    address=TEXT,
    protocol_min=U32,
    protocol_max=U32,
    weights_revision=TEXT,
    pool=layouts(),
    pool_kind=st.sampled_from(PoolKind),
    world_size=st.integers(1, 4096),
    memory_generation=U32,
    features=st.lists(st.sampled_from(list(description.FEATURES)), max_size=3).map(tuple),
    required_features=st.lists(st.sampled_from(list(description.FEATURES)), max_size=3).map(tuple),
)


def sent(message: Message) -> Message:
    """Returns the message as the other side gets it."""
    return type(message).FromString(message.SerializeToString())


@given(ENGINES)
def test_an_engine_comes_back_as_it_went(engine: EngineDescription) -> None:
    message = sent(description.engine_to_proto(engine))
    assert isinstance(message, handshake_pb2.EngineDescription)
    assert description.engine_from_proto(message, "engine") == engine


@given(layouts(), st.sampled_from(PoolKind))
def test_a_pool_says_its_fingerprint(layout: PoolLayout, kind: PoolKind) -> None:
    message = description.pool_to_proto(layout, kind)
    assert message.fingerprint == layout.fingerprint()
    assert description.pool_from_proto(message, "pool") == layout
    assert description.pool_kind_from_proto(message.kind, "kind") is kind


@given(ENDPOINTS)
def test_an_endpoint_comes_back_as_it_went(endpoint: RankEndpoint) -> None:
    message = sent(endpoint_to_proto(endpoint))
    assert isinstance(message, pool_types_pb2.RankEndpoint)
    assert endpoint_from_proto(message) == endpoint


@given(messages(handshake_pb2.EngineDescription))
def test_any_description_is_an_engine_or_a_typed_refusal(message: handshake_pb2.EngineDescription) -> None:
    engine = outcome(lambda: description.engine_from_proto(message, "engine"))
    if isinstance(engine, KVGrpcError):
        assert engine.violations
    else:
        assert description.engine_from_proto(description.engine_to_proto(engine), "engine") == engine


@given(messages(pool_types_pb2.RankEndpoint))
def test_any_endpoint_can_be_read_or_is_refused(message: pool_types_pb2.RankEndpoint) -> None:
    endpoint = outcome(lambda: endpoint_from_proto(message))
    if isinstance(endpoint, KVGrpcError):
        assert all(violation.field.startswith("endpoints.") for violation in endpoint.violations)
        return
    assert endpoint.rank == message.rank
    assert (endpoint.shm is not None) is message.HasField("shm")


@pytest.mark.parametrize("number", [0, 3, 77, -1])
def test_an_unknown_kind_of_pool_is_refused(number: int) -> None:
    with pytest.raises(InvalidRequest):
        description.pool_kind_from_proto(number, "kind")


@pytest.mark.parametrize("number", [0, 4, 77])
def test_an_unknown_kind_of_memory_reads_as_host_memory(number: int) -> None:
    """Reading it as host memory is safe: its address is never dereferenced here."""
    segment = pool_types_pb2.Segment(address=1, size_bytes=2, kind=number)  # type: ignore[arg-type]
    message = pool_types_pb2.RankEndpoint(cma=pool_types_pb2.CmaEndpoint(segments=[segment]))
    endpoint = endpoint_from_proto(message).cma
    assert endpoint is not None
    assert endpoint.segments[0].kind is MemoryKind.HOST


@pytest.mark.parametrize("number", [0, 6, 77, -1])
def test_what_a_region_holds_must_be_stated_and_known(number: int) -> None:
    layout = uniform_layout(Group("g", GroupKind.FULL_ATTENTION, 1, 1, 1, 1, 1, "int8"), 2)
    message = description.pool_to_proto(layout, PoolKind.SERVER_MANAGED)
    message.regions[0].tensor = number  # type: ignore[assignment]
    with pytest.raises(InvalidRequest) as refused:
        description.pool_from_proto(message, "pool")
    assert [violation.field for violation in refused.value.violations] == ["pool.regions[0].tensor"]


def test_an_order_that_is_not_stated_is_token_major() -> None:
    layout = uniform_layout(Group("g", GroupKind.FULL_ATTENTION, 1, 1, 1, 1, 1, "int8"), 2)
    message = description.pool_to_proto(layout, PoolKind.SERVER_MANAGED)
    message.groups[0].order = pool_types_pb2.BLOCK_ORDER_UNSPECIFIED
    assert description.pool_from_proto(message, "pool") == layout


@pytest.mark.parametrize(
    ("table", "values", "name"),
    [
        (description.POOL_KINDS, PoolKind, pool_types_pb2.PoolKind.Name),
        (description.GROUP_KINDS, GroupKind, pool_types_pb2.GroupKind.Name),
        (description.TENSOR_KINDS, TensorKind, pool_types_pb2.TensorKind.Name),
        (endpoints.MEMORY_KINDS, MemoryKind, pool_types_pb2.MemoryKind.Name),
        (description.PEER_STATES, PeerState, handshake_pb2.PeerState.Name),
    ],
)
def test_every_value_has_its_wire_value(table: dict[object, int], values: type[PoolKind], name: Name) -> None:
    assert list(table) == list(values)
    assert all(name(number).endswith(f"_{value.name}") for value, number in table.items())  # type: ignore[attr-defined]
    assert len(set(table.values())) == len(table)


def test_the_limits_on_the_wire_are_those_of_the_server() -> None:
    told = limits_to_proto(Limits(lease_ttl_s=1.5, leases=7))
    back = limits_from_proto(told)
    assert (back.lease_ttl_s, back.leases) == (1.5, 7)
    assert limits_to_proto(back) == told


def test_a_peer_says_how_it_is_reached_and_what_was_rejected() -> None:
    made = describe("e", 5)
    peer = Peer(made, (), bridges(side_of(made), side_of(made)), 3.0, "h:1", PeerState.SUSPECT)
    nixl, shm = RankPath(1, 1, "nixl", "the best that works", (("shm", "another host"),)), RankPath(0, 0, "shm", "")
    peer.paths = {(1, 1): nixl, (0, 0): shm}
    message = description.peer_to_proto(peer, 4.5, 2)
    assert (message.engine_id, message.incarnation, message.address) == ("e", 5, "h:1")
    assert (message.state, message.open_access_count) == (handshake_pb2.PEER_STATE_SUSPECT, 2)
    assert message.silence.ToMilliseconds() == 1500
    assert [path.rank for path in message.paths] == [0, 1], "they are in the order of the ranks"
    row = message.paths[1]
    assert [(other.data_path, other.available, other.why) for other in row.rejected_paths] == [
        (common_pb2.DATA_PATH_SHM, False, "another host")
    ]


def test_a_difference_says_both_sides() -> None:
    message = description.difference_to_proto(Difference("world_size", "1", "2", False, "because"))
    assert (message.field, message.here, message.there, message.why) == ("world_size", "1", "2", "because")
    assert not message.bridgeable
