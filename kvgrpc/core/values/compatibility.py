"""Decides if two engines can exchange blocks, with a reason for every field that differs.

The decision is a pure function of two descriptions. Nothing else in the core compares descriptions.

Digests find engines that may exchange KV among many, before any two of them are compared. Equal digests are necessary:
two engines of which one differs are never compatible. They are not sufficient, because what a bridge can do depends on
both sides: `compare` decides.
"""

import hashlib

from kvgrpc.core.values.bridge import BridgeSide
from kvgrpc.core.values.head_shares import check_heads, total_heads
from kvgrpc.core.values.layout import GroupKind, PoolKind, PoolLayout
from kvgrpc.core.values.limits import MESSAGE_BYTES
from kvgrpc.core.values.obstacles import EQUAL_FIELDS, Difference, differences, holds_tensors
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import FieldViolation, KVGrpcError, PreconditionFailed, Reason

READS_PUSHES = "reads_pushes"
"""Feature of an engine that itself moves what is pushed to it: it cannot set blocks aside, or compares checksums."""
CHECKSUMS = "checksums"
"""Feature of an engine that answers ChecksumBlocks; an engine that compares checksums requires it of its peers."""

KEY_COLUMNS = "key_columns"
"""Feature of an engine that reads strides of keys in columns. An engine with such keys requires it of its peers."""
DIGEST_HEX = 32
"""Number of hex digits of a digest."""


@dataclass(frozen=True)
class EngineDescription:
    """The description of an engine that its peers need. Raises InvalidRequest (INVALID_FIELD) if its ranks cannot have
    the heads of its pool.
    """

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
    """Features that a peer must have."""
    message_bytes: int = MESSAGE_BYTES
    """Maximum size of one message that the engine's lead takes, in bytes."""

    def __post_init__(self) -> None:
        check_heads(self.pool, self.world_size)

    @property
    def stage_ranks(self) -> int:
        """Ranks of each pipeline stage."""
        return self.world_size // self.pool.stages


REASONS: dict[str, Reason] = {
    "protocol_max": Reason.PROTOCOL_UNSUPPORTED,
    "required_features": Reason.PROTOCOL_UNSUPPORTED,
    "weights_revision": Reason.WEIGHTS_MISMATCH,
}
"""Reasons for fields that are not part of a pool; all others are INCOMPATIBLE_POOLS."""


def protocol(here: EngineDescription, there: EngineDescription) -> int | None:
    """Returns the newest wire protocol that both engines speak, or None."""
    version = min(here.protocol_max, there.protocol_max)
    return version if version >= max(here.protocol_min, there.protocol_min) else None


def weights_unknown(here: EngineDescription, there: EngineDescription) -> bool:
    """Returns True if neither engine states its weights. Unstated weights count as equal: the operator vouches."""
    return not here.weights_revision and not there.weights_revision


def compare(here: EngineDescription, there: EngineDescription) -> list[Difference]:
    """Returns all differences that matter. The engines are compatible if every difference is bridgeable."""
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
    found += differences(side_of(here), side_of(there))
    if CHECKSUMS in (*here.required_features, *there.required_features) and not _plain(here, there):
        found.append(
            Difference(
                "required_features",
                " ".join(sorted(here.required_features)),
                " ".join(sorted(there.required_features)),
                False,
                "blocks are compared by checksums, which takes ranks and layouts that are the same on both sides, and "
                "one pipeline stage",
            )
        )
    return found


def side_of(engine: EngineDescription) -> BridgeSide:
    """Returns an engine's input to a bridge."""
    return BridgeSide(engine.pool, engine.world_size)


def _plain(here: EngineDescription, there: EngineDescription) -> bool:
    """Returns True if each rank moves whole blocks of all layers of the peer's rank with its own number."""
    alike = here.world_size == there.world_size and here.pool.fingerprint() == there.pool.fingerprint()
    return alike and here.pool.stages == 1


def check_compatible(here: EngineDescription, there: EngineDescription) -> None:
    """Raises PreconditionFailed (PROTOCOL_UNSUPPORTED, WEIGHTS_MISMATCH, INCOMPATIBLE_POOLS) if the engines are
    incompatible. The error has every reason.
    """
    blocking = [d for d in compare(here, there) if not d.bridgeable]
    if not blocking:
        return
    raise incompatible(REASONS.get(blocking[0].field, Reason.INCOMPATIBLE_POOLS), here, there, blocking)


def incompatible(
    reason: Reason, here: EngineDescription, there: EngineDescription, blocking: list[Difference]
) -> KVGrpcError:
    """Makes the error that names each blocking difference, and both engines, since it may be read at either."""
    one, other = here.engine_id, there.engine_id
    return PreconditionFailed(
        reason,
        f"engines {one} and {other} cannot exchange blocks",
        violations=tuple(
            FieldViolation(d.field, f"{d.here} at {one}, {d.there} at {other}: {d.why}") for d in blocking
        ),
    )


def model_digest(name: str, weights_revision: str) -> str:
    """Returns the digest of a model's name and of its weights."""
    return _digest("kvgrpc model v1", name, weights_revision)


def layout_digest(engine: EngineDescription) -> str:
    """Returns the digest of what the pools of two engines must have in common to exchange blocks, also by a bridge."""
    rows = [str(holds_tensors(engine.pool))]
    for group in engine.pool.groups:
        state = group.kind is GroupKind.STATE
        # Two states may be compared by their sections, whatever the sizes and numbers of heads.
        values = [getattr(group, name) for name in EQUAL_FIELDS if not (state and name == "head_dim")]
        heads = 0 if state else total_heads(group, engine.stage_ranks)
        rows.append(" ".join(str(getattr(value, "value", value)) for value in (*values, heads)))
    return _digest("kvgrpc layout v1", *rows)


def _digest(*parts: str) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode()
        found.update(len(data).to_bytes(4, "little") + data)
    return found.hexdigest()[:DIGEST_HEX]
