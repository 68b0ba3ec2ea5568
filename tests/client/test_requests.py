"""Client methods turn their arguments into the right requests."""

from typing import Any

import pytest

from kvgrpc.client import Client, block_ids, block_runs, content
from kvgrpc.v1.common_pb2 import Blocks, Grant, GroupBlocks, ResponseHeader
from kvgrpc.v1.handoff_pb2 import PullBlocksRequest
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse
from kvgrpc.v1.transfer_pb2 import (
    CANCEL_SCOPE_THIS_SIDE,
    DIRECTION_SEND,
    MEMORY_DISPOSITION_HELD,
    TRANSFER_STATE_ACTIVE,
    TransferFilter,
)
from tests.client.fake import METHODS, FakeServer

BLOCKS = Blocks(incarnation=7, allocation_id="a", groups=[GroupBlocks(runs=block_runs([5, 6]))])
TAKEN = AllocateBlocksResponse(header=ResponseHeader(incarnation=7), blocks=BLOCKS)


def last(server: FakeServer) -> Any:
    return server.seen[-1].request


async def test_allocate_takes_a_count_or_counts_by_group(server: FakeServer, client: Client) -> None:
    await client.allocate(4, ttl_s=2.5)
    assert [(row.group, row.block_count) for row in last(server).group_block_counts] == [(0, 4)]
    assert last(server).ttl.ToTimedelta().total_seconds() == 2.5
    await client.allocate({0: 4, 1: 2})
    assert [(row.group, row.block_count) for row in last(server).group_block_counts] == [(0, 4), (1, 2)]
    assert not last(server).HasField("ttl")
    await client.renew_allocation("a", ttl_s=1.0)
    assert (last(server).allocation_id, len(last(server).group_block_counts)) == ("a", 0)


async def test_a_hand_over_is_for_readers_and_has_a_fresh_key(server: FakeServer, client: Client) -> None:
    await client.finished_blocks([5, 6, 9], [1, 2, 3], ttl_s=20.0, consumers=2, request_id="r", validate_only=True)
    first = last(server)
    job = first.for_readers
    assert block_ids(job.blocks) == [5, 6, 9]
    assert job.content == content([1, 2, 3])
    assert (job.consumer_count, job.ttl.seconds, first.request_id, first.validate_only) == (2, 20, "r", True)
    assert len(first.transfer_key) == 16
    await client.finished_blocks([5], [1], transfer_key=b"k" * 16)
    assert last(server).transfer_key == b"k" * 16
    await client.finished_blocks([5], [1])
    assert last(server).transfer_key != first.transfer_key


async def test_a_part_of_a_push_says_its_layers_and_whether_it_is_the_last(server: FakeServer, client: Client) -> None:
    await client.push_part(b"k" * 16, BLOCKS, [1, 2], layers=(0, 4), part_epoch=2, consumers=3, request_id="r")
    request, part = last(server), last(server).part
    assert (request.transfer_key, request.request_id) == (b"k" * 16, "r")
    assert (part.blocks, part.content) == (BLOCKS, content([1, 2]))
    assert (part.layers.count, part.part_epoch, part.consumer_count, part.last) == (4, 2, 3, False)
    await client.push_part(b"k" * 16, last=True)
    part = last(server).part
    assert (part.last, part.HasField("blocks"), part.HasField("content")) == (True, False, False)


async def test_a_source_that_failed_says_so_under_the_key(server: FakeServer, client: Client) -> None:
    await client.source_failed(b"k" * 16, "the GPU is gone", request_id="r")
    request = last(server)
    assert request.WhichOneof("job") == "failure"
    assert (request.transfer_key, request.failure.message, request.request_id) == (b"k" * 16, "the GPU is gone", "r")


async def test_an_option_that_a_hand_over_does_not_have_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="layers"):
        await client.finished_blocks([5], [1], layers=(0, 4))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no_such"):
        await client.push_part(b"k" * 16, no_such=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("form", ["reply", "blocks"])
async def test_blocks_of_an_allocation_are_handed_on_whole(server: FakeServer, client: Client, form: str) -> None:
    server.answers["AllocateBlocks"] = lambda *_: TAKEN
    reply = await client.allocate(2)
    taken = reply if form == "reply" else reply.blocks
    await client.finished_blocks(taken, [1])
    assert last(server).for_readers.blocks == BLOCKS
    await client.push_part(b"k" * 16, taken, [1])
    assert last(server).part.blocks == BLOCKS
    await client.grant_lease(taken, [1])
    assert last(server).blocks == BLOCKS
    await client.reserve_blocks(b"k" * 16, taken, [1])
    assert last(server).blocks == BLOCKS
    await client.pull_blocks(Grant(token=b"t"), [1], blocks=taken)
    assert last(server).destination.blocks == BLOCKS
    await client.read_blocks(taken)
    assert last(server).blocks == BLOCKS
    await client.free(taken)
    assert last(server).blocks == BLOCKS


async def test_the_life_of_bare_block_ids_is_an_option(server: FakeServer, client: Client) -> None:
    await client.finished_blocks([5], [1], incarnation=7)
    assert last(server).for_readers.blocks.incarnation == 7
    await client.push_part(b"k" * 16, [5], [1], incarnation=7)
    assert last(server).part.blocks.incarnation == 7
    await client.pull_blocks("t-1", blocks=[5], incarnation=7)
    assert last(server).destination.blocks.incarnation == 7
    await client.free([5], incarnation=7)
    assert last(server).blocks.incarnation == 7
    await client.read_blocks([5], incarnation=7)
    assert last(server).blocks.incarnation == 7
    await client.free([5])
    assert last(server).blocks.incarnation == 0


async def test_all_of_an_allocation_is_freed_by_its_id(server: FakeServer, client: Client) -> None:
    await client.free("a")
    assert (last(server).WhichOneof("freed"), last(server).allocation_id) == ("allocation_id", "a")


async def test_a_pull_without_blocks_waits_and_with_none_releases(server: FakeServer, client: Client) -> None:
    grant = Grant(token=b"t")
    await client.pull_blocks(grant, [1, 2], queue_timeout_s=3.0)
    assert last(server).grant == grant
    assert not last(server).HasField("destination")
    assert last(server).queue_timeout.seconds == 3
    await client.pull_blocks(grant, [1, 2], blocks=[], have_tokens=2)
    assert last(server).HasField("destination")
    assert (len(last(server).destination.blocks.groups), last(server).destination.have_tokens) == (0, 2)


async def test_a_destination_is_given_by_transfer_id(server: FakeServer, client: Client) -> None:
    await client.pull_blocks("t-1", blocks=[7, 8], have_tokens=16)
    request: PullBlocksRequest = last(server)
    assert request.WhichOneof("pull") == "transfer_id"
    assert request.transfer_id == "t-1"
    assert not request.HasField("content")
    assert block_ids(request.destination.blocks) == [7, 8]


async def test_cancel_takes_an_id_or_a_key(server: FakeServer, client: Client) -> None:
    await client.cancel("t-1", message="why")
    assert (last(server).WhichOneof("target"), last(server).message) == ("transfer_id", "why")
    await client.cancel(b"k" * 16, scope=CANCEL_SCOPE_THIS_SIDE, free_allocation_ids=["a", "b"])
    request = last(server)
    assert (request.transfer_key, request.scope) == (b"k" * 16, CANCEL_SCOPE_THIS_SIDE)
    assert list(request.free_allocation_ids) == ["a", "b"]


async def test_every_call_that_changes_something_can_be_tried(server: FakeServer, client: Client) -> None:
    tried = [
        client.allocate(1, validate_only=True),
        client.reclaim({0: 1}, validate_only=True),
        client.renew_allocation("a", validate_only=True),
        client.free("a", validate_only=True),
        client.finished_blocks([5], [1], validate_only=True),
        client.push_part(b"k" * 16, last=True, validate_only=True),
        client.source_failed(b"k" * 16, validate_only=True),
        client.pull_blocks("t-1", blocks=[], validate_only=True),
        client.reserve_blocks(b"k" * 16, [5], [1], validate_only=True),
        client.register_push(Grant(token=b"t"), validate_only=True),
        client.acknowledge(["t-1"], validate_only=True),
        client.cancel("t-1", validate_only=True),
        client.grant_lease([5], [1], validate_only=True),
        client.renew_leases(["l"], validate_only=True),
        client.release_lease("l", validate_only=True),
        client.connect_peer("127.0.0.1:1", validate_only=True),
        client.release_quarantine(validate_only=True),
        client.start_drain(validate_only=True),
        client.cancel_drain(validate_only=True),
    ]
    for call in tried:
        await call
        assert last(server).validate_only, server.seen[-1].method
    untried = {
        name
        for name, method in METHODS.items()
        if "validate_only" in method.input_type.fields_by_name and name not in {seen.method for seen in server.seen}
    }
    assert not untried


async def test_transfers_are_found_by_all_that_a_filter_has(server: FakeServer, client: Client) -> None:
    await client.list_transfers(
        transfer_ids=["t-1", "t-2"],
        pair_id="p",
        lease_id="l",
        direction=DIRECTION_SEND,
        request_id="r",
        trace_id="c",
        peer_engine_id="D",
        states=[TRANSFER_STATE_ACTIVE],
        memory=[MEMORY_DISPOSITION_HELD],
        min_age_s=1.5,
    )
    found = {field.name: value for field, value in last(server).filter.ListFields()}
    assert set(found) == {field.name for field in TransferFilter.DESCRIPTOR.fields}
    assert (list(found["transfer_ids"]), found["pair_id"], found["lease_id"]) == (["t-1", "t-2"], "p", "l")
    assert (found["direction"], list(found["memory_dispositions"])) == (DIRECTION_SEND, [MEMORY_DISPOSITION_HELD])


async def test_a_drain_is_begun_and_taken_back(server: FakeServer, client: Client) -> None:
    await client.start_drain("the host goes")
    assert last(server).reason == "the host goes"
    await client.get_drain(7)
    assert last(server).page_size == 7
    await client.cancel_drain()
    assert server.seen[-1].method == "CancelDrain"


async def test_pins_of_one_block(server: FakeServer, client: Client) -> None:
    await client.pins()
    assert not last(server).HasField("block")
    await client.pins(0, group=1)
    assert (last(server).block.group, last(server).block.block) == (1, 0)


async def test_quarantine_is_released_by_proof_or_by_an_operator(server: FakeServer, client: Client) -> None:
    await client.release_quarantine()
    assert not last(server).force
    assert 50 < (server.seen[-1].time_s or 0) <= 61
    await client.release_quarantine(timeout_s=90)
    assert 80 < (server.seen[-1].time_s or 0) <= 91
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
