"""Messages as long as gRPC allows are refused for their content, and no other call waits for that."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, handshake_pb2, pool_pb2, pool_types_pb2, transfer_pb2
from tests.service.api import read_refusal, refused
from tests.service.consumer import Consumer
from tests.service.engines import Engine, unchanged
from tests.service.footprint import resident_bytes
from tests.service.hostile.rows import rows_of
from tests.service.values import new_key

ROWS = 2_000_000
"""Number of empty rows, which take two bytes each."""


PEER_CALLS: dict[str, Any] = {
    "openings": peer_pb2.OpenAccessRequest,
    "settlings": peer_pb2.SettleAccessRequest,
    "closings": peer_pb2.CloseAccessRequest,
    "parts": peer_pb2.PartsReadyRequest,
    "blocks": peer_pb2.ChecksumBlocksRequest,
}
FLOODS: dict[str, Callable[[], bytes]] = {
    "v1.HandoffService/FinishedBlocks": lambda: handoff_pb2.FinishedBlocksRequest(
        transfer_key=new_key(),
        for_readers=handoff_pb2.HandOver(blocks=common_pb2.Blocks.FromString(rows_of(common_pb2.Blocks, "groups"))),
    ).SerializeToString(),
    "v1.PoolService/AllocateBlocks": lambda: rows_of(pool_pb2.AllocateBlocksRequest, "group_block_counts"),
    "v1.TransferService/AcknowledgeTransfers": lambda: rows_of(
        transfer_pb2.AcknowledgeTransfersRequest, "transfer_ids"
    ),
    "v1.HandshakeService/Handshake": lambda: handshake_pb2.HandshakeRequest(
        engine=handshake_pb2.EngineDescription(
            engine_id="e",
            incarnation=1,
            world_size=1,
            pool=pool_types_pb2.PoolDescription.FromString(rows_of(pool_types_pb2.PoolDescription, "regions")),
        ),
        proof=bytes(32),
    ).SerializeToString(),
}


@pytest.mark.parametrize("rpc", FLOODS)
def test_two_million_rows_are_refused_unread(source: Engine, rpc: str) -> None:
    call: Any = source.api.channel.unary_unary(f"/kvgrpc.{rpc}")
    with unchanged(source), pytest.raises(grpc.RpcError) as caught:
        call(FLOODS[rpc](), timeout=60)
    refusal = read_refusal(rpc, caught.value)
    assert (refusal.code, refusal.reason) == ("OUT_OF_RANGE", "LIMIT_EXCEEDED"), refusal
    assert len(refusal.fields) == 1


@pytest.mark.parametrize("field", PEER_CALLS)
def test_two_million_rows_of_a_call_between_leads_are_refused_unread(source: Engine, field: str) -> None:
    request = PEER_CALLS[field].FromString(rows_of(PEER_CALLS[field], field))
    with unchanged(source):
        refusal = source.api.refusal(lambda: Consumer(source).ask(request))
    assert (refusal.code, refusal.reason, refusal.fields) == ("OUT_OF_RANGE", "LIMIT_EXCEEDED", (field,))


def test_two_million_calls_in_one_message_end_their_stream_and_nothing_else(source: Engine) -> None:
    body = rows_of(peer_pb2.ConverseRequest, "calls")
    call: Any = source.api.channel.stream_stream("/kvgrpc.peer.v1.PeerService/Converse")
    with unchanged(source), pytest.raises(grpc.RpcError) as caught:
        list(call(iter([body]), timeout=60))
    refusal = read_refusal("Converse", caught.value)
    assert (refusal.code, refusal.reason, refusal.fields) == ("OUT_OF_RANGE", "LIMIT_EXCEEDED", ("calls",))


def test_items_of_a_content_are_counted(source: Engine) -> None:
    item = common_pb2.MultimodalItem(digest=b"d", length=1)
    content = common_pb2.Content(tokens=common_pb2.TokenContent(token_ids=[1], multimodal_items=[item] * 10_000))
    with unchanged(source), refused(source.api, "OUT_OF_RANGE", "LIMIT_EXCEEDED"):
        source.hand_over([1], [], content=content)


def test_sources_that_cannot_deliver_leave_short_notes_however_much_they_say(source: Engine) -> None:
    failure = handoff_pb2.SourceFailure(message="x" * 4_000_000)

    def give_up() -> None:
        source.api.handoff.FinishedBlocks(handoff_pb2.FinishedBlocksRequest(transfer_key=new_key(), failure=failure))

    for _ in range(20):  # each later message reuses the memory of such a message
        give_up()
    before = resident_bytes(source.process.pid)
    for _ in range(60):
        give_up()
    assert resident_bytes(source.process.pid) - before < 100_000_000, "240 MB were said"
