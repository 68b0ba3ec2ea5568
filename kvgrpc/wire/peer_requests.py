"""Conversion of calls between leads to the core's events. The caller is that of the stream on which the call came."""

from collections.abc import Sequence

from kvgrpc.core import events
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.values.content import ContentClaim
from kvgrpc.core.values.parts import BATCH_PARTS
from kvgrpc.errors import note
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.wire.bounds import BLOCK_ROWS_MAX, RANGES_MAX, ROWS_MAX, check_blocks, check_count, check_counts, text
from kvgrpc.wire.values import block_lists, close_outcome, core_data_path, layer_range, push_content


def open_access(
    request: peer_pb2.OpenAccessRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.OpenAccess:
    """Converts OpenAccess."""
    rows = request.openings
    check_count("openings", len(rows), ROWS_MAX)
    check_counts("openings.data_paths", (row.data_paths for row in rows), RANGES_MAX)
    _check_ready("openings.parts", [part for row in rows for part in row.parts], limit)
    openings = tuple(_opening(row, limit) for row in rows)
    return events.OpenAccess(call, caller.engine_id, caller.incarnation, openings)


def _opening(row: peer_pb2.AccessOpening, limit: int) -> AccessOpening:
    return AccessOpening(
        access_id=row.access_id,
        token=row.token,
        claim=_claim(row.content) if row.HasField("content") else None,
        transfer_id=text("openings.transfer_id", row.transfer_id),
        request_id=text("openings.request_id", row.request_id),
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
    check_count("settlings", len(request.settlings), ROWS_MAX)
    check_counts("settlings.layers_done", (row.layers_done for row in request.settlings), RANGES_MAX)
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
    check_count("closings", len(request.closings), ROWS_MAX)
    rows = tuple(
        events.AccessClosing(row.access_id, close_outcome(row.outcome), row.quiesced, row.token, note(row.message))
        for row in request.closings
    )
    return events.CloseAccess(call, caller.engine_id, caller.incarnation, rows)


def parts_ready(
    request: peer_pb2.PartsReadyRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.PartsReady:
    """Converts PartsReady."""
    _check_ready("parts", request.parts, limit)
    parts = _parts(request.parts, limit)
    return events.PartsReady(call, caller.engine_id, caller.incarnation, request.access_id, parts)


def checksum_blocks(
    request: peer_pb2.ChecksumBlocksRequest, caller: peer_pb2.Caller, call: events.Call, limit: int
) -> events.ChecksumBlocks:
    """Converts ChecksumBlocks of at most `limit` blocks in all."""
    check_count("blocks", len(request.blocks), RANGES_MAX)
    check_blocks("blocks.blocks", [row.blocks for row in request.blocks], BLOCK_ROWS_MAX, limit)
    blocks = tuple((block_lists(row.blocks, limit), layer_range(row)) for row in request.blocks)
    return events.ChecksumBlocks(call, caller.engine_id, caller.incarnation, request.access_id, blocks)


def _check_ready(field: str, rows: Sequence[peer_pb2.ReadyPart], limit: int) -> None:
    """Raises OutOfRange if the parts, their groups or their listed blocks are too many."""
    check_count(field, len(rows), BATCH_PARTS)
    check_counts(f"{field}.known", (row.known_block_counts for row in rows), BLOCK_ROWS_MAX)
    check_blocks(f"{field}.blocks", [row.blocks for row in rows], BLOCK_ROWS_MAX, limit)


def _parts(rows: Sequence[peer_pb2.ReadyPart], limit: int) -> tuple[events.ReadyPart, ...]:
    return tuple(
        events.ReadyPart(
            row.number, block_lists(row.blocks, limit), tuple(row.known_block_counts), layer_range(row), row.last
        )
        for row in rows
    )


def _claim(value: peer_pb2.ContentClaim) -> ContentClaim:
    return ContentClaim(value.token_count, value.digest, value.opaque_id, value.prefix_digests)
