"""Holders of blocks of a server-managed pool, as ListAllocations and ListPins of one block show them."""

from collections.abc import Iterator

import pytest

from kvgrpc.v1 import admin_pb2, pool_pb2
from kvgrpc.wire.values import duration
from tests.service.api import refused
from tests.service.engines import Engine
from tests.service.values import ids_of, seconds


@pytest.fixture
def made(source: Engine) -> Iterator[list[pool_pb2.AllocateBlocksResponse]]:
    """Yields three allocations, in their order: two for requests, and one without labels."""
    replies = [
        take(source, 2, request_id="chat-1", label="prefill of chat"),
        take(source, 1, request_id="chat-2", label="prefill of chat", ttl=duration(60)),
        take(source, 1),
    ]
    yield replies
    for reply in replies:
        source.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(allocation_id=reply.blocks.allocation_id))


def take(engine: Engine, count: int, **fields: object) -> pool_pb2.AllocateBlocksResponse:
    counts = [pool_pb2.GroupBlockCount(block_count=count)]
    return engine.api.pool.AllocateBlocks(
        pool_pb2.AllocateBlocksRequest(group_block_counts=counts, **fields)  # type: ignore[arg-type]
    )


def listed(engine: Engine, **filters: object) -> list[pool_pb2.Allocation]:
    request = pool_pb2.ListAllocationsRequest(**filters)  # type: ignore[arg-type]
    return list(engine.api.pool.ListAllocations(request).allocations)


def test_who_holds_blocks_is_listed_oldest_first_with_what_was_said_of_them(
    source: Engine, made: list[pool_pb2.AllocateBlocksResponse]
) -> None:
    found = listed(source)
    assert [row.allocation_id for row in found] == [reply.blocks.allocation_id for reply in made]
    expected = [("chat-1", "prefill of chat"), ("chat-2", "prefill of chat"), ("", "")]
    assert [(row.request_id, row.label) for row in found] == expected
    assert [ids_of(row.blocks) for row in found] == [ids_of(reply.blocks) for reply in made]
    assert {row.owner for row in found} == {"anonymous"}
    assert 0 < seconds(found[1].remaining) <= 60 < seconds(found[0].remaining)
    assert seconds(found[0].age) >= seconds(found[2].age) >= 0


def test_allocations_are_found_by_request_by_label_and_by_block(
    source: Engine, made: list[pool_pb2.AllocateBlocksResponse]
) -> None:
    first, second, third = ([reply.blocks.allocation_id] for reply in made)
    names = [[row.allocation_id for row in listed(source, **filters)] for filters in (
        {"request_id": "chat-2"}, {"label": "prefill of chat"}, {"label": "prefill of chat", "request_id": "chat-1"},
        {"block": ids_of(made[2].blocks)[0]}, {"request_id": "nobody"},
    )]  # fmt: skip
    assert names == [second, first + second, first, third, []]


def test_an_allocation_is_listed_with_what_is_left_of_it_and_no_more_when_all_is_free(source: Engine) -> None:
    taken = take(source, 2, label="half")
    kept, given = ids_of(taken.blocks)
    source.free([given])
    (row,) = listed(source, label="half")
    assert ids_of(row.blocks) == [kept]
    source.free([kept])
    assert listed(source, label="half") == []


def test_a_renewal_leaves_what_was_said(source: Engine) -> None:
    allocation_id = take(source, 1, request_id="chat-1", label="kept").blocks.allocation_id
    renewal = pool_pb2.AllocateBlocksRequest(allocation_id=allocation_id, ttl=duration(60), label="other")
    source.api.pool.AllocateBlocks(renewal)
    (row,) = listed(source, label="kept")
    assert (row.request_id, row.label) == ("chat-1", "kept")
    source.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(allocation_id=allocation_id))


def test_allocations_are_listed_page_by_page(source: Engine, made: list[pool_pb2.AllocateBlocksResponse]) -> None:
    names, token = list[str](), ""
    while token or not names:
        request = pool_pb2.ListAllocationsRequest(page_size=2, page_token=token)
        reply = source.api.pool.ListAllocations(request)
        assert len(reply.allocations) <= 2
        names += [row.allocation_id for row in reply.allocations]
        token = reply.next_page_token
    assert names == [one.blocks.allocation_id for one in made]


def test_who_asks_who_has_a_block_is_told_of_its_allocation_too(source: Engine) -> None:
    taken = take(source, 1, request_id="chat-1")
    (block,) = ids_of(taken.blocks)
    request = admin_pb2.ListPinsRequest(block=admin_pb2.BlockRef(block=block))
    reply = source.api.admin.ListPins(request)
    assert [row.allocation_id for row in reply.allocations] == [taken.blocks.allocation_id]
    assert not reply.pins
    assert not source.api.admin.ListPins(admin_pb2.ListPinsRequest()).allocations, "of one block only"
    source.free([block])
    assert not source.api.admin.ListPins(request).allocations


def test_a_block_that_does_not_exist_is_held_by_nobody(source: Engine) -> None:
    for filters in ({"block": 9999}, {"block": 0, "group": 9}):
        with refused(source.api, "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE"):
            listed(source, **filters)
