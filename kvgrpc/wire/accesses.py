"""Calls between leads about accesses: requests from the core's rows, and the core's results from answers."""

from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from kvgrpc.core.events import AccessClosing, AccessSettling, Opened, ReadyPart
from kvgrpc.core.tables.accesses import AccessOpening, Verdict
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.errors import InternalError, KVGrpcError, PreconditionFailed, Reason, note
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.wire.bounds import text
from kvgrpc.wire.values import (
    CLOSE_OUTCOMES,
    DATA_PATHS,
    block_lists,
    core_data_path,
    core_reason,
    data_path,
    layer_ranges,
    packed_checksums,
    put_content,
    put_runs,
)

_Row = TypeVar("_Row")
CALLS = {
    "open_access": "OpenAccess",
    "settle_access": "SettleAccess",
    "close_access": "CloseAccess",
    "parts_ready": "PartsReady",
    "checksum_blocks": "ChecksumBlocks",
    "post_send": "PostSend",
}
"""Names of the calls between leads, by their fields of PeerCall and PeerAnswer."""


def open_request(opening: AccessOpening) -> peer_pb2.OpenAccessRequest:
    """Makes an OpenAccess request with one row."""
    row = peer_pb2.AccessOpening(
        access_id=opening.access_id,
        token=opening.token,
        transfer_id=opening.transfer_id,
        request_id=opening.request_id,
        data_paths=[data_path(name) for name in opening.data_paths],
        reverse_access_id=opening.reverse_access_id,
        part_epoch=opening.part_epoch,
        waits_for_blocks=opening.waits_for_blocks,
        request_time_us=opening.request_time_us,
    )
    _put_parts(opening.parts, row.parts)
    if opening.push_content is not None:
        put_content(opening.push_content, row.push_content)
    if opening.claim is not None:
        claim = opening.claim
        row.content.CopyFrom(
            peer_pb2.ContentClaim(
                token_count=claim.tokens, digest=claim.digest, opaque_id=claim.opaque, prefix_digests=claim.prefix
            )
        )
    return peer_pb2.OpenAccessRequest(openings=[row])


def settle_request(settling: AccessSettling) -> peer_pb2.SettleAccessRequest:
    """Makes a SettleAccess request with one row."""
    row = peer_pb2.AccessSettling(
        access_id=settling.access_id,
        last=settling.last,
        moved_bytes=settling.nbytes,
        part=settling.part,
        layers_done=layer_ranges(settling.layers_done),
    )
    return peer_pb2.SettleAccessRequest(settlings=[row])


def close_request(closing: AccessClosing) -> peer_pb2.CloseAccessRequest:
    """Makes a CloseAccess request with one row."""
    row = peer_pb2.AccessClosing(
        access_id=closing.access_id,
        outcome=CLOSE_OUTCOMES[closing.outcome],
        quiesced=closing.quiesced,
        token=closing.token,
        message=closing.message,
    )
    return peer_pb2.CloseAccessRequest(closings=[row])


def parts_request(access_id: bytes, parts: Sequence[ReadyPart]) -> peer_pb2.PartsReadyRequest:
    request = peer_pb2.PartsReadyRequest(access_id=access_id)
    _put_parts(parts, request.parts)
    return request


def checksum_request(
    access_id: bytes, blocks: Sequence[tuple[Blocks, LayerRange | None]]
) -> peer_pb2.ChecksumBlocksRequest:
    request = peer_pb2.ChecksumBlocksRequest(access_id=access_id)
    for lists, layers in blocks:
        row = request.blocks.add()
        for group, ids in enumerate(lists):
            if len(ids):
                put_runs(ids, row.blocks.add(group=group).runs)
        if layers is not None:
            row.layers.first, row.layers.count = layers
    return request


def checksums(reply: peer_pb2.ChecksumBlocksResponse) -> tuple[bytes, ...]:
    """Returns the checksums of each rank. Raises PreconditionFailed for a malformed answer."""
    if [row.rank for row in reply.ranks] != list(range(len(reply.ranks))):
        raise PreconditionFailed(Reason.PEER_FAILED, "the peer's checksums are not those of its ranks in their order")
    return tuple(packed_checksums(row.values) for row in reply.ranks)


def _put_parts(parts: Sequence[ReadyPart], rows: RepeatedCompositeFieldContainer[peer_pb2.ReadyPart]) -> None:
    for part in parts:
        row = rows.add(number=part.number, last=part.last)
        for group, ids in part.blocks:
            if len(ids):
                put_runs(ids, row.blocks.add(group=group).runs)
        row.known_block_counts.extend(part.known)
        if part.layers is not None:
            row.layers.first, row.layers.count = part.layers


def opened(reply: peer_pb2.OpenAccessResponse, limit: int) -> Opened:
    """Returns the one row of OpenAccess. Raises the row's failure, or an error for a malformed answer."""
    row = _only(reply.results)
    if row.HasField("failure"):
        raise PreconditionFailed(core_reason(row.failure.reason), note(row.failure.message))
    try:
        blocks = block_lists(row.blocks, limit)
        transfer_id, lease_id = text("transfer_id", row.transfer_id), text("lease_id", row.lease_id)
    except KVGrpcError as error:
        raise PreconditionFailed(Reason.PEER_FAILED, f"the source's answer makes no sense: {error}") from error
    return Opened(
        blocks=blocks,
        token_count=row.token_count,
        offer_tokens=row.offer_tokens,
        remaining_s=row.remaining.seconds + row.remaining.nanos / 1e9,
        ttl_s=row.ttl.seconds + row.ttl.nanos / 1e9,
        memory_generation=row.memory_generation,
        transfer_id=transfer_id,
        lease_id=lease_id,
        data_paths=tuple(map(core_data_path, row.data_paths)) if len(row.data_paths) <= len(DATA_PATHS) else (),
    )


def verdict(reply: peer_pb2.SettleAccessResponse) -> Verdict:
    """Returns the verdict of the one row of SettleAccess. Raises an error for a malformed answer."""
    row = _only(reply.results)
    if row.verdict == peer_pb2.VERDICT_VALID:
        return Verdict(True)
    return Verdict(False, core_reason(row.reason), note(row.message))


def _only(rows: Sequence[_Row]) -> _Row:
    """Returns the row of a call with one row. Raises InternalError if the peer answered another number of rows."""
    if len(rows) != 1:
        raise InternalError(Reason.PEER_FAILED, f"the peer answered {len(rows)} rows for one")
    return rows[0]
