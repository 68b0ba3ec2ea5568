"""Digests by which engines that may exchange KV are found among many, before any two of them are compared.

Equal digests are necessary: two engines of which one differs are never compatible. They are not sufficient, because
what a bridge can do depends on both sides: `compatibility.compare` decides.
"""

import hashlib

from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.head_shares import total_heads
from kvgrpc.core.values.layout import GroupKind
from kvgrpc.core.values.obstacles import EQUAL_FIELDS, holds_tensors

DIGEST_HEX = 32
"""Number of hex digits of a digest."""


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
