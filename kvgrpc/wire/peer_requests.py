"""Conversion of calls between leads to the core's events. The caller is that of the stream on which the call came.

A call has passed `fields.check`, which bounds rows, texts and numbers. Only what depends on a limit of this server is
checked here.
"""

from collections.abc import Sequence

from kvgrpc.core import events
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.values.content import ContentClaim
from kvgrpc.errors import note
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.wire.bounds import check_named
from kvgrpc.wire.values import block_lists, close_outcome, core_data_path, layer_range, push_content


def open_access(
    request: peer_pb2.OpenAccessRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.OpenAccess:
    """Converts OpenAccess."""
    rows = request.openings
    check_named("openings.parts.blocks", [part.blocks for row in rows for part in row.parts], limit)
    openings = tuple(_opening(row, limit) for row in rows)
    return events.OpenAccess(call, caller.engine_id, caller.incarnation, openings)


def _opening(row: peer_pb2.AccessOpening, limit: int) -> AccessOpening:
    return AccessOpening(
        access_id=row.access_id,
        token=row.token,
        claim=_claim(row.content) if row.HasField("content") else None,
        transfer_id=row.transfer_id,
        request_id=row.request_id,
        data_paths=tuple(core_data_path(number) for number in row.data_paths),
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
    """Converts SettleAccess."""
    rows = tuple(
        events.AccessSettling(
            row.access_id,
            row.last,
            row.moved_bytes,
            row.part,
            tuple((layers.first, layers.count) for layers in row.layers_done),
        )
        for row in request.settlings
    )
    return events.SettleAccess(call, caller.engine_id, caller.incarnation, rows)


def close_access(
    request: peer_pb2.CloseAccessRequest, caller: peer_pb2.Caller, call: events.Call
) -> events.CloseAccess:
    """Converts CloseAccess. An unknown outcome becomes FAILED, which takes nothing from other consumers."""
    rows = tuple(
        events.AccessClosing(row.access_id, close_outcome(row.outcome), row.quiesced, row.token, note(row.message))
        for row in request.closings
    )
    return events.CloseAccess(call, caller.engine_id, caller.incarnation, rows)


def parts_ready(
    request: peer_pb2.PartsReadyRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.PartsReady:
    """Converts PartsReady."""
    check_named("parts.blocks", [row.blocks for row in request.parts], limit)
    parts = _parts(request.parts, limit)
    return events.PartsReady(call, caller.engine_id, caller.incarnation, request.access_id, parts)


def checksum_blocks(
    request: peer_pb2.ChecksumBlocksRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.ChecksumBlocks:
    """Converts ChecksumBlocks of at most `limit` blocks in all."""
    check_named("blocks.blocks", [row.blocks for row in request.blocks], limit)
    blocks = tuple((block_lists(row.blocks, limit), layer_range(row)) for row in request.blocks)
    return events.ChecksumBlocks(call, caller.engine_id, caller.incarnation, request.access_id, blocks)


def _parts(rows: Sequence[peer_pb2.ReadyPart], limit: int) -> tuple[events.ReadyPart, ...]:
    return tuple(
        events.ReadyPart(
            row.number, block_lists(row.blocks, limit), tuple(row.known_block_counts), layer_range(row), row.last
        )
        for row in rows
    )


def _claim(value: peer_pb2.ContentClaim) -> ContentClaim:
    return ContentClaim(value.token_count, value.digest, value.opaque_id, value.prefix_digests)
