"""AllocateBlocks and FreeBlocks, in a pool that the server manages."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE, SCHEDULER, STORE
from kvgrpc.errors import Exhausted, InvalidRequest, KVGrpcError, NotFound, OutOfRange, PreconditionFailed, Reason
from tests.core.nodes import Lead, describe, hybrid, lists, refused, snapshot


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1, pool=hybrid(), pool_kind=PoolKind.SERVER_MANAGED), Limits(blocks_per_request=70))


def allocate(lead: Lead, *counts: tuple[int, int], principal: str = ENGINE, **fields: Any) -> Any:
    return lead.call(lambda c: events.AllocateBlocks(c, counts, **fields), principal)


def free(lead: Lead, *groups: tuple[int, ...]) -> Any:
    return lead.call(lambda c: events.FreeBlocks(c, lists(*groups)))


def test_blocks_are_given_out_and_taken_back(lead: Lead) -> None:
    made = allocate(lead, (1, 2), (0, 3))
    assert [blocks.tolist() for blocks in made.blocks] == [[0, 1, 2], [0, 1]]
    assert made.remaining_s is None
    assert [blocks.tolist() for blocks in free(lead, (0, 2), (1,)).freed] == [[0, 2], [1]]
    assert lead.state.pool.allocator.allocated(0) == 1


def test_blocks_that_are_pinned_are_freed_at_the_last_unpin(lead: Lead) -> None:
    allocate(lead, (0, 2), (1, 1))
    made = lead.finish(32)
    assert [blocks.tolist() for blocks in free(lead, (0, 1), (0,)).freed] == [[], []]
    assert lead.state.pool.allocator.free_count(0) == 62
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(made.lease.id)))
    assert lead.state.pool.allocator.free_count(0) == 64


REFUSED: dict[str, tuple[dict[str, Any], Reason, type[KVGrpcError]]] = {
    "nothing": ({"counts": ()}, Reason.INVALID_FIELD, InvalidRequest),
    "no block": ({"counts": ((0, 0),)}, Reason.INVALID_FIELD, InvalidRequest),
    "less than none": ({"counts": ((0, 3), (1, -1))}, Reason.INVALID_FIELD, InvalidRequest),
    "an unknown group": ({"counts": ((2, 1),)}, Reason.GROUP_MISMATCH, InvalidRequest),
    "a negative group": ({"counts": ((-1, 1),)}, Reason.GROUP_MISMATCH, InvalidRequest),
    "a group twice": ({"counts": ((0, 1), (0, 1))}, Reason.GROUP_MISMATCH, InvalidRequest),
    "too many": ({"counts": ((0, 40), (1, 31))}, Reason.LIMIT_EXCEEDED, OutOfRange),
    "more than there ever are": ({"counts": ((1, 1), (0, 65))}, Reason.LIMIT_EXCEEDED, OutOfRange),
    "a ttl and no expiry": (
        {"counts": ((0, 1),), "ttl_s": 5.0, "no_expiry": True},
        Reason.INVALID_FIELD,
        InvalidRequest,
    ),
    "more than there are": ({"counts": ((0, 40),)}, Reason.POOL_EXHAUSTED, Exhausted),
    "for no time": ({"counts": ((0, 1),), "ttl_s": 0.0}, Reason.TTL_INVALID, InvalidRequest),
    "an unknown allocation": ({"counts": (), "allocation_id": "b-x"}, Reason.BLOCK_NOT_ALLOCATED, NotFound),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_allocation_changes_nothing(lead: Lead, name: str) -> None:
    fields, reason, kind = REFUSED[name]
    allocate(lead, (0, 30))
    before = snapshot(lead.node)
    with refused(reason, kind):
        lead.call(lambda c: events.AllocateBlocks(c, **fields))
    assert snapshot(lead.node) == before


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (((0, 30),), Reason.BLOCK_NOT_ALLOCATED),
        (((0, 64),), Reason.BLOCK_OUT_OF_RANGE),
        (((0, 0),), Reason.BLOCK_DUPLICATE),
        (((0,), (0,), (0,)), Reason.GROUP_MISMATCH),
    ],
)
def test_a_refused_freeing_changes_nothing(lead: Lead, groups: Any, reason: Reason) -> None:
    allocate(lead, (0, 30))
    before = snapshot(lead.node)
    with refused(reason):
        free(lead, *groups)
    assert snapshot(lead.node) == before


def test_an_engine_s_own_pool_is_not_ours_to_give_out() -> None:
    lead = Lead(describe("p", 1))
    with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
        allocate(lead, (0, 1))
    with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
        free(lead, (0,))


def test_an_allocation_with_a_ttl_ends_by_itself(lead: Lead) -> None:
    made = allocate(lead, (0, 2), ttl_s=5.0)
    assert made.remaining_s == 5.0
    lead.tick(4.9)
    assert lead.state.pool.allocator.known(made.allocation_id)
    lead.tick(0.1)
    assert lead.state.pool.allocator.free_count(0) == 64
    with refused(Reason.BLOCK_NOT_ALLOCATED, NotFound):
        allocate(lead, allocation_id=made.allocation_id)


def test_allocating_again_renews_and_never_shortens(lead: Lead) -> None:
    made = allocate(lead, (0, 2), ttl_s=5.0)
    lead.tick(4.0)
    again = allocate(lead, allocation_id=made.allocation_id, ttl_s=5.0)
    assert [blocks.tolist() for blocks in again.blocks] == [[0, 1], []]
    assert again.remaining_s == 5.0
    assert allocate(lead, allocation_id=made.allocation_id, ttl_s=1.0).remaining_s == 5.0
    assert allocate(lead, allocation_id=made.allocation_id).remaining_s == 5.0
    lead.tick(4.9)
    assert lead.state.pool.allocator.known(made.allocation_id)
    lead.tick(0.1)
    assert not lead.state.pool.allocator.known(made.allocation_id)


def test_the_ttl_of_what_was_freed_before_ends_nothing(lead: Lead) -> None:
    allocate(lead, (0, 2), ttl_s=5.0)
    free(lead, (0, 1))
    other = allocate(lead, (0, 2))
    lead.tick(5.0)
    assert lead.state.pool.allocator.known(other.allocation_id)


def test_allocations_that_are_not_freed_are_bounded_and_one_that_ends_makes_room() -> None:
    pool = describe("p", 1, pool=hybrid(), pool_kind=PoolKind.SERVER_MANAGED)
    lead = Lead(pool, Limits(allocations=3))
    made = [allocate(lead, (0, 2), ttl_s=5.0) for _ in range(3)]
    before = snapshot(lead.node)
    with pytest.raises(Exhausted) as caught:
        allocate(lead, (0, 1))
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    assert "FreeBlocks" in caught.value.message
    assert caught.value.retry_delay_s
    assert snapshot(lead.node) == before
    allocate(lead, allocation_id=made[0].allocation_id, ttl_s=9.0)  # renewal needs no room
    free(lead, (0,))  # the allocation still holds a block
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        allocate(lead, (0, 1))
    free(lead, (1,))
    allocate(lead, (0, 1))
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        allocate(lead, (0, 1))
    lead.tick(5.0)
    allocate(lead, (0, 1))


def test_nothing_is_kept_of_allocations_that_were_freed_before_their_ttl(lead: Lead) -> None:
    before = len(lead.state.timers)
    for _ in range(100):
        made = allocate(lead, (0, 2), (1, 1), ttl_s=600.0)
        free(lead, tuple(made.blocks[0]), tuple(made.blocks[1]))
    assert len(lead.state.timers) == before


def test_too_many_blocks_in_one_request_are_refused_wherever_they_are_listed(lead: Lead) -> None:
    with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
        free(lead, tuple(range(40)), tuple(range(40)))


def test_a_refusal_names_what_is_asked_for_and_what_there_is(lead: Lead) -> None:
    with pytest.raises(OutOfRange) as caught:
        allocate(lead, (1, 1), (0, 65))
    assert caught.value.metadata == {"group": "0", "block_count": "64"}
    assert [violation.field for violation in caught.value.violations] == ["group_block_counts[1]"]
    assert caught.value.retry_delay_s is None
    allocate(lead, (0, 60))
    with pytest.raises(Exhausted) as full:
        allocate(lead, (1, 1), (0, 6))
    assert full.value.metadata == {"group": "0", "free_block_count": "4"}
    assert full.value.retry_delay_s
    with pytest.raises(OutOfRange) as many:
        allocate(lead, (0, 40), (1, 31))
    assert many.value.metadata == {"limit": "70"}


# -- how long it lasts


def test_an_allocation_that_states_no_ttl_has_the_default_one(lead: Lead) -> None:
    made = allocate(lead, (0, 2), principal=SCHEDULER)
    assert made.remaining_s == Limits().allocation_ttl_s == 600.0
    lead.tick(599.0)
    assert allocate(lead, allocation_id=made.allocation_id, principal=SCHEDULER).remaining_s == 600.0
    lead.tick(600.0)
    assert not lead.state.pool.allocator.known(made.allocation_id)


def test_an_allocation_of_the_engine_s_session_ends_with_the_session_unless_it_states_a_ttl(lead: Lead) -> None:
    assert allocate(lead, (0, 2)).remaining_s is None
    assert allocate(lead, (0, 2), ttl_s=7.0).remaining_s == 7.0


def test_an_allocation_without_expiry_never_ends_by_itself(lead: Lead) -> None:
    made = allocate(lead, (0, 2), no_expiry=True, principal=SCHEDULER)
    assert made.remaining_s is None
    assert allocate(lead, allocation_id=made.allocation_id, ttl_s=5.0, principal=SCHEDULER).remaining_s is None
    assert allocate(lead, allocation_id=made.allocation_id, principal=SCHEDULER).remaining_s is None
    lead.tick(10_000.0)
    assert lead.state.pool.allocator.known(made.allocation_id)


def test_an_expiry_can_be_taken_away(lead: Lead) -> None:
    made = allocate(lead, (0, 2), ttl_s=5.0)
    assert allocate(lead, allocation_id=made.allocation_id, no_expiry=True).remaining_s is None
    lead.tick(10_000.0)
    assert lead.state.pool.allocator.known(made.allocation_id)


def test_an_allocation_that_is_renewed_gets_no_blocks(lead: Lead) -> None:
    made = allocate(lead, (0, 2))
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        allocate(lead, (0, 1), allocation_id=made.allocation_id)


def test_asking_only_whether_blocks_can_be_had_takes_none(lead: Lead) -> None:
    made = allocate(lead, (0, 2), ttl_s=5.0)
    before = snapshot(lead.node)
    found = allocate(lead, (0, 3), ttl_s=9.0, validate_only=True)
    assert (found.allocation_id, found.blocks, found.remaining_s) == ("", (), 9.0)
    found = allocate(lead, allocation_id=made.allocation_id, ttl_s=9.0, validate_only=True)
    assert (found.allocation_id, found.blocks, found.remaining_s) == ("", (), 9.0)
    with refused(Reason.POOL_EXHAUSTED, Exhausted):
        allocate(lead, (0, 63), validate_only=True)
    assert snapshot(lead.node) == before


# -- freeing by allocation


def test_an_allocation_is_freed_by_its_id(lead: Lead) -> None:
    made = allocate(lead, (0, 3), (1, 2), ttl_s=5.0)
    allocate(lead, (0, 3))
    free(lead, (1,))
    freed = lead.call(lambda c: events.FreeBlocks(c, allocation_id=made.allocation_id))
    assert [blocks.tolist() for blocks in freed.freed] == [[0, 2], [0, 1]]
    assert (lead.state.pool.allocator.allocated(0), lead.state.pool.allocator.allocated(1)) == (3, 0)
    with refused(Reason.BLOCK_NOT_ALLOCATED, NotFound):
        lead.call(lambda c: events.FreeBlocks(c, allocation_id=made.allocation_id))


def test_no_more_is_freed_than_the_blocks_that_are_listed_of_an_allocation(lead: Lead) -> None:
    made = allocate(lead, (0, 3))
    lead.call(lambda c: events.FreeBlocks(c, lists((0,)), made.allocation_id))
    lead.call(lambda c: events.FreeBlocks(c, lists(()), made.allocation_id))
    assert lead.state.pool.allocator.allocated(0) == 2


def test_asking_only_what_would_come_free_frees_nothing(lead: Lead) -> None:
    made = allocate(lead, (0, 4), (1, 1))
    lead.finish(32, (0, 1), (0,))
    before = snapshot(lead.node)
    whole = lead.call(lambda c: events.FreeBlocks(c, allocation_id=made.allocation_id, validate_only=True))
    assert [blocks.tolist() for blocks in whole.freed] == [[2, 3], []]
    some = lead.call(lambda c: events.FreeBlocks(c, lists((1, 2)), validate_only=True))
    assert [blocks.tolist() for blocks in some.freed] == [[2], []]
    with refused(Reason.BLOCK_NOT_ALLOCATED):
        lead.call(lambda c: events.FreeBlocks(c, lists((9,)), validate_only=True))
    assert snapshot(lead.node) == before


# -- whose it is


@pytest.mark.parametrize("principal", ["router", "anonymous"])
def test_what_one_caller_allocated_no_other_one_uses(lead: Lead, principal: str) -> None:
    made = allocate(lead, (0, 2))
    before = snapshot(lead.node)
    with refused(Reason.BLOCK_NOT_ALLOCATED):
        lead.call(lambda c: events.FreeBlocks(c, allocation_id=made.allocation_id), principal)
    with refused(Reason.BLOCK_NOT_ALLOCATED):
        lead.call(lambda c: events.FreeBlocks(c, lists((0, 1))), principal)
    with refused(Reason.BLOCK_NOT_ALLOCATED):
        lead.call(lambda c: events.GiveAllocation(c, made.allocation_id, principal), principal)
    assert snapshot(lead.node) == before


def test_an_allocation_that_was_given_away_is_its_new_owners(lead: Lead) -> None:
    made = allocate(lead, (0, 2))
    given = lead.call(lambda c: events.GiveAllocation(c, made.allocation_id, STORE))
    assert [ids.tolist() for ids in given.blocks] == [ids.tolist() for ids in made.blocks]
    with refused(Reason.BLOCK_NOT_ALLOCATED):
        lead.call(lambda c: events.FreeBlocks(c, allocation_id=made.allocation_id))
    lead.call(lambda c: events.FreeBlocks(c, allocation_id=made.allocation_id), STORE)
    assert not lead.state.pool.allocator.known(made.allocation_id)
