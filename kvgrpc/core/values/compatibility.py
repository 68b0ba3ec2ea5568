"""Whether two engines can exchange blocks: one verdict, with a reason for every field that differs.

A pure function of two descriptions. Nothing else in the core compares descriptions.
"""

from dataclasses import dataclass

from kvgrpc.core.values.layout import Group, GroupKind, PoolKind, PoolLayout
from kvgrpc.errors import FieldViolation, KVGrpcError, PreconditionFailed, Reason

READS_PUSHES = "reads_pushes"
"""Feature of an engine that moves by itself what is pushed to it: it cannot set blocks aside, or compares checksums."""
CHECKSUMS = "checksums"
"""Feature of an engine that answers ChecksumBlocks; an engine that compares checksums requires it of its peers."""


@dataclass(frozen=True)
class EngineDescription:
    """What an engine is, as far as a peer must know."""

    engine_id: str
    incarnation: int
    address: str
    protocol_min: int
    protocol_max: int
    weights_revision: str
    pool: PoolLayout
    pool_kind: PoolKind
    world_size: int
    memory_generation: int = 0
    features: tuple[str, ...] = ()
    required_features: tuple[str, ...] = ()
    """Those that a peer must have too."""


@dataclass(frozen=True)
class Difference:
    """One field in which two engines differ."""

    field: str
    here: str
    there: str
    bridgeable: bool
    why: str


GROUP_FIELDS: dict[str, str] = {
    "kind": "layers of another kind use their blocks in another way",
    "layers": "the models have different numbers of layers",
    "block_tokens": "blocks hold different numbers of tokens",
    "kv_heads": "ranks hold different heads",
    "head_dim": "heads have different sizes",
    "dtype": "elements have different types and are not converted",
    "order": "elements inside a block stand in another order and are not permuted",
    "window_tokens": "the sliding windows differ",
}
"""Fields of a group that must be equal, and why."""


REASONS: dict[str, Reason] = {
    "protocol_max": Reason.PROTOCOL_UNSUPPORTED,
    "required_features": Reason.PROTOCOL_UNSUPPORTED,
    "weights_revision": Reason.WEIGHTS_MISMATCH,
}
"""Reasons of fields that pools do not have."""


def protocol(here: EngineDescription, there: EngineDescription) -> int | None:
    """The newest wire protocol that both speak, or None."""
    version = min(here.protocol_max, there.protocol_max)
    return version if version >= max(here.protocol_min, there.protocol_min) else None


def weights_unknown(here: EngineDescription, there: EngineDescription) -> bool:
    """Whether neither engine states its weights. They count as the same: their operator vouches."""
    return not here.weights_revision and not there.weights_revision


def compare(here: EngineDescription, there: EngineDescription) -> list[Difference]:
    """All that differs and matters; compatible when every difference is bridgeable."""
    found = []
    if protocol(here, there) is None:
        found.append(
            Difference(
                "protocol_max",
                f"{here.protocol_min}..{here.protocol_max}",
                f"{there.protocol_min}..{there.protocol_max}",
                False,
                "the protocol ranges do not meet: upgrade the older engine",
            )
        )
    for a, b in ((here, there), (there, here)):
        lacking = sorted(set(a.required_features) - set(b.features))
        if lacking:
            found.append(
                Difference(
                    "required_features",
                    " ".join(sorted(here.features)),
                    " ".join(sorted(there.features)),
                    False,
                    f"engine {a.engine_id} requires {' '.join(lacking)}: upgrade engine {b.engine_id}",
                )
            )
    if weights_unknown(here, there):
        why = "neither engine states its weights: they cannot be compared"
        found.append(Difference("weights_revision", "", "", True, why))
    elif here.weights_revision != there.weights_revision:
        found.append(
            Difference(
                "weights_revision",
                here.weights_revision,
                there.weights_revision,
                False,
                "KV of other weights is never exchanged",
            )
        )
    if here.world_size != there.world_size:
        found.append(
            Difference(
                "world_size",
                str(here.world_size),
                str(there.world_size),
                False,
                "the engines split their heads over different numbers of ranks",
            )
        )
    return found + _compare_pools(here.pool, there.pool)


def check_compatible(here: EngineDescription, there: EngineDescription) -> None:
    """Raises PreconditionFailed (PROTOCOL_UNSUPPORTED, WEIGHTS_MISMATCH, INCOMPATIBLE_POOLS) with every reason."""
    blocking = [d for d in compare(here, there) if not d.bridgeable]
    if not blocking:
        return
    raise incompatible(REASONS.get(blocking[0].field, Reason.INCOMPATIBLE_POOLS), there, blocking)


def incompatible(reason: Reason, there: EngineDescription, blocking: list[Difference]) -> KVGrpcError:
    """The error that names each blocking difference."""
    return PreconditionFailed(
        reason,
        f"cannot exchange blocks with engine {there.engine_id}",
        violations=tuple(FieldViolation(d.field, f"{d.here} here, {d.there} there: {d.why}") for d in blocking),
    )


def _compare_pools(here: PoolLayout, there: PoolLayout) -> list[Difference]:
    if len(here.groups) != len(there.groups):
        return [
            Difference(
                "pool.groups",
                str(len(here.groups)),
                str(len(there.groups)),
                False,
                "the models group their layers differently",
            )
        ]
    found = []
    for i, (a, b) in enumerate(zip(here.groups, there.groups, strict=True)):
        found += _compare_groups(i, a, b)
    shape_here, shape_there = _shapes(here), _shapes(there)
    if all(d.bridgeable for d in found) and shape_here != shape_there:
        found.append(
            Difference(
                "pool.regions",
                _told(shape_here),
                _told(shape_there),
                False,
                "layers, keys and values are packed into regions in another way",
            )
        )
    return found


def _compare_groups(index: int, here: Group, there: Group) -> list[Difference]:
    found = []
    for field, why in GROUP_FIELDS.items():
        a, b = getattr(here, field), getattr(there, field)
        if a != b:
            text_a, text_b = (x.value if isinstance(x, GroupKind) else str(x) for x in (a, b))
            found.append(Difference(f"pool.groups[{index}].{field}", text_a, text_b, False, why))
    if here.blocks != there.blocks:
        found.append(
            Difference(
                f"pool.groups[{index}].blocks",
                str(here.blocks),
                str(there.blocks),
                True,
                "pools may have different sizes",
            )
        )
    return found


_Shape = tuple[int, int, int, str, int]


def _shapes(pool: PoolLayout) -> list[_Shape]:
    """What of each region must be equal: group, layers, tensor, bytes of a block."""
    return [(r.group, r.first_layer, r.layers, r.tensor.value, r.block_bytes) for r in pool.regions]


def _told(shapes: list[_Shape]) -> str:
    tensors = ", ".join(sorted({s[3] for s in shapes}))
    return f"{len(shapes)} regions of {sorted({s[4] for s in shapes})} bytes a block ({tensors})"
