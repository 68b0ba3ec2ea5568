"""HandshakeService: identity of an engine, and whether two engines can exchange blocks, field by field."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc import __version__
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.limits import Limits
from kvgrpc.v1 import common_pb2, handshake_pb2, pool_types_pb2
from tests.service.api import refused
from tests.service.consumer import Consumer
from tests.service.descriptions import capabilities, check
from tests.service.engines import BLOCK_BYTES, Engine, unchanged
from tests.service.values import seconds

Description = handshake_pb2.EngineDescription
Change = Callable[[Description], None]
WEIGHTS = ("weights_revision", True)
"""Difference that every comparison reports, because no engine of these tests states its weights."""


def test_capabilities_say_what_the_engine_is_and_offers(source: Engine) -> None:
    found = capabilities(source)
    assert (found.engine.engine_id, found.engine.address) == (source.engine_id, source.address)
    assert found.engine.incarnation == found.header.incarnation
    assert found.version == __version__
    assert [(path.data_path, path.available) for path in found.data_paths] == [(common_pb2.DATA_PATH_SHM, True)]
    (group,) = found.engine.pool.groups
    assert (group.layer_count, group.kv_head_count, group.head_dim, group.block_count) == (2, 2, 8, 520)
    assert sum(region.block_bytes for region in found.engine.pool.regions) == BLOCK_BYTES


def test_capabilities_state_every_limit(source: Engine) -> None:
    limits, defaults = capabilities(source).limits, Limits()
    assert seconds(limits.lease_ttl) == 300.0
    assert seconds(limits.settle_timeout) == defaults.settle_timeout_s
    assert seconds(limits.lease_cap) == defaults.lease_cap_s
    assert seconds(limits.transfer_timeout) == defaults.transfer_timeout_s
    assert limits.request_block_count == defaults.blocks_per_request
    assert limits.message_bytes == defaults.message_bytes
    assert all(value for _, value in limits.ListFields())
    assert len(limits.ListFields()) == len(limits.DESCRIPTOR.fields)


def group_of(engine: Description) -> pool_types_pb2.Group:
    return engine.pool.groups[0]


def other_order(engine: Description) -> None:
    group_of(engine).order = pool_types_pb2.BLOCK_ORDER_HEAD_MAJOR


def other_dtype(engine: Description) -> None:
    group_of(engine).dtype = "bfloat16"


def more_heads(engine: Description) -> None:
    group_of(engine).kv_head_count = 4


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
    group_of(engine).layer_count = 1
    del engine.pool.regions[1:]


def packed_layers(engine: Description) -> None:
    region = engine.pool.regions[0]
    del engine.pool.regions[1:]
    region.layer_count, region.block_bytes, region.stride_bytes = 2, BLOCK_BYTES, BLOCK_BYTES


def keys_and_values_apart(engine: Description) -> None:
    for region in list(engine.pool.regions):
        region.block_bytes = region.stride_bytes = region.block_bytes // 2
        values = engine.pool.regions.add()
        values.CopyFrom(region)
        values.offset += region.block_bytes * group_of(engine).block_count
        region.tensor, values.tensor = pool_types_pb2.TENSOR_KIND_K, pool_types_pb2.TENSOR_KIND_V


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


def ranks_with_half_the_heads(engine: Description) -> None:
    engine.world_size = 2
    group_of(engine).kv_head_count = 1
    for region in engine.pool.regions:
        region.block_bytes = region.stride_bytes = region.block_bytes // 2


def blocks_of_twice_as_many_tokens(engine: Description) -> None:
    group_of(engine).block_tokens = 32
    group_of(engine).block_count //= 2
    for region in engine.pool.regions:
        region.block_bytes = region.stride_bytes = region.block_bytes * 2


def other_weights(engine: Description) -> None:
    engine.weights_revision = "another"


def newer_protocol(engine: Description) -> None:
    engine.protocol_min = engine.protocol_max = 99


NEWER: Any = 77
"""A feature that does not exist yet."""


def newer_feature(engine: Description) -> None:
    engine.features.append(NEWER)
    engine.required_features.append(NEWER)


BLOCKING = [
    (other_dtype, "pool.groups[0].dtype", "INCOMPATIBLE_POOLS"),
    (more_heads, "pool.groups[0].kv_head_count", "INCOMPATIBLE_POOLS"),
    (longer_heads, "pool.groups[0].head_dim", "INCOMPATIBLE_POOLS"),
    (larger_blocks, "pool.groups[0].block_tokens", "INCOMPATIBLE_POOLS"),
    (windowed, "pool.groups[0].window_tokens", "INCOMPATIBLE_POOLS"),
    (latent, "pool.groups[0].kind", "INCOMPATIBLE_POOLS"),
    (fewer_layers, "pool.groups[0].layer_count", "INCOMPATIBLE_POOLS"),
    (two_groups, "pool.groups", "INCOMPATIBLE_POOLS"),
    (more_ranks, "pool.groups[0].total_kv_head_count", "INCOMPATIBLE_POOLS"),
    (other_weights, "weights_revision", "WEIGHTS_MISMATCH"),
    (newer_protocol, "protocol_max", "PROTOCOL_UNSUPPORTED"),
    (newer_feature, "required_features", "PROTOCOL_UNSUPPORTED"),
]


BRIDGED: list[tuple[Change, list[str]]] = [
    (other_order, ["pool.groups[0].order", "pool.regions"]),
    (packed_layers, ["pool.regions"]),
    (keys_and_values_apart, ["pool.regions"]),
    (ranks_with_half_the_heads, ["pool.groups[0].kv_head_count", "world_size", "pool.regions"]),
    (blocks_of_twice_as_many_tokens, ["pool.groups[0].block_tokens", "pool.groups[0].block_count", "pool.regions"]),
]


def test_two_engines_of_one_kind_are_compatible(source: Engine, destination: Engine) -> None:
    with unchanged(source):
        reply = check(source, capabilities(destination).engine)
    assert reply.compatible
    assert [(d.field, d.bridgeable) for d in reply.differences] == [WEIGHTS]


def test_pools_of_different_sizes_are_compatible_and_the_difference_is_told(source: Engine) -> None:
    other = Consumer(source).engine
    group_of(other).block_count = 128
    reply = check(source, other)
    assert reply.compatible
    assert [(d.field, d.here, d.there, d.bridgeable) for d in reply.differences if d.field != WEIGHTS[0]] == [
        ("pool.groups[0].block_count", "520", "128", True)
    ]


def test_weights_that_are_not_stated_are_reported_at_the_handshake_and_logged_once(source: Engine) -> None:
    consumer = Consumer(source)
    for _ in range(2):
        assert [(d.field, d.bridgeable) for d in consumer.handshake().differences] == [WEIGHTS]
    key = peer_key(consumer.engine.engine_id, consumer.engine.incarnation)
    logged = [line for line in source.process.log.splitlines() if key in line]
    assert len(logged) == 1
    assert "weights" in logged[0]


@pytest.mark.parametrize(("change", "field", "reason"), BLOCKING, ids=[row[0].__name__ for row in BLOCKING])
def test_an_incompatible_field_is_named_at_once(source: Engine, change: Change, field: str, reason: str) -> None:
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


@pytest.mark.parametrize(("change", "fields"), BRIDGED, ids=[change.__name__ for change, _ in BRIDGED])
def test_pools_that_are_laid_out_in_other_ways_are_compatible_and_what_that_costs_is_told(
    source: Engine, change: Change, fields: list[str]
) -> None:
    other = Consumer(source).engine
    change(other)
    reply = check(source, other)
    assert reply.compatible
    assert [(d.field, d.bridgeable) for d in reply.differences] == [WEIGHTS, *((field, True) for field in fields)]
    (cost,) = (d for d in reply.differences if d.field == "pool.regions")
    assert "into here " in cost.why
    assert "into there " in cost.why


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
    group_of(engine).block_count = 0


def past_the_memory(engine: Description) -> None:
    engine.pool.total_bytes -= 1


def overlapping(engine: Description) -> None:
    engine.pool.regions[1].offset -= 1


def beyond_64_bits(engine: Description) -> None:
    engine.pool.regions[0].offset = 2**64 - 1


def endless_layers(engine: Description) -> None:
    group_of(engine).layer_count = engine.pool.regions[0].layer_count = 4_294_967_295


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
    request = handshake_pb2.HandshakeRequest(engine=Consumer(source).engine, endpoints=endpoints, proof=bytes(32))
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.api.handshake.Handshake(request)
