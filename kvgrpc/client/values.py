"""Python values to messages of the schema, and back: block ids, content, durations, references to leases."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvgrpc.errors import Reason
from kvgrpc.v1 import transfer_pb2
from kvgrpc.v1.common_pb2 import (
    BlockRuns,
    Content,
    FailureReason,
    Grant,
    GroupBlocks,
    LayerRange,
    MultimodalItem,
    TokenContent,
)
from kvgrpc.v1.lease_pb2 import Lease, LeaseRef
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse

Blocks = AllocateBlocksResponse | Sequence[int] | Mapping[int, Sequence[int]] | Sequence[GroupBlocks]
"""Block ids in token order: what `allocate` replied, a list for a pool with one group, {group: ids} for several, or
rows of an earlier reply.

Only the whole reply says of which life of the engine the ids are. Say it of others with `incarnation`: else nothing
guards, after a restart, blocks that are another request's by then.
"""

Tokens = Sequence[int] | Content
"""Token ids in order, or a content made by `content` or `opaque_content`."""

AnyLease = str | Lease | Grant
"""A lease: by its id, as a reply gave it, or by a grant that stands on it."""

CALL_OPTIONS = frozenset({"idempotency_key", "limit", "timeout_s"})
"""Options that are not fields of a request."""

_OVER = {
    transfer_pb2.TRANSFER_STATE_SUCCEEDED,
    transfer_pb2.TRANSFER_STATE_FAILED,
    transfer_pb2.TRANSFER_STATE_CANCELLED,
}


def content(
    tokens: Iterable[int],
    *,
    adapter: str = "",
    cache_salt: str = "",
    weights_revision: str = "",
    multimodal_items: Iterable[MultimodalItem] = (),
) -> Content:
    """What KV is of: these tokens, under this adapter, salt and revision of the weights. All are part of what is
    compared, so both sides of a transfer must state the same.
    """
    return Content(
        tokens=TokenContent(
            token_ids=tokens,
            adapter=adapter,
            cache_salt=cache_salt,
            weights_revision=weights_revision,
            multimodal_items=multimodal_items,
        )
    )


def opaque_content(identifier: bytes, tokens: int) -> Content:
    """For engines without token ids: any id of at most 64 bytes, compared whole, that stands for so many tokens."""
    return Content(opaque_id=identifier, opaque_tokens=tokens)


def block_runs(ids: Iterable[int]) -> BlockRuns:
    """Block ids as maximal runs, in their order."""
    runs = BlockRuns()
    expected = None
    for block in ids:
        if block == expected:
            runs.counts[-1] += 1
        else:
            runs.starts.append(block)
            runs.counts.append(1)
        expected = block + 1
    return runs


def block_ids(blocks: BlockRuns | GroupBlocks) -> list[int]:
    """The block ids of runs, in their order."""
    runs = blocks.blocks if isinstance(blocks, GroupBlocks) else blocks
    return [id_ for start, count in zip(runs.starts, runs.counts, strict=True) for id_ in range(start, start + count)]


def group_blocks(blocks: Blocks) -> list[GroupBlocks]:
    """Rows for a request, one a group."""
    if isinstance(blocks, AllocateBlocksResponse):
        return list(blocks.blocks)
    if isinstance(blocks, Mapping):
        return [GroupBlocks(group=group, blocks=block_runs(ids)) for group, ids in blocks.items()]
    rows = [row for row in blocks if isinstance(row, GroupBlocks)]
    ids = [block for block in blocks if not isinstance(block, GroupBlocks)]
    if rows and ids:
        raise TypeError("blocks are ids or GroupBlocks, not both")
    return [GroupBlocks(group=0, blocks=block_runs(ids))] if ids else rows


def life_of(blocks: Blocks) -> int:
    """The life of the engine that block ids are of; 0 where they do not say."""
    return blocks.header.incarnation if isinstance(blocks, AllocateBlocksResponse) else 0


def as_content(tokens: Tokens) -> Content:
    """Token ids mean: no adapter, no salt, the weights that the engine stated."""
    return tokens if isinstance(tokens, Content) else content(tokens)


def lease_ref(lease: AnyLease) -> LeaseRef:
    """What the lease calls name a lease by."""
    if isinstance(lease, Grant):
        return LeaseRef(grant=lease)
    return LeaseRef(lease_id=lease.lease_id if isinstance(lease, Lease) else lease)


def duration(seconds: float) -> Duration:
    """Seconds as a Duration. Its sign is the server's to judge; that it is a number is not."""
    if not math.isfinite(seconds):
        raise ValueError(f"a duration is a finite number of seconds, not {seconds}")
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def in_seconds(value: Duration) -> float:
    """A Duration in seconds."""
    return value.ToNanoseconds() / 1e9


def fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call as fields of its request: `ttl_s=30.0` is the field `ttl`, `layers=(0, 8)` a range.

    The request class refuses names that it does not have.
    """
    return dict(_field(name, value) for name, value in options.items() if name not in CALL_OPTIONS)


def reason_of(value: FailureReason.ValueType) -> Reason:
    """A reason that this version does not know reads as INTERNAL."""
    name = FailureReason.Name(value).removeprefix("FAILURE_REASON_") if value in FailureReason.values() else ""
    return Reason[name] if name in Reason.__members__ else Reason.INTERNAL


def is_over(transfer: transfer_pb2.Transfer) -> bool:
    """Whether the transfer has ended, one way or another. A state that this version does not know is not an end."""
    return transfer.state in _OVER


def is_returned(transfer: transfer_pb2.Transfer) -> bool:
    """Whether it has ended and its blocks may be reused."""
    return is_over(transfer) and transfer.memory == transfer_pb2.MEMORY_DISPOSITION_RETURNED


def _field(name: str, value: object) -> tuple[str, object]:
    if name.endswith("_s") and isinstance(value, int | float):
        return name.removesuffix("_s"), duration(value)
    if name == "layers" and isinstance(value, tuple):
        return name, LayerRange(first=value[0], count=value[1])
    return name, value
