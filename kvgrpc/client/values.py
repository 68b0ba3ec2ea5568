"""Converts Python values to messages of the schema, and back: block ids, content, durations, references to leases."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from google.protobuf.duration_pb2 import Duration

from kvgrpc.errors import Reason
from kvgrpc.v1 import transfer_pb2
from kvgrpc.v1.common_pb2 import (
    BlockRuns,
    Blocks,
    Content,
    FailureReason,
    Grant,
    GroupBlocks,
    LayerRange,
    MultimodalItem,
    TokenContent,
)
from kvgrpc.v1.lease_pb2 import Lease, LeaseRef
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse, GroupBlockCount

V = TypeVar("V", bound=int)

AnyBlocks = Blocks | AllocateBlocksResponse | Sequence[int] | Mapping[int, Sequence[int]] | Sequence[GroupBlocks]
"""Block ids in token order: the reply of `allocate`, the blocks of any reply, or `some_of` them; else a list for a pool
with one group, {group: ids} for several, or rows of an earlier reply.

Only a whole message carries the life and the allocation of its ids. The life of bare ids is given as `incarnation`.
Bare ids without it are refused, because after a restart they may belong to another request.
"""

Tokens = Sequence[int] | Content
"""Token ids in order, or a content made by `content` or `opaque_content`."""

AnyLease = str | Lease | Grant
"""A lease: by its id, as a message of a reply, or by a grant of the lease."""

CALL_OPTIONS = frozenset({"idempotency_key", "limit", "timeout_s"})
"""Options that are not fields of a request."""

_FIELDS = {"consumers": "consumer_count", "dropped_blocks": "dropped_block_counts", "memory": "memory_dispositions"}
"""Fields of options whose names differ."""

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
    """Returns the content of KV: these tokens, under this adapter, salt and revision of the weights. All of them are
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
    """Returns the content for an engine without token ids: an id of at most 64 bytes, compared whole, for `tokens`
    tokens.
    """
    return Content(opaque_id=identifier, opaque_tokens=tokens)


def block_runs(ids: Iterable[int]) -> BlockRuns:
    """Returns block ids as maximal runs, in their order."""
    starts, counts = list[int](), list[int]()
    expected = None
    for block in ids:
        if block == expected:
            counts[-1] += 1
        else:
            starts.append(block)
            counts.append(1)
        expected = block + 1
    return BlockRuns(starts=starts, counts=counts)


def block_ids(blocks: BlockRuns | GroupBlocks | Blocks | AllocateBlocksResponse, group: int = 0) -> list[int]:
    """Returns the block ids of runs, in their order; of blocks with several groups, those of `group`."""
    if isinstance(blocks, AllocateBlocksResponse):
        blocks = blocks.blocks
    if isinstance(blocks, Blocks):
        return [id_ for row in blocks.groups if row.group == group for id_ in block_ids(row)]
    runs = blocks.runs if isinstance(blocks, GroupBlocks) else blocks
    return [id_ for start, count in zip(runs.starts, runs.counts, strict=True) for id_ in range(start, start + count)]


def as_blocks(blocks: AnyBlocks, incarnation: int = 0) -> Blocks:
    """Returns the message for a request: the given one, or one made of ids of the life `incarnation`."""
    if isinstance(blocks, AllocateBlocksResponse):
        return blocks.blocks
    if isinstance(blocks, Blocks):
        return blocks
    return Blocks(incarnation=incarnation, groups=_rows(blocks))


def some_of(taken: Blocks | AllocateBlocksResponse, ids: Sequence[int] | Mapping[int, Sequence[int]]) -> Blocks:
    """Returns some blocks of an allocation, for example one part of a push, with its life and allocation id for the
    server's checks.
    """
    whole = as_blocks(taken)
    return Blocks(incarnation=whole.incarnation, allocation_id=whole.allocation_id, groups=_rows(ids))


def as_content(tokens: Tokens) -> Content:
    """Returns the content. Bare token ids mean no adapter, no salt, and the weights that the engine stated."""
    return tokens if isinstance(tokens, Content) else content(tokens)


def lease_ref(lease: AnyLease) -> LeaseRef:
    """Returns the reference by which the lease calls name a lease."""
    if isinstance(lease, Grant):
        return LeaseRef(grant=lease)
    return LeaseRef(lease_id=lease.lease_id if isinstance(lease, Lease) else lease)


def duration(seconds: float) -> Duration:
    """Returns seconds as a Duration. The server judges the sign; this raises ValueError unless the number is finite."""
    if not math.isfinite(seconds):
        raise ValueError(f"a duration is a finite number of seconds, not {seconds}")
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def in_seconds(value: Duration) -> float:
    """Returns a Duration in seconds."""
    return value.ToNanoseconds() / 1e9


def fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of a call as fields of its request: `ttl_s=30.0` is the field `ttl`, `layers=(0, 8)` a range.

    The request class refuses names that it does not have.
    """
    return {field_of(name): _value(value, name) for name, value in options.items() if name not in CALL_OPTIONS}


def call_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the call itself, for a request whose fields are already set."""
    return {name: value for name, value in options.items() if name in CALL_OPTIONS}


def block_counts(counts: int | Mapping[int, int]) -> list[GroupBlockCount]:
    """Returns rows of a request for a count of the only group, or {group: count}."""
    if not isinstance(counts, int | Mapping):
        raise TypeError(f"counts is a number or {{group: number}}, not {counts!r}")
    by_group = {0: counts} if isinstance(counts, int) else counts
    return [GroupBlockCount(group=group, block_count=count) for group, count in by_group.items()]


def own_blocks(blocks: AnyBlocks, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field for blocks of the called engine, with the life that the blocks or the options state."""
    return {"blocks": as_blocks(blocks, options.get("incarnation", 0))}


def other_fields(options: Mapping[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of a call that takes blocks, except the option that `own_blocks` reads."""
    return fields({name: value for name, value in options.items() if name != "incarnation" and name not in but})


def field_of(option: str) -> str:
    """Returns the name of an option's field in the request."""
    return _FIELDS.get(option, option.removesuffix("_s"))


class Enumeration(Protocol[V]):
    """An enum of the schema."""

    def Name(self, number: V) -> str: ...  # noqa: N802 - protobuf's name
    def keys(self) -> list[str]: ...
    def values(self) -> list[V]: ...


def name_of(enum: Enumeration[V], value: V) -> str:
    """Returns a value's display name: without prefix, in lower case. UNSPECIFIED is "", and a value that this version
    does not know is its number.
    """
    if not value:
        return ""
    prefix = enum.keys()[0].removesuffix("UNSPECIFIED")
    return enum.Name(value).removeprefix(prefix).lower() if value in enum.values() else str(value)


def reason_of(value: FailureReason.ValueType) -> Reason:
    """Returns the reason. One that this version does not know is INTERNAL."""
    name = FailureReason.Name(value).removeprefix("FAILURE_REASON_") if value in FailureReason.values() else ""
    return Reason[name] if name in Reason.__members__ else Reason.INTERNAL


def is_over(transfer: transfer_pb2.Transfer) -> bool:
    """Returns True if the transfer has ended in any way. A state that this version does not know is not an end."""
    return transfer.state in _OVER


def is_returned(transfer: transfer_pb2.Transfer) -> bool:
    """Returns True if the transfer has ended and its blocks may be reused."""
    return is_over(transfer) and transfer.memory == transfer_pb2.MEMORY_DISPOSITION_RETURNED


def _rows(ids: Sequence[int] | Mapping[int, Sequence[int]] | Sequence[GroupBlocks]) -> list[GroupBlocks]:
    if isinstance(ids, Mapping):
        return [GroupBlocks(group=group, runs=block_runs(of_group)) for group, of_group in ids.items()]
    if not isinstance(ids, Iterable):
        raise TypeError(f"blocks are ids, {{group: ids}} or messages of blocks, not {ids!r}")
    rows = [row for row in ids if isinstance(row, GroupBlocks)]
    bare = [block for block in ids if not isinstance(block, GroupBlocks)]
    if rows and bare:
        raise TypeError("blocks are ids or GroupBlocks, not both")
    return [GroupBlocks(group=0, runs=block_runs(bare))] if bare else rows


def _value(value: object, name: str) -> object:
    if name.endswith("_s") and isinstance(value, int | float):
        return duration(value)
    if name == "layers" and isinstance(value, tuple):
        return LayerRange(first=value[0], count=value[1])
    return value
