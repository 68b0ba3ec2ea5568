"""Short ways to write what requests carry, and to read what replies carry."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvgrpc.v1 import common_pb2


def dur(seconds: float) -> Duration:
    """A Duration, of any sign."""
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def seconds(value: Duration) -> float:
    return value.ToNanoseconds() / 1e9


def new_key() -> bytes:
    """A transfer key or access id that nobody used before."""
    return secrets.token_bytes(16)


def group(ids: Iterable[int], index: int = 0) -> common_pb2.GroupBlocks:
    """One row, every block a run of its own: the server may not rely on maximal runs."""
    starts = list(ids)
    return common_pb2.GroupBlocks(group=index, blocks=common_pb2.BlockRuns(starts=starts, counts=[1] * len(starts)))


def ids_of(rows: Sequence[common_pb2.GroupBlocks]) -> list[int]:
    """The block ids of a reply about a pool with one group."""
    return [
        block
        for row in rows
        for start, count in zip(row.blocks.starts, row.blocks.counts, strict=True)
        for block in range(start, start + count)
    ]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that two prompts of different seeds do not share anywhere."""
    return [seed * 100_000 + i for i in range(tokens)]


def content(token_ids: Sequence[int], **fields: Any) -> common_pb2.Content:
    return common_pb2.Content(tokens=common_pb2.TokenContent(token_ids=token_ids, **fields))
