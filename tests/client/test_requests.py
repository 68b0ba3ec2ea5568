"""What the methods make of their arguments."""

from typing import Any

import pytest

from kvgrpc.client import Client, block_ids, block_runs, content
from kvgrpc.v1.common_pb2 import Grant, GroupBlocks, ResponseHeader
from kvgrpc.v1.handoff_pb2 import PullBlocksRequest
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse
from tests.client.fake import FakeServer

TAKEN = AllocateBlocksResponse(
    header=ResponseHeader(incarnation=7), blocks=[GroupBlocks(blocks=block_runs([5, 6]))], allocation_id="a"
)


def last(server: FakeServer) -> Any:
    return server.seen[-1].request


async def test_allocate_takes_a_count_or_counts_by_group(server: FakeServer, client: Client) -> None:
    await client.allocate(4, ttl_s=2.5)
    assert [(row.group, row.count) for row in last(server).counts] == [(0, 4)]
    assert last(server).ttl.ToTimedelta().total_seconds() == 2.5
    await client.allocate({0: 4, 1: 2})
    assert [(row.group, row.count) for row in last(server).counts] == [(0, 4), (1, 2)]
    assert not last(server).HasField("ttl")
    await client.renew_allocation("a", ttl_s=1.0)
    assert (last(server).allocation_id, len(last(server).counts)) == ("a", 0)


async def test_a_hand_over_has_a_fresh_key_and_is_the_last_part(server: FakeServer, client: Client) -> None:
    await client.finished_blocks([5, 6, 9], [1, 2, 3], ttl_s=20.0, consumers=2, request_id="r")
    first = last(server)
    assert block_ids(first.blocks[0]) == [5, 6, 9]
    assert first.content == content([1, 2, 3])
    assert (first.last, first.consumers, first.request_id, first.ttl.seconds) == (True, 2, "r", 20)
    assert len(first.transfer_key) == 16
    await client.finished_blocks([5], [1], transfer_key=b"k" * 16, last=False, layers=(0, 4))
    assert (last(server).transfer_key, last(server).last, last(server).layers.count) == (b"k" * 16, False, 4)
    await client.finished_blocks([5], [1])
    assert last(server).transfer_key != first.transfer_key


async def test_blocks_of_an_allocation_go_with_the_life_that_they_are_of(server: FakeServer, client: Client) -> None:
    server.answers["AllocateBlocks"] = lambda *_: TAKEN
    taken = await client.allocate(2)
    await client.finished_blocks(taken, [1])
    assert (block_ids(last(server).blocks[0]), last(server).incarnation) == ([5, 6], 7)
    await client.grant_lease(taken, [1])
    assert (block_ids(last(server).blocks[0]), last(server).incarnation) == ([5, 6], 7)
    await client.pull_blocks(Grant(token=b"t"), [1], blocks=taken)
    destination = last(server).destination
    assert (block_ids(destination.blocks[0]), destination.incarnation) == ([5, 6], 7)
    await client.free(taken)
    assert (block_ids(last(server).blocks[0]), last(server).incarnation) == ([5, 6], 7)


async def test_the_life_of_other_block_ids_is_an_option(server: FakeServer, client: Client) -> None:
    await client.finished_blocks([5], [1], incarnation=7)
    assert last(server).incarnation == 7
    await client.pull_blocks("t-1", blocks=[5], incarnation=7)
    assert last(server).destination.incarnation == 7
    await client.free([5], incarnation=7)
    assert last(server).incarnation == 7
    await client.read_blocks([5], incarnation=7)
    assert last(server).incarnation == 7
    await client.free([5])
    assert last(server).incarnation == 0


async def test_a_pull_without_blocks_waits_and_with_none_releases(server: FakeServer, client: Client) -> None:
    grant = Grant(token=b"t")
    await client.pull_blocks(grant, [1, 2], queue_timeout_s=3.0)
    assert last(server).grant == grant
    assert not last(server).HasField("destination")
    assert last(server).queue_timeout.seconds == 3
    await client.pull_blocks(grant, [1, 2], blocks=[], have_tokens=2)
    assert last(server).HasField("destination")
    assert (len(last(server).destination.blocks), last(server).destination.have_tokens) == (0, 2)


async def test_a_destination_is_given_by_transfer_id(server: FakeServer, client: Client) -> None:
    await client.pull_blocks("t-1", blocks=[7, 8], have_tokens=16)
    request: PullBlocksRequest = last(server)
    assert request.WhichOneof("pull") == "transfer_id"
    assert request.transfer_id == "t-1"
    assert not request.HasField("content")
    assert block_ids(request.destination.blocks[0]) == [7, 8]


async def test_cancel_takes_an_id_or_a_key(server: FakeServer, client: Client) -> None:
    await client.cancel("t-1", message="why")
    assert (last(server).WhichOneof("transfer"), last(server).message) == ("transfer_id", "why")
    await client.cancel(b"k" * 16)
    assert last(server).transfer_key == b"k" * 16


async def test_pins_of_one_block(server: FakeServer, client: Client) -> None:
    await client.pins()
    assert not last(server).HasField("block")
    await client.pins(0, group=1)
    assert (last(server).block.group, last(server).block.block) == (1, 0)


async def test_quarantine_is_released_by_proof_or_by_an_operator(server: FakeServer, client: Client) -> None:
    await client.release_quarantine()
    assert not last(server).force
    await client.release_quarantine(force=True, message="its host is off", transfer_ids=["t-1"])
    assert (last(server).force, last(server).message, list(last(server).transfer_ids)) == (
        True,
        "its host is off",
        ["t-1"],
    )


@pytest.mark.parametrize("labels", [{}, {"owner": "router"}])
async def test_a_lease_has_labels(server: FakeServer, client: Client, labels: dict[str, str]) -> None:
    await client.grant_lease([1], [2], labels=labels)
    assert dict(last(server).labels) == labels
