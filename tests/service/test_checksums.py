"""ChecksumBlocks: the CRC-32C of blocks that a peer may read, and of no others."""

import google_crc32c

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2
from tests.service.api import refused
from tests.service.consumer import Consumer
from tests.service.engines import BLOCK_BYTES, LAYER_BYTES, Engine
from tests.service.values import group, new_key, prompt

TOKENS = prompt(32)


def asked(
    consumer: Consumer, access: bytes, blocks: list[int], layers: common_pb2.LayerRange | None = None
) -> peer_pb2.ChecksumBlocksRequest:
    row = peer_pb2.BlocksOfLayers(blocks=[group(blocks)], layers=layers)
    return peer_pb2.ChecksumBlocksRequest(caller=consumer.caller, access_id=access, blocks=[row])


def test_blocks_under_an_access_are_summed_up_whole_or_by_layers_in_the_order_asked_for(source: Engine) -> None:
    consumer, access = Consumer(source), new_key()
    consumer.handshake()
    blocks = source.allocate(2)
    written = source.write(blocks, seed=7)
    consumer.open(source.hand_over(TOKENS, blocks).grant, TOKENS, access)
    peer = source.api.peer
    (whole,) = peer.ChecksumBlocks(asked(consumer, access, blocks[::-1])).ranks
    assert (whole.rank, list(whole.values)) == (0, [google_crc32c.value(data) for data in written[::-1]])
    first = common_pb2.LayerRange(first=0, count=1)
    (part,) = peer.ChecksumBlocks(asked(consumer, access, blocks, first)).ranks
    assert list(part.values) == [google_crc32c.value(data[:LAYER_BYTES]) for data in written]
    (none,) = peer.ChecksumBlocks(asked(consumer, access, [])).ranks
    assert not none.values
    assert len(written[0]) == BLOCK_BYTES
    consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)


def test_other_blocks_and_accesses_of_nobody_are_refused(source: Engine) -> None:
    consumer, access = Consumer(source), new_key()
    consumer.handshake()
    blocks = source.allocate(3)
    consumer.open(source.hand_over(TOKENS, blocks[:2]).grant, TOKENS, access)
    peer = source.api.peer
    for request, code, reason in (
        (asked(consumer, new_key(), blocks[:1]), "FAILED_PRECONDITION", "ACCESS_NOT_FOUND"),
        (asked(consumer, access, blocks[2:]), "PERMISSION_DENIED", "NOT_OWNER"),
        (asked(consumer, access, [1 << 20]), "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE"),
        (asked(Consumer(source), access, blocks[:1]), "FAILED_PRECONDITION", "NO_HANDSHAKE"),
    ):
        with refused(source.api, code, reason):
            peer.ChecksumBlocks(request)
    consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)
    with refused(source.api, "FAILED_PRECONDITION", "ACCESS_CLOSED"):
        peer.ChecksumBlocks(asked(consumer, access, blocks[:1]))


def test_an_access_whose_lease_ended_under_it_is_refused_with_the_reason(source: Engine) -> None:
    consumer, access = Consumer(source), new_key()
    consumer.handshake()
    blocks = source.allocate(1)
    handed = source.hand_over(TOKENS[:16], blocks)
    consumer.open(handed.grant, TOKENS[:16], access)
    source.release(handed.lease.lease_id)
    with refused(source.api, "FAILED_PRECONDITION", "LEASE_RELEASED"):
        source.api.peer.ChecksumBlocks(asked(consumer, access, blocks))
    consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)
