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


def other_dtype(engine: Description) -> None:
    group_of(engine).dtype = "bfloat16"


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
    (other_weights, "weights_revision", "WEIGHTS_MISMATCH"),
    (newer_protocol, "protocol_max", "PROTOCOL_UNSUPPORTED"),
    (newer_feature, "required_features", "PROTOCOL_UNSUPPORTED"),
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


def test_pools_that_are_laid_out_in_other_ways_are_compatible_and_what_that_costs_is_told(source: Engine) -> None:
    other = Consumer(source).engine
    other.pool.groups[0].order = pool_types_pb2.BLOCK_ORDER_HEAD_MAJOR
    reply = check(source, other)
    assert reply.compatible
    fields = [WEIGHTS, ("pool.groups[0].order", True), ("pool.regions", True)]
    assert [(d.field, d.bridgeable) for d in reply.differences] == fields
    assert "into here " in reply.differences[-1].why
    assert "into there " in reply.differences[-1].why


def unnamed(engine: Description) -> None:
    engine.engine_id = ""


def unborn(engine: Description) -> None:
    engine.incarnation = 0


def no_ranks(engine: Description) -> None:
    engine.world_size = 0


def no_pool(engine: Description) -> None:
    engine.ClearField("pool")


def unknown_kind(engine: Description) -> None:
    engine.pool.kind = 77  # type: ignore[assignment]


def beyond_64_bits(engine: Description) -> None:
    engine.pool.regions[0].offset = 2**64 - 1


def endless_layers(engine: Description) -> None:
    group_of(engine).layer_count = engine.pool.regions[0].layer_count = 4_294_967_295


MALFORMED = [unnamed, unborn, no_ranks, no_pool, unknown_kind, beyond_64_bits, endless_layers]


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
