"""Conversion of values that many messages share: durations, block lists, content, enums, failures.

Many numbers go into and out of a message by numpy: from Python lists, a number costs six times as much. The bytes that
are merged into a message are protobuf's wire format of packed integer fields.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kvgrpc.core.tables import transfers
from kvgrpc.core.tables.accesses import CloseOutcome
from kvgrpc.core.tables.transfers import Failure, Side
from kvgrpc.core.values import content as contents
from kvgrpc.core.values.block_ids import FEW_IDS, BlockLists, Blocks, Ids, expand_runs, runs_of, to_runs
from kvgrpc.core.values.grants import AccessKind, Claims, OnAbort, read_claims
from kvgrpc.errors import BY_CODE, InternalError, InvalidRequest, KVGrpcError, NextStep, Reason, invalid, note
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2
from kvgrpc.wire.bounds import GROUPS_MAX, ITEMS_MAX, TOKENS_MAX, check_count
from kvgrpc.wire.enums import numbers

FEW = 1024
"""Number of runs up to which protobuf's own way costs less."""


def ids(values: Sequence[int]) -> Ids:
    """Returns a repeated field of integers as an array."""
    return np.asarray(values, dtype=np.int64)


def put_columns(into: Message, **columns: Ids) -> None:
    """Writes repeated fields of equal length, by their names, into a message in which they are empty."""
    if len(next(iter(columns.values()))) <= FEW:
        for name, values in columns.items():
            getattr(into, name).extend(values.tolist())
        return
    fields = into.DESCRIPTOR.fields_by_name
    into.MergeFromString(b"".join(packed_field(fields[name].number, values) for name, values in columns.items()))


def put_runs(ids: Ids, into: common_pb2.BlockRuns) -> None:
    """Writes maximal runs of consecutive ids, in order, into an empty message."""
    if len(ids) <= FEW_IDS:
        starts, counts = to_runs(ids)
        into.starts.extend(starts)
        into.counts.extend(counts)
        return
    first, length = runs_of(ids)
    if len(first) <= FEW:
        into.starts.extend(first.tolist())
        into.counts.extend(length.tolist())
    else:
        into.MergeFromString(packed_field(1, first) + packed_field(2, length))


def packed_checksums(values: Sequence[int]) -> bytes:
    """Returns checksums in the core's form: consecutive uint32, little-endian."""
    return np.array(values, dtype="<u4").tobytes()


def unpacked_checksums(values: bytes) -> list[int]:
    """Returns the numbers of `packed_checksums`; its inverse."""
    found: list[int] = np.frombuffer(values, dtype="<u4").tolist()
    return found


def packed_field(number: int, values: Ids) -> bytes:
    """Returns one packed field of a message, for numbers in [0, 2**56): its tag, its length, and the values.

    A message into which it is merged writes each number in as few bytes as possible. Here all take the same 1, 2, 4 or
    8 bytes, which are words for numpy: seven bits a byte, the lowest first, the top bit set if more follow.
    """
    bits = int(values.max(initial=0)).bit_length()
    width = next(width for width in (1, 2, 4, 8) if bits <= 7 * width)
    numbers = values.astype(f"<u{width}")
    words = numbers & 0x7F
    for place in range(1, width):
        words |= (numbers & (0x7F << 7 * place)) << place
        words |= 0x80 << 8 * (place - 1)
    return bytes([number << 3 | 2]) + _varint(words.nbytes) + words.tobytes()


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


NEXT = numbers(common_pb2.NextStep, NextStep)
SIDE = numbers(common_pb2.Side, Side)
ON_ABORT = numbers(common_pb2.OnAbort, OnAbort)
_ON_ABORT = {int(number): effect for effect, number in ON_ABORT.items()}
PHASES = numbers(common_pb2.TransferPhase, transfers.PHASES)
DATA_PATHS = numbers(common_pb2.DataPath, ("", "shm", "cma", "cuda_vmm", "nixl", "collective", "loopback", "window"))
_CORE_DATA_PATHS = {int(number): name for name, number in DATA_PATHS.items()}
CLOSE_OUTCOMES = numbers(peer_pb2.CloseOutcome, CloseOutcome)
_CLOSE_OUTCOMES = {int(number): outcome for outcome, number in CLOSE_OUTCOMES.items()}
_ACCESS = numbers(common_pb2.AccessKind, AccessKind)


def duration(seconds: float) -> Duration:
    """Returns a Duration of `seconds`, or of 0 for a negative value."""
    nanos = round(seconds * 1e9)
    if nanos <= 0:
        return Duration()
    whole, rest = divmod(nanos, 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)


def seconds(request: Message, field: str) -> float | None:
    """Returns a Duration field in seconds, or None if it is unset."""
    if not request.HasField(field):
        return None
    value: Duration = getattr(request, field)
    return value.seconds + value.nanos / 1e9


def timeout_s(request: Message, field: str) -> float | None:
    """Returns a timeout in seconds, or None if it is unset. Raises InvalidRequest unless it is positive."""
    value = seconds(request, field)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise invalid(field, "a timeout is positive; leave it out for the default")
    return value


def reason(value: Reason | None) -> "common_pb2.FailureReason.ValueType":
    """Returns the wire's value of a reason."""
    if value is None:
        return common_pb2.FAILURE_REASON_UNSPECIFIED
    return common_pb2.FailureReason.Value(f"FAILURE_REASON_{value.name}")


def core_reason(value: int) -> Reason:
    """Returns the core's value of a reason, or INTERNAL for an unknown one."""
    try:
        name = common_pb2.FailureReason.Name(common_pb2.FailureReason.ValueType(value))
        return Reason(name.removeprefix("FAILURE_REASON_"))
    except ValueError:
        return Reason.INTERNAL


def failure(value: Failure) -> common_pb2.Failure:
    return common_pb2.Failure(
        reason=reason(value.reason),
        phase=PHASES[value.phase],
        side=SIDE[value.side] if value.side else common_pb2.SIDE_UNSPECIFIED,
        rank=value.rank,
        next=NEXT[value.next] if value.next else common_pb2.NEXT_STEP_UNSPECIFIED,
        message=value.message,
    )


def stated_error(code: str, reason_value: int, message: str) -> KVGrpcError:
    """Returns the error that a message states by its gRPC code's name. An unknown code becomes InternalError."""
    return BY_CODE.get(code, InternalError)(core_reason(reason_value), note(message))


def error_row(error: KVGrpcError) -> common_pb2.Failure:
    """Returns an error as a row of a batch."""
    return common_pb2.Failure(reason=reason(error.reason), message=error.sentence)


def named_blocks(lists: BlockLists, incarnation: int, allocation_id: str = "") -> common_pb2.Blocks:
    """Returns blocks of one life of an engine as runs, with one entry for each group that has some."""
    made = common_pb2.Blocks(incarnation=incarnation, allocation_id=allocation_id)
    for group, ids in lists:
        if len(ids):
            put_runs(ids, made.groups.add(group=group).runs)
    return made


def pool_blocks(blocks: Blocks, incarnation: int, allocation_id: str = "") -> common_pb2.Blocks:
    """Does what `named_blocks` does, for blocks of all groups of a pool."""
    return named_blocks(tuple(enumerate(blocks)), incarnation, allocation_id)


def lists_of(field: str, value: common_pb2.Blocks, limit: int) -> BlockLists:
    """Returns the lists of a message of named blocks. Raises InvalidRequest if it does not name their incarnation, and
    what `block_lists` raises.
    """
    if value.groups and not value.incarnation:
        raise invalid(f"{field}.incarnation", "is required: hand on the whole message that gave the blocks")
    return block_lists(value.groups, limit)


def block_lists(rows: Sequence[common_pb2.GroupBlocks], limit: int) -> BlockLists:
    """Returns rows of block ids. Raises InvalidRequest or OutOfRange for malformed or long runs, or too many rows."""
    check_count("blocks", len(rows), GROUPS_MAX)
    found = []
    left = limit
    for row in rows:
        ids = _ids(row.runs, left)
        left -= len(ids)
        found.append((row.group, ids))
    return tuple(found)


def _ids(runs: common_pb2.BlockRuns, limit: int) -> Ids:
    starts, counts = runs.starts, runs.counts
    if len(starts) == 1 == len(counts) and 0 < counts[0] <= limit:
        return np.arange(starts[0], starts[0] + counts[0], dtype=np.int64)
    return expand_runs(starts, counts, limit)


def data_path(name: str) -> "common_pb2.DataPath.ValueType":
    """Returns the wire's value of a data path. A path that only a worker knows becomes UNSPECIFIED."""
    return DATA_PATHS.get(name, common_pb2.DATA_PATH_UNSPECIFIED)


def core_data_path(value: int) -> str:
    """Returns the core's name of a data path, or the number of an unknown one."""
    return _CORE_DATA_PATHS.get(value, str(value))


def close_outcome(value: int) -> CloseOutcome:
    """Converts an outcome. An unknown value becomes FAILED, which takes nothing from other consumers."""
    return _CLOSE_OUTCOMES.get(value, CloseOutcome.FAILED)


def on_abort(value: int) -> OnAbort:
    """Converts the effect of an abort. An unknown value becomes RELEASE, the default."""
    return _ON_ABORT.get(value, OnAbort.RELEASE)


def content(value: common_pb2.Content, weights_revision: str, also_at: int = 0) -> contents.ContentId | None:
    """Converts a Content, or returns None if it is unset. `also_at` adds a digest there, if tokens are given."""
    form = value.WhichOneof("form")
    if form is None:
        return None
    if form == "opaque_id":
        return contents.ContentId(value.opaque_tokens, opaque=value.opaque_id)
    if form == "chain":
        return contents.ContentId(value.chain.token_count, digests=value.chain.digests)
    tokens = value.tokens
    if tokens.weights_revision and tokens.weights_revision != weights_revision:
        raise InvalidRequest(
            Reason.WEIGHTS_MISMATCH,
            f"the content names weights {tokens.weights_revision}; this engine runs {weights_revision}",
        )
    check_count("content.tokens.token_ids", len(tokens.token_ids), TOKENS_MAX)
    check_count("content.tokens.multimodal_items", len(tokens.multimodal_items), ITEMS_MAX)
    items = [contents.Item(item.digest, item.offset, item.length) for item in tokens.multimodal_items]
    return contents.chain(
        tokens.token_ids,
        adapter=tokens.adapter,
        cache_salt=tokens.cache_salt,
        weights_revision=weights_revision,
        items=items,
        also_at=also_at,
    )


def push_content(value: common_pb2.Content) -> contents.ContentId:
    """Converts a push's content as its source states it. Raises InvalidRequest unless it is a chain or opaque id."""
    made = content(value, "") if value.WhichOneof("form") in ("chain", "opaque_id") else None
    if made is None:
        raise invalid("push_content", "is a chain or an opaque id")
    return made


def put_content(value: contents.ContentId, into: common_pb2.Content) -> None:
    """Writes a content as a chain or an opaque id."""
    if value.opaque:
        into.opaque_id, into.opaque_tokens = value.opaque, value.tokens
    else:
        into.chain.digests, into.chain.token_count = value.digests, value.tokens


def layer_range(message: Message) -> tuple[int, int] | None:
    """Converts field `layers` to (first, count), or None if it is unset. Raises InvalidRequest for no layers."""
    if not message.HasField("layers"):
        return None
    layers: common_pb2.LayerRange = message.layers  # type: ignore[attr-defined]
    if not layers.count:
        raise invalid("layers.count", "must be positive")
    return layers.first, layers.count


def layer_ranges(value: Iterable[tuple[int, int]]) -> list[common_pb2.LayerRange]:
    return [common_pb2.LayerRange(first=first, count=count) for first, count in value]


def grant(token: bytes) -> common_pb2.Grant:
    """Returns the Grant message of a new token: the token, and its claims for programs that relay it."""
    claims = read_claims(token)
    return common_pb2.Grant(
        token=token,
        access=_ACCESS[claims.access],
        engine_id=claims.engine_id,
        incarnation=claims.incarnation,
        address=claims.address,
        lease_id=claims.lease_id,
        ttl=duration(claims.ttl_s),
        block_count=claims.block_count,
        token_count=claims.token_count,
    )


def claims_of(value: common_pb2.Grant) -> Claims:
    """Returns the claims of a grant's token, unverified. Raises InvalidRequest (GRANT_INVALID)."""
    return read_claims(value.token)
