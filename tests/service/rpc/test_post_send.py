"""PostSend sends a peer the bytes that it may read, and no others."""

import grpc
import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import pool_pb2
from tests.service.api import refused
from tests.service.conftest import Start
from tests.service.consumer import Consumer
from tests.service.engines import BLOCK_BYTES, LAYER_BYTES, Engine
from tests.service.receiver import Receiver, post_send
from tests.service.values import new_key, prompt

TOKENS = prompt(32)


@pytest.fixture
def sender(start: Start) -> Engine:
    """Returns a source that sends."""
    (engine,) = start(("--data-paths", "collective"))
    return engine


def places(engine: Engine, block: int) -> list[int]:
    """Returns the offsets of a block in the memory of the engine's rank, layer by layer."""
    (pool,) = engine.api.pool.DescribePools(pool_pb2.DescribePoolsRequest()).pools
    return [region.offset + block * region.stride_bytes for region in pool.regions]


def test_a_peer_receives_what_it_may_read_in_the_order_of_its_asks(sender: Engine) -> None:
    consumer, access = Consumer(sender), new_key()
    consumer.handshake()
    blocks = sender.allocate(2)
    written = sender.write(blocks, seed=7)
    consumer.open(sender.hand_over(TOKENS, blocks).grant, TOKENS, access)
    receiver = Receiver(consumer)
    try:
        for sequence, block in enumerate(blocks[::-1], 1):
            offsets = places(sender, block)
            nbytes = [LAYER_BYTES] * len(offsets)
            consumer.ask(post_send(access, sequence, offsets=offsets, nbytes=nbytes))
            receiver.receive(sequence, nbytes)
            assert receiver.memory[:BLOCK_BYTES].tobytes() == written[blocks.index(block)]
    finally:
        receiver.close()
    consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)


def test_other_bytes_and_accesses_are_refused_and_a_refusal_takes_no_number(sender: Engine) -> None:
    consumer, access = Consumer(sender), new_key()
    consumer.handshake()
    blocks = sender.allocate(3)
    (written, *_) = sender.write(blocks, seed=8)
    consumer.open(sender.hand_over(TOKENS, blocks[:2]).grant, TOKENS, access)
    mine, (other, *_) = places(sender, blocks[0]), places(sender, blocks[2])
    good = {"offsets": mine[:1], "nbytes": [LAYER_BYTES]}
    receiver = Receiver(consumer)
    try:
        for request, code, reason in (
            (post_send(new_key(), 1, **good), "FAILED_PRECONDITION", "ACCESS_NOT_FOUND"),
            (post_send(access, 1, offsets=[other], nbytes=[1]), "PERMISSION_DENIED", "NOT_OWNER"),
            (post_send(access, 1, offsets=[mine[0], other], nbytes=[8, 8]), "PERMISSION_DENIED", "NOT_OWNER"),
            (post_send(access, 1, offsets=mine[:1], nbytes=[1 << 40]), "PERMISSION_DENIED", "NOT_OWNER"),
            (post_send(access, 1, offsets=mine[:1], nbytes=[0]), "PERMISSION_DENIED", "NOT_OWNER"),
            (post_send(access, 1, offsets=[1 << 50], nbytes=[8]), "PERMISSION_DENIED", "NOT_OWNER"),
            (post_send(access, 1, offsets=[(1 << 64) - 1], nbytes=[8]), "INVALID_ARGUMENT", "INVALID_FIELD"),
            (post_send(access, 1, offsets=[8], nbytes=[8, 8]), "INVALID_ARGUMENT", "INVALID_FIELD"),
            (post_send(access, 1), "INVALID_ARGUMENT", "INVALID_FIELD"),
            (post_send(access, 0, **good), "INVALID_ARGUMENT", "INVALID_FIELD"),
            (post_send(access, 1, rank=1, **good), "INVALID_ARGUMENT", "INVALID_FIELD"),
            (post_send(access, 1, source_rank=9, **good), "INVALID_ARGUMENT", "INVALID_FIELD"),
            (post_send(access, 2, **good), "FAILED_PRECONDITION", "DATA_PATH_FAILED"),
            (post_send(access, 1, **good, epoch=2), "FAILED_PRECONDITION", "DATA_PATH_FAILED"),
        ):
            with refused(sender.api, code, reason):
                consumer.ask(request)
        with refused(sender.api, "FAILED_PRECONDITION", "NO_HANDSHAKE"):
            Consumer(sender).ask(post_send(access, 1, **good))
        consumer.ask(post_send(access, 1, **good))
        receiver.receive(1, [LAYER_BYTES])
        assert receiver.memory[:LAYER_BYTES].tobytes() == written[:LAYER_BYTES]
        consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)
        with refused(sender.api, "FAILED_PRECONDITION", "ACCESS_CLOSED"):
            consumer.ask(post_send(access, 2, **good))
    finally:
        receiver.close()


def test_more_runs_and_values_than_a_send_may_have_are_refused(sender: Engine) -> None:
    consumer = Consumer(sender)
    consumer.handshake()
    many = [0] * ((1 << 17) + 1)
    rows = [peer_pb2.GroupValue(key=str(number), value=b"") for number in range(5)]
    for request in (
        post_send(new_key(), 1, offsets=many, nbytes=many),
        post_send(b"", 0, values=rows),
        post_send(b"", 0, values=[peer_pb2.GroupValue(key="k" * 65)]),
        post_send(b"", 0, values=[peer_pb2.GroupValue(key="k", value=bytes(5_000))]),
    ):
        with pytest.raises(grpc.RpcError, match=r"at most|limit"):
            consumer.ask(request)


def test_an_engine_without_such_a_data_path_sends_nothing(source: Engine) -> None:
    consumer, access = Consumer(source), new_key()
    consumer.handshake()
    with refused(source.api, "FAILED_PRECONDITION", "DATA_PATH_FAILED"):
        consumer.ask(post_send(access, 0))
