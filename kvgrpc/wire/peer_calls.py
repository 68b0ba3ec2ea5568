"""Calls between leads as they are served: requests become the core's events, and the core's answers become replies.

The caller is that of the stream on which the call came. A call has passed `fields.check`, which bounds rows, texts and
numbers. Only what depends on a limit of this server is checked here. Replies are written in place: a message that is
put into another one is copied with all that it holds.
"""

from collections.abc import Sequence

from kvgrpc.core import actions, events
from kvgrpc.core.events import Opened
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.values.content import ContentClaim
from kvgrpc.errors import note
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.wire.bounds import check_named
from kvgrpc.wire.values import (
    block_lists,
    close_outcome,
    core_data_path,
    data_path,
    duration,
    error_row,
    layer_range,
    push_content,
    put_runs,
    reason,
    unpacked_checksums,
)


def open_access(
    request: peer_pb2.OpenAccessRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.OpenAccess:
    rows = request.openings
    check_named("openings.parts.blocks", [part.blocks for row in rows for part in row.parts], limit)
    openings = tuple([_opening(row, limit) for row in rows])
    return events.OpenAccess(call, caller.engine_id, caller.incarnation, openings)


def _opening(row: peer_pb2.AccessOpening, limit: int) -> AccessOpening:
    return AccessOpening(
        access_id=row.access_id,
        token=row.token,
        claim=_claim(row.content) if row.HasField("content") else None,
        transfer_id=row.transfer_id,
        request_id=row.request_id,
        data_paths=tuple([core_data_path(number) for number in row.data_paths]),
        reverse_access_id=row.reverse_access_id,
        push_content=push_content(row.push_content) if row.HasField("push_content") else None,
        part_epoch=row.part_epoch,
        parts=_parts(row.parts, limit),
        waits_for_blocks=row.waits_for_blocks,
        request_time_us=row.request_time_us,
    )


def settle_access(
    request: peer_pb2.SettleAccessRequest, caller: peer_pb2.Caller, call: events.Call
) -> events.SettleAccess:
    rows = tuple(
        [
            events.AccessSettling(
                row.access_id,
                row.last,
                row.moved_bytes,
                row.part,
                tuple([(layers.first, layers.count) for layers in row.layers_done]),
            )
            for row in request.settlings
        ]
    )
    return events.SettleAccess(call, caller.engine_id, caller.incarnation, rows)


def close_access(
    request: peer_pb2.CloseAccessRequest, caller: peer_pb2.Caller, call: events.Call
) -> events.CloseAccess:
    """Converts CloseAccess. An unknown outcome becomes FAILED, which takes nothing from other consumers."""
    rows = tuple(
        [
            events.AccessClosing(row.access_id, close_outcome(row.outcome), row.quiesced, row.token, note(row.message))
            for row in request.closings
        ]
    )
    return events.CloseAccess(call, caller.engine_id, caller.incarnation, rows)


def parts_ready(
    request: peer_pb2.PartsReadyRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.PartsReady:
    check_named("parts.blocks", [row.blocks for row in request.parts], limit)
    parts = _parts(request.parts, limit)
    return events.PartsReady(call, caller.engine_id, caller.incarnation, request.access_id, parts)


def checksum_blocks(
    request: peer_pb2.ChecksumBlocksRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.ChecksumBlocks:
    """Converts ChecksumBlocks of at most `limit` blocks in all."""
    check_named("blocks.blocks", [row.blocks for row in request.blocks], limit)
    blocks = tuple([(block_lists(row.blocks, limit), layer_range(row)) for row in request.blocks])
    return events.ChecksumBlocks(call, caller.engine_id, caller.incarnation, request.access_id, blocks)


def _parts(rows: Sequence[peer_pb2.ReadyPart], limit: int) -> tuple[events.ReadyPart, ...]:
    return tuple(
        [
            events.ReadyPart(
                row.number, block_lists(row.blocks, limit), tuple(row.known_block_counts), layer_range(row), row.last
            )
            for row in rows
        ]
    )


def _claim(value: peer_pb2.ContentClaim) -> ContentClaim:
    return ContentClaim(value.token_count, value.digest, value.opaque_id, value.prefix_digests)


def openings(answer: actions.Openings, into: peer_pb2.OpenAccessResponse) -> None:
    """Writes the answer to OpenAccess."""
    for row in answer.rows:
        made = into.results.add()
        if isinstance(row, Opened):
            _opened(row, made)
        else:
            made.failure.CopyFrom(error_row(row))


def verdicts(answer: actions.Verdicts, into: peer_pb2.SettleAccessResponse) -> None:
    """Writes the answer to SettleAccess."""
    for row in answer.rows:
        verdict = peer_pb2.VERDICT_VALID if row.valid else peer_pb2.VERDICT_STALE
        into.results.add(verdict=verdict, reason=reason(row.reason), message=row.message)


def closings(answer: actions.Closings, into: peer_pb2.CloseAccessResponse) -> None:
    """Writes the answer to CloseAccess."""
    for was_open in answer.rows:
        into.results.add(was_open=was_open)


def checksums(answer: actions.Checksums, into: peer_pb2.ChecksumBlocksResponse) -> None:
    """Writes the answer to ChecksumBlocks: the inverse of `accesses.checksums`."""
    for rank, values in enumerate(answer.by_rank):
        into.ranks.add(rank=rank, values=unpacked_checksums(values))


def send_under_way(answer: actions.SendUnderWay, into: peer_pb2.PostSendResponse) -> None:
    """Writes the answer to PostSend: the inverse of `sends.send_under_way`."""
    for key, value in answer.values:
        into.values.add(key=key, value=value)


def _opened(row: Opened, into: peer_pb2.OpenedAccess) -> None:
    for group, ids in row.blocks:  # also groups without blocks: a destination that has all tokens says so for each
        put_runs(ids, into.blocks.add(group=group).runs)
    into.token_count = row.token_count
    into.offer_tokens = row.offer_tokens
    into.remaining.CopyFrom(duration(row.remaining_s))
    into.ttl.CopyFrom(duration(row.ttl_s))
    into.memory_generation = row.memory_generation
    into.transfer_id = row.transfer_id
    into.lease_id = row.lease_id
    into.data_paths.extend(map(data_path, row.data_paths))
