"""Conversion of engines, pools and peers."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvgrpc.core.state.engine_status import EngineStatus
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.transfers import RankPath
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.layout import Group, GroupKind, PoolKind, PoolLayout, Region, Section, Strides, TensorKind
from kvgrpc.core.values.limits import MESSAGE_BYTES
from kvgrpc.core.values.obstacles import Difference
from kvgrpc.errors import InvalidRequest, Reason, invalid
from kvgrpc.v1 import handshake_pb2, pool_types_pb2
from kvgrpc.wire.bounds import GROUPS_MAX, NAMES_MAX, REGIONS_MAX, TEXT_BYTES_MAX, check_count, text
from kvgrpc.wire.enums import numbers
from kvgrpc.wire.paths import in_schema
from kvgrpc.wire.values import data_path, duration, reason

POOL_KINDS = numbers(pool_types_pb2.PoolKind, PoolKind)
GROUP_KINDS = numbers(pool_types_pb2.GroupKind, GroupKind)
TENSOR_KINDS = numbers(pool_types_pb2.TensorKind, TensorKind)
ORDERS = numbers(pool_types_pb2.BlockOrder, ("token_major", "head_major"))
FEATURES = numbers(
    handshake_pb2.Feature, ("push", "layerwise", "reads_pushes", "remote_ranks", "checksums", "key_columns")
)
PEER_STATES = numbers(handshake_pb2.PeerState, PeerState)
ENGINE_ID_BYTES_MAX = 255
PATHS_SHOWN_MAX = 256
"""Maximum number of paths that a reply lists: more than any engine has ranks, and rows of a list stay short."""
_STRIDES = "layer_bytes", "values_bytes", "head_bytes", "token_bytes", "key_element_bytes"
"""Fields of `Strides`, by their names in the message."""
_CORE_POOL_KINDS = {int(v): k for k, v in POOL_KINDS.items()}
_CORE_GROUP_KINDS = {int(v): k for k, v in GROUP_KINDS.items()}
_CORE_TENSOR_KINDS = {int(v): k for k, v in TENSOR_KINDS.items()}
_CORE_ORDERS = {int(v): k for k, v in ORDERS.items()} | {0: "token_major"}
_CORE_FEATURES = {int(v): k for k, v in FEATURES.items()}


def pool_to_proto(layout: PoolLayout, kind: PoolKind) -> pool_types_pb2.PoolDescription:
    return pool_types_pb2.PoolDescription(
        kind=POOL_KINDS[kind],
        groups=[
            pool_types_pb2.Group(
                name=g.name,
                kind=GROUP_KINDS[g.kind],
                layer_count=g.layers,
                block_tokens=g.block_tokens,
                block_count=g.blocks,
                kv_head_count=g.kv_heads,
                head_dim=g.head_dim,
                dtype=g.dtype,
                order=ORDERS[g.order],
                window_tokens=g.window_tokens,
                total_kv_head_count=g.total_kv_heads,
                space=g.space,
                state_sections=[
                    pool_types_pb2.StateSection(size_bytes=section.nbytes, total_bytes=section.total_bytes)
                    for section in g.sections
                ],
            )
            for g in layout.groups
        ],
        regions=[
            pool_types_pb2.Region(
                group=r.group,
                first_layer=r.first_layer,
                layer_count=r.layers,
                offset=r.offset,
                stride_bytes=r.stride_bytes,
                block_bytes=r.block_bytes,
                tensor=TENSOR_KINDS[r.tensor],
                strides=None if r.strides is None else pool_types_pb2.BlockStrides(**_named(r.strides)),
                stage=r.stage,
            )
            for r in layout.regions
        ],
        total_bytes=layout.total_bytes,
        fingerprint=layout.fingerprint(),
    )


def _named(strides: Strides) -> dict[str, int]:
    return dict(zip(_STRIDES, strides, strict=True))


def pool_from_proto(value: pool_types_pb2.PoolDescription, field: str) -> PoolLayout:
    """Returns a layout. Raises InvalidRequest with the fields that make it unusable, OutOfRange for too many rows."""
    check_count(f"{field}.groups", len(value.groups), GROUPS_MAX)
    check_count(f"{field}.regions", len(value.regions), REGIONS_MAX)
    groups = []
    for i, g in enumerate(value.groups):
        kind = _CORE_GROUP_KINDS.get(g.kind)
        if kind is None:
            raise invalid(f"{field}.groups[{i}].kind", "is required, and must be one that this server knows")
        check_count(f"{field}.groups[{i}].state_sections", len(g.state_sections), NAMES_MAX)
        groups.append(
            Group(
                _printable(f"{field}.groups[{i}].name", g.name),
                kind,
                g.layer_count,
                g.block_tokens,
                g.block_count,
                g.kv_head_count,
                g.head_dim,
                _printable(f"{field}.groups[{i}].dtype", g.dtype),
                _order(f"{field}.groups[{i}].order", g.order),
                g.window_tokens,
                g.total_kv_head_count,
                _printable(f"{field}.groups[{i}].space", g.space),
                tuple(Section(section.size_bytes, section.total_bytes) for section in g.state_sections),
            )
        )
    regions = []
    for i, r in enumerate(value.regions):
        tensor = _CORE_TENSOR_KINDS.get(r.tensor)
        if tensor is None:
            raise invalid(f"{field}.regions[{i}].tensor", "is required, and must be one that this server knows")
        strides = Strides(*(getattr(r.strides, name) for name in _STRIDES)) if r.HasField("strides") else None
        regions.append(
            Region(
                r.group, r.first_layer, r.layer_count, r.offset, r.stride_bytes, r.block_bytes, tensor, strides, r.stage
            )
        )
    with _layout_at(field):
        return PoolLayout(tuple(groups), tuple(regions), value.total_bytes)


@contextmanager
def _layout_at(field: str) -> Iterator[None]:
    """Translates the fields of a refused layout to the schema's names, after the path of its description."""
    try:
        yield
    except InvalidRequest as error:
        error.violations = in_schema(error.violations, field)
        raise


def pool_kind_from_proto(value: int, field: str) -> PoolKind:
    """Returns the kind of a pool. Raises InvalidRequest for a kind that is unset or unknown."""
    kind = _CORE_POOL_KINDS.get(value)
    if kind is None:
        raise invalid(field, "is required: SERVER_MANAGED or ENGINE_MANAGED")
    return kind


def engine_to_proto(engine: EngineDescription) -> handshake_pb2.EngineDescription:
    return handshake_pb2.EngineDescription(
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        address=engine.address,
        protocol_min=engine.protocol_min,
        protocol_max=engine.protocol_max,
        weights_revision=engine.weights_revision,
        pool=pool_to_proto(engine.pool, engine.pool_kind),
        world_size=engine.world_size,
        memory_generation=engine.memory_generation,
        features=[FEATURES[name] for name in engine.features],
        required_features=[FEATURES[name] for name in engine.required_features],
        message_bytes=engine.message_bytes,
    )


def engine_from_proto(value: handshake_pb2.EngineDescription, field: str) -> EngineDescription:
    """Returns a peer's description of itself. Raises InvalidRequest, or OutOfRange for too many rows."""
    if not value.engine_id:
        raise invalid(f"{field}.engine_id", "is required")
    check_count(f"{field}.features", len(value.features) + len(value.required_features), NAMES_MAX)
    if not value.incarnation:
        raise invalid(f"{field}.incarnation", "is required")
    if not 0 < value.world_size <= 4096:
        raise invalid(f"{field}.world_size", "lies between 1 and 4096")
    address = _printable(f"{field}.address", value.address)
    engine_id = _printable(f"{field}.engine_id", value.engine_id, ENGINE_ID_BYTES_MAX)
    weights = _printable(f"{field}.weights_revision", value.weights_revision)
    pool = pool_from_proto(value.pool, f"{field}.pool")
    kind = pool_kind_from_proto(value.pool.kind, f"{field}.pool.kind")
    with _layout_at(f"{field}.pool"):
        return EngineDescription(
            engine_id=engine_id,
            incarnation=value.incarnation,
            address=address,
            protocol_min=value.protocol_min,
            protocol_max=value.protocol_max,
            weights_revision=weights,
            pool=pool,
            pool_kind=kind,
            world_size=value.world_size,
            memory_generation=value.memory_generation,
            features=tuple(_feature(number) for number in value.features),
            required_features=tuple(_feature(number) for number in value.required_features),
            message_bytes=value.message_bytes or MESSAGE_BYTES,
        )


def difference_to_proto(value: Difference) -> handshake_pb2.FieldDifference:
    return handshake_pb2.FieldDifference(
        field=value.field, here=value.here, there=value.there, bridgeable=value.bridgeable, why=value.why
    )


def path_to_proto(value: RankPath) -> handshake_pb2.RankPath:
    return handshake_pb2.RankPath(
        rank=value.rank,
        peer_rank=value.peer_rank,
        data_path=data_path(value.data_path),
        why=value.why,
        rejected_paths=rejected_to_proto(value),
    )


def rejected_to_proto(value: RankPath) -> list[handshake_pb2.DataPathStatus]:
    """Returns the messages of the paths that two ranks could not use."""
    return [
        handshake_pb2.DataPathStatus(
            data_path=data_path(name),
            why=why,
            reason=reason(Reason.NETWORK_NOT_PRIVATE if name in value.ruled_out else None),
        )
        for name, why in value.rejected
    ]


def peer_to_proto(value: Peer, now: float, open_accesses: int) -> handshake_pb2.Peer:
    """Returns the message of a peer as it is now. Its paths are in the order of the ranks."""
    return handshake_pb2.Peer(
        engine_id=value.description.engine_id,
        incarnation=value.description.incarnation,
        address=value.address,
        state=PEER_STATES[value.state],
        paths=[path_to_proto(value.paths[pair]) for pair in sorted(value.paths)[:PATHS_SHOWN_MAX]],
        silence=duration(now - value.heard),
        open_access_count=open_accesses,
    )


def status_to_proto(
    value: EngineStatus, admission: "handshake_pb2.Admission.ValueType", why: str, *, attached: bool
) -> handshake_pb2.EngineStatus:
    return handshake_pb2.EngineStatus(
        admission=admission,
        admission_reason=why,
        engine_attached=attached,
        groups=[
            handshake_pb2.GroupLoad(group=index, block_count=g.blocks, free_block_count=g.free, soft_block_count=g.soft)
            for index, g in enumerate(value.groups)
        ],
        transfer_count=value.transfers,
        waiting_turn_count=value.waiting_turns,
        queued_bytes=value.queued_bytes,
        lease_count=value.leases,
    )


def _order(field: str, value: int) -> str:
    order = _CORE_ORDERS.get(value)
    if order is None:
        raise invalid(field, "must be one that this server knows")
    return order


def _feature(value: int) -> str:
    """Returns the core's name of a feature, or its number if unknown: a peer may require an unknown feature."""
    return _CORE_FEATURES.get(value, str(value))


def _printable(field: str, value: str, most: int = TEXT_BYTES_MAX) -> str:
    """Returns a name that is safe for logs. Raises InvalidRequest as `text` does, and for control characters."""
    if not text(field, value, most).isprintable():
        raise invalid(field, "has printable characters only")
    return value
