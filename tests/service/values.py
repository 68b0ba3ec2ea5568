"""Short ways to write what requests carry, and to read what replies carry."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvgrpc.v1 import common_pb2, handoff_pb2

_ANY_JOB = frozenset({"idempotency_key", "transfer_key", "request_id", "validate_only"})


def dur(seconds: float) -> Duration:
    """Returns a Duration, of any sign."""
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def seconds(value: Duration) -> float:
    return value.ToNanoseconds() / 1e9


def new_key() -> bytes:
    """Returns a new transfer key or access id."""
    return secrets.token_bytes(16)


def group(ids: Iterable[int], index: int = 0) -> common_pb2.GroupBlocks:
    """Returns one row with a run for each block, because servers must not rely on maximal runs."""
    starts = list(ids)
    return common_pb2.GroupBlocks(group=index, runs=common_pb2.BlockRuns(starts=starts, counts=[1] * len(starts)))


def named_blocks(incarnation: int, *groups: common_pb2.GroupBlocks, allocation_id: str = "") -> common_pb2.Blocks:
    """Names blocks of one life of an engine."""
    return common_pb2.Blocks(incarnation=incarnation, groups=groups, allocation_id=allocation_id)


def for_readers(**fields: Any) -> handoff_pb2.FinishedBlocksRequest:
    """Returns a FinishedBlocks of a whole prompt, from fields of the request and of its hand-over."""
    top = {name: fields.pop(name) for name in _ANY_JOB & fields.keys()}
    return handoff_pb2.FinishedBlocksRequest(for_readers=handoff_pb2.HandOver(**fields), **top)


def push_part(**fields: Any) -> handoff_pb2.FinishedBlocksRequest:
    """Returns a FinishedBlocks of a part of a push, from fields of the request and of the part."""
    top = {name: fields.pop(name) for name in _ANY_JOB & fields.keys()}
    return handoff_pb2.FinishedBlocksRequest(part=handoff_pb2.PushPart(**fields), **top)


def phase_name(value: int) -> str:
    """Returns the name of a transfer's phase, in lower case."""
    return (
        common_pb2.TransferPhase.Name(common_pb2.TransferPhase.ValueType(value)).removeprefix("TRANSFER_PHASE_").lower()
    )


def ids_of(rows: common_pb2.Blocks | Sequence[common_pb2.GroupBlocks]) -> list[int]:
    """Returns the block ids of a reply about a pool with one group."""
    if isinstance(rows, common_pb2.Blocks):
        rows = rows.groups
    return [
        block
        for row in rows
        for start, count in zip(row.runs.starts, row.runs.counts, strict=True)
        for block in range(start, start + count)
    ]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Returns token ids that prompts with other seeds do not share."""
    return [seed * 100_000 + i for i in range(tokens)]


def content(token_ids: Sequence[int], **fields: Any) -> common_pb2.Content:
    return common_pb2.Content(tokens=common_pb2.TokenContent(token_ids=token_ids, **fields))
