"""ChecksumBlocks returns the CRC-32C of blocks that a peer may read, and of no other blocks."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

from kvgrpc.core.access.checksums import WAITING_OF_ACCESS_MAX
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2
from tests.service.api import refused
from tests.service.conftest import Start
from tests.service.consumer import Consumer
from tests.service.engines import BLOCK_BYTES, LAYER_BYTES, Engine, wait_until
from tests.service.values import group, new_key, prompt

TOKENS = prompt(32)


def asked(
    access: bytes, blocks: list[int], layers: common_pb2.LayerRange | None = None
) -> peer_pb2.ChecksumBlocksRequest:
    row = peer_pb2.BlocksOfLayers(blocks=[group(blocks)], layers=layers)
    return peer_pb2.ChecksumBlocksRequest(access_id=access, blocks=[row])


def test_blocks_under_an_access_have_checksums_whole_or_by_layers_in_the_order_asked_for(source: Engine) -> None:
    consumer, access = Consumer(source), new_key()
    consumer.handshake()
    blocks = source.allocate(2)
    written = source.write(blocks, seed=7)
    consumer.open(source.hand_over(TOKENS, blocks).grant, TOKENS, access)
    (whole,) = consumer.ask(asked(access, blocks[::-1])).ranks
    assert (whole.rank, list(whole.values)) == (0, [google_crc32c.value(data) for data in written[::-1]])
    first = common_pb2.LayerRange(first=0, count=1)
    (part,) = consumer.ask(asked(access, blocks, first)).ranks
    assert list(part.values) == [google_crc32c.value(data[:LAYER_BYTES]) for data in written]
    (none,) = consumer.ask(asked(access, [])).ranks
    assert not none.values
    assert len(written[0]) == BLOCK_BYTES
    consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)


def test_other_blocks_and_unknown_accesses_are_refused(source: Engine) -> None:
    consumer, access = Consumer(source), new_key()
    consumer.handshake()
    blocks = source.allocate(3)
    consumer.open(source.hand_over(TOKENS, blocks[:2]).grant, TOKENS, access)
    for who, request, code, reason in (
        (consumer, asked(new_key(), blocks[:1]), "FAILED_PRECONDITION", "ACCESS_NOT_FOUND"),
        (consumer, asked(access, blocks[2:]), "PERMISSION_DENIED", "NOT_OWNER"),
        (consumer, asked(access, [1 << 20]), "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE"),
        (Consumer(source), asked(access, blocks[:1]), "FAILED_PRECONDITION", "NO_HANDSHAKE"),
    ):
        with refused(source.api, code, reason):
            who.ask(request)
    consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)
    with refused(source.api, "FAILED_PRECONDITION", "ACCESS_CLOSED"):
        consumer.ask(asked(access, blocks[:1]))


def test_an_access_whose_lease_ended_under_it_is_refused_with_the_reason(source: Engine) -> None:
    consumer, access = Consumer(source), new_key()
    consumer.handshake()
    blocks = source.allocate(1)
    handed = source.hand_over(TOKENS[:16], blocks)
    consumer.open(handed.grant, TOKENS[:16], access)
    source.release(handed.lease.lease_id)
    with refused(source.api, "FAILED_PRECONDITION", "LEASE_RELEASED"):
        consumer.ask(asked(access, blocks))
    consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)


def test_a_checksum_is_computed_once_in_a_call_however_often_its_block_is_listed(source: Engine) -> None:
    consumer, access = Consumer(source), new_key()
    consumer.handshake()
    blocks = source.allocate(2)
    consumer.open(source.hand_over(TOKENS, blocks).grant, TOKENS, access)
    request = asked(access, blocks[:1])
    request.blocks.extend([peer_pb2.BlocksOfLayers(blocks=[group(blocks[:1])])] * 16_000)
    with refused(source.api, "INVALID_ARGUMENT", "BLOCK_DUPLICATE"):
        consumer.ask(request)
    consumer.close(access, peer_pb2.CLOSE_OUTCOME_DROPPED)


LARGE = ("--blocks", "2048", "--kv-heads", "8", "--head-dim", "64")
"""Flags for a pool of 128 MB."""
LARGE_BLOCKS = 2_040
ACCESSES = 150
WINDOW_S = 0.3


def many_calls(source: Engine, consumer: Consumer) -> list[peer_pb2.ChecksumBlocksRequest]:
    """Returns calls of one peer, for 80 GB in all, which take seconds."""
    consumer.handshake()
    tokens, blocks = prompt(16 * LARGE_BLOCKS), source.allocate(LARGE_BLOCKS)
    assert blocks == list(range(blocks[0], blocks[0] + LARGE_BLOCKS))
    grant = source.hand_over(tokens, blocks).grant
    found = []
    for _ in range(ACCESSES):
        consumer.open(grant, tokens, access := new_key())
        request = asked(access, [])
        runs = common_pb2.BlockRuns(starts=blocks[:1], counts=[LARGE_BLOCKS])
        request.blocks[0].blocks[0].CopyFrom(common_pb2.GroupBlocks(runs=runs))
        found += [request] * WAITING_OF_ACCESS_MAX
    assert len(consumer.ask(found[0]).ranks[0].values) == LARGE_BLOCKS
    return found


def test_calls_of_a_stream_that_broke_cost_no_more_than_what_the_ranks_are_at(start: Start) -> None:
    (source,) = start(LARGE)
    consumer = Consumer(source)
    message = peer_pb2.ConverseRequest()
    for number, request in enumerate(many_calls(source, consumer)):
        message.calls.add(call_id=number).checksum_blocks.CopyFrom(request)
    message.calls.add(call_id=len(message.calls)).settle_access.SetInParent()
    message.caller.CopyFrom(consumer.caller)
    over = threading.Event()

    def messages() -> Iterator[peer_pb2.ConverseRequest]:
        yield message
        over.wait()

    stream = source.api.peer.Converse(messages(), timeout=60)
    next(stream)  # the last call, answered at once, shows that all calls have arrived
    stream.cancel()
    over.set()
    before = processor_s(source)
    wait_until(lambda: stands_still(source))
    assert processor_s(source) - before < 1.0


def processor_s(engine: Engine) -> float:
    """Returns the processor time of a server's process in seconds."""
    fields = Path(f"/proc/{engine.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stands_still(engine: Engine) -> bool:
    """Returns whether the server used less than a fifth of a core during `WINDOW_S`."""
    before = processor_s(engine)
    time.sleep(WINDOW_S)
    return processor_s(engine) - before < WINDOW_S / 5
