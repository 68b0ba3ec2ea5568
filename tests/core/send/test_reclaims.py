"""ReclaimBlocks ends the oldest soft leases, no more than needed, or none; their readers learn it."""

from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.events import LeaseRef, ReclaimBlocks, ReleaseLease
from kvgrpc.core.send.reclaims import LATER_MAX
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import (
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    NextStep,
    OutOfRange,
    PreconditionFailed,
    Reason,
)
from tests.core.nodes import KEY, Lead, access_id, claim, describe, full, hybrid, lists, refused, snapshot
from tests.core.pairs import MODES, Pair, Writers

D = describe("d", 2)
FIRM_S = Limits().firm_ttl_s


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("p", 1, pool=full(blocks=16)))
    made.admit(D)
    return made


def hand_over(lead: Lead, number: int, *blocks: int, **fields: Any) -> Any:
    return lead.finish(16 * len(blocks), blocks, key=number.to_bytes(16, "big"), **fields)


def soft(lead: Lead, *rows: tuple[int, ...]) -> list[Any]:
    """Hands over these blocks, oldest first, and waits until their leases are soft."""
    made = []
    for number, blocks in enumerate(rows, 1):
        made.append(hand_over(lead, number, *blocks))
        lead.tick(0.1)
    lead.tick(FIRM_S)
    return made


def reclaim(lead: Lead, count: int, principal: str = ENGINE, **fields: Any) -> actions.Reclaimed:
    answer = lead.call(lambda c: ReclaimBlocks(c, ((0, count),), **fields), principal)
    assert isinstance(answer, actions.Reclaimed)
    return answer


def ended(answer: actions.Reclaimed) -> list[str]:
    return [row.lease_id for row in answer.leases]


def test_the_oldest_soft_leases_end_until_there_is_enough(lead: Lead) -> None:
    first, second, third = soft(lead, (0, 1), (2, 3), (4, 5))
    answer = reclaim(lead, 3)
    assert answer.enough
    assert ended(answer) == [first.lease.id, second.lease.id]
    assert answer.lease_count == 2
    assert answer.freed[0].tolist() == [0, 1, 2, 3]
    assert lead.state.pool.pins.free == [14]
    assert lead.state.send.leases.get(third.lease.id).live
    assert lead.state.send.soft_leases.reclaimed == 2


def test_older_ones_are_spared_that_a_younger_one_makes_needless(lead: Lead) -> None:
    made = soft(lead, (0,), (1,), (2, 3, 4))
    assert ended(reclaim(lead, 3)) == [made[2].lease.id]


def test_leases_that_share_blocks_end_together(lead: Lead) -> None:
    first, second = soft(lead, (0, 1), (0, 1))
    answer = reclaim(lead, 2)
    assert ended(answer) == [first.lease.id, second.lease.id]
    assert answer.freed[0].tolist() == [0, 1]


def test_where_there_is_not_enough_none_ends(lead: Lead) -> None:
    soft(lead, (0, 1), (2, 3))
    before = snapshot(lead.state.pool.pins), len(lead.state.send.leases)
    answer = reclaim(lead, 5)
    assert (answer.enough, answer.leases, answer.lease_count) == (False, (), 0)
    assert answer.freed == ()
    assert (snapshot(lead.state.pool.pins), len(lead.state.send.leases)) == before


def test_a_block_that_another_lease_holds_does_not_count(lead: Lead) -> None:
    soft(lead, (0, 1))
    hand_over(lead, 9, 1, 2)
    assert not reclaim(lead, 2).enough
    assert reclaim(lead, 1).freed[0].tolist() == [0]


def test_the_answer_says_what_will_be_soft_and_when(lead: Lead) -> None:
    soft(lead, (0, 1))
    hand_over(lead, 8, 2, 3, 4)
    lead.tick(1.0)
    hand_over(lead, 9, 5, firm_ttl_s=1.0)
    answer = reclaim(lead, 3)
    assert [(row.in_s, row.block_counts) for row in answer.later] == [(1.0, (1,)), (FIRM_S - 1.0, (3,))]


def test_of_many_that_will_be_soft_the_next_ones_are_named(lead: Lead) -> None:
    for number in range(LATER_MAX + 4):
        hand_over(lead, number + 1, number % 16)
    assert len(reclaim(lead, 1).later) == LATER_MAX


def test_a_firm_and_a_claimed_lease_are_never_reclaimed(lead: Lead) -> None:
    claimed = hand_over(lead, 1, 0, 1)
    lead.opened(D, AccessOpening(access_id(), claimed.token, claim(32)))
    lead.tick(FIRM_S)
    firm = hand_over(lead, 2, 2, 3)
    lead.tick(FIRM_S - 0.01)
    assert not reclaim(lead, 1).enough
    assert lead.state.send.leases.get(claimed.lease.id).live
    assert lead.state.send.leases.get(firm.lease.id).live


def test_a_lease_that_becomes_soft_this_moment_is_soft(lead: Lead) -> None:
    hand_over(lead, 1, 0, 1)
    lead.now += FIRM_S
    assert reclaim(lead, 2).enough


def test_the_send_fails_and_the_blocks_are_back_at_once(lead: Lead) -> None:
    (made,) = soft(lead, (0, 1))
    reclaim(lead, 1)
    transfer = lead.transfer(made.transfer.id)
    assert (transfer.state, transfer.memory) == (State.FAILED, Disposition.RETURNED)
    assert transfer.failure is not None
    assert (transfer.failure.reason, transfer.failure.next) == (Reason.LEASE_RECLAIMED, NextStep.RECOMPUTE)
    assert [type(news) for news in lead.news()] == [actions.FailedNews, actions.BlocksReturnedNews]
    assert lead.state.send.leases.get(made.lease.id).state is LeaseState.RECLAIMED


def test_a_reader_that_comes_later_learns_it_and_counts_once(lead: Lead) -> None:
    (made,) = soft(lead, (0, 1))
    reclaim(lead, 1)
    assert lead.state.send.soft_leases.reclaimed_in_vain == 0
    for number in (1, 2):
        (row,) = lead.opened(D, AccessOpening(access_id(number), made.token, claim(32)))
        assert isinstance(row, PreconditionFailed)
        assert row.reason is Reason.LEASE_RECLAIMED
    assert lead.state.send.soft_leases.reclaimed_in_vain == 1


def test_a_renewal_that_comes_later_learns_it(lead: Lead) -> None:
    (made,) = soft(lead, (0, 1))
    reclaim(lead, 1)
    answer = lead.call(lambda c: events.RenewLeases(c, (LeaseRef(made.lease.id),)))
    assert answer.rows == ((0.0, Reason.LEASE_RECLAIMED, LeaseState.RECLAIMED),)


def test_a_release_that_comes_later_changes_nothing(lead: Lead) -> None:
    (made,) = soft(lead, (0, 1))
    reclaim(lead, 1)
    assert lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id))).lease.state is LeaseState.RECLAIMED


def test_a_lease_without_a_transfer_is_reclaimed_too(lead: Lead) -> None:
    made = hand_over(lead, 1, 0, 1, transfer=False, firm_ttl_s=0.0)
    answer = reclaim(lead, 2)
    assert answer.leases == (actions.ReclaimedLease(made.lease.id, "", ""),)
    assert [type(news) for news in lead.news()] == [actions.BlocksReturnedNews]


def test_validate_only_says_what_would_end_and_ends_nothing(lead: Lead) -> None:
    (made,) = soft(lead, (0, 1))
    before = snapshot(lead.state.pool.pins)
    answer = reclaim(lead, 1, validate_only=True)
    assert (answer.enough, ended(answer), answer.freed[0].tolist()) == (True, [made.lease.id], [0, 1])
    assert snapshot(lead.state.pool.pins) == before
    assert lead.state.send.leases.get(made.lease.id).live


REFUSED: dict[str, tuple[tuple[tuple[int, int], ...], Reason, type[KVGrpcError]]] = {
    "nothing": ((), Reason.INVALID_FIELD, InvalidRequest),
    "no block": (((0, 0),), Reason.INVALID_FIELD, InvalidRequest),
    "an unknown group": (((1, 1),), Reason.GROUP_MISMATCH, InvalidRequest),
    "more than there are": (((0, 17),), Reason.LIMIT_EXCEEDED, OutOfRange),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_counts_are_refused(lead: Lead, name: str) -> None:
    counts, reason, kind = REFUSED[name]
    soft(lead, (0, 1))
    before = snapshot(lead.state.pool.pins)
    with refused(reason, kind):
        lead.call(lambda c: ReclaimBlocks(c, counts))
    assert snapshot(lead.state.pool.pins) == before


def test_only_the_engine_takes_back_blocks_that_it_manages(lead: Lead) -> None:
    soft(lead, (0, 1))
    with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
        reclaim(lead, 1, principal="router")


def test_each_group_gets_what_it_needs() -> None:
    lead = Lead(describe("p", 1, pool=hybrid(blocks=16)))
    first = lead.finish(64, (0, 1, 2, 3), (0, 1), key=b"1" * 16)
    second = lead.finish(32, (4, 5), (2,), key=b"2" * 16)
    lead.tick(FIRM_S)
    answer = lead.call(lambda c: ReclaimBlocks(c, ((0, 1), (1, 3))))
    assert ended(answer) == [first.lease.id, second.lease.id]
    assert [ids.tolist() for ids in answer.freed] == [[0, 1, 2, 3, 4, 5], [0, 1, 2]]


# ---- pushes


def test_a_push_that_nobody_registered_for_is_reclaimed_and_a_late_destination_learns_it() -> None:
    pair = Pair()
    made = pair.finish(32, (1, 2))
    pair.tick(FIRM_S)
    answer = pair.call(pair.p, lambda c: ReclaimBlocks(c, ((0, 2),)))
    assert ended(answer) == [made.lease.id]
    with refused(Reason.LEASE_RECLAIMED, PreconditionFailed):
        pair.register(pair.reserve(32, (3, 4)).token)
    assert pair.p.state.send.soft_leases.reclaimed_in_vain == 1


def test_a_registration_under_a_cancelled_key_has_missed_nothing() -> None:
    pair = Pair()
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.call(pair.p, lambda c: events.CancelTransfer(c, key=KEY))
    with refused(Reason.CANCELLED, PreconditionFailed):
        pair.register(pair.reserve(32, (8, 9), at=pair.e).token, number=40)
    assert pair.p.state.send.soft_leases.reclaimed_in_vain == 0


@MODES
def test_the_blocks_of_a_push_are_not_reclaimed_while_its_destination_may_be_served(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    pair.tick(FIRM_S + 1)
    assert not pair.call(pair.p, lambda c: ReclaimBlocks(c, ((0, 1),))).enough


def test_what_our_own_posting_still_reads_is_not_reclaimed() -> None:
    pair = Pair(frozenset({"loopback"}))
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    ((_, post),) = pair.posts
    first, scope = next(iter(pair.d.state.transfers)).id, events.CancelScope.THIS_SIDE
    pair.call(pair.d, lambda c: events.CancelTransfer(c, first, scope=scope))
    pair.tick(FIRM_S + 1)
    assert not pair.call(pair.p, lambda c: ReclaimBlocks(c, ((0, 1),))).enough
    assert post.posting_id
    pair.moved()
    pair.tick(FIRM_S)
    assert pair.call(pair.p, lambda c: ReclaimBlocks(c, ((0, 1),))).enough


# ---- AllocateBlocks that may reclaim


@pytest.fixture
def managed() -> Lead:
    """Makes a pool of eight blocks: a soft lease alone holds the first four, an allocation the next two."""
    lead = Lead(describe("p", 1, pool=full(blocks=8), pool_kind=PoolKind.SERVER_MANAGED))
    allocate(lead, 4)
    lead.finish(64, (0, 1, 2, 3))
    lead.call(lambda c: events.FreeBlocks(c, lists((0, 1, 2, 3))))
    lead.tick(FIRM_S)
    allocate(lead, 2)
    return lead


def allocate(lead: Lead, count: int, **fields: Any) -> actions.Allocated:
    answer = lead.call(lambda c: events.AllocateBlocks(c, ((0, count),), **fields))
    assert isinstance(answer, actions.Allocated)
    return answer


def test_an_allocation_takes_back_what_it_needs(managed: Lead) -> None:
    assert allocate(managed, 5, reclaim=True).blocks[0].tolist() == [0, 1, 2, 3, 6]
    assert managed.state.send.soft_leases.reclaimed == 1


def test_an_allocation_that_finds_free_blocks_takes_nothing_back(managed: Lead) -> None:
    assert allocate(managed, 2, reclaim=True).blocks[0].tolist() == [6, 7]
    assert managed.state.send.soft_leases.reclaimed == 0


def test_an_allocation_that_was_not_told_to_takes_nothing_back(managed: Lead) -> None:
    with refused(Reason.POOL_EXHAUSTED, Exhausted):
        allocate(managed, 3)


def test_an_allocation_for_which_there_is_not_enough_takes_nothing_back(managed: Lead) -> None:
    before = snapshot(managed.state.pool.pins)
    with pytest.raises(Exhausted) as caught:
        allocate(managed, 7, reclaim=True)
    assert caught.value.metadata == {"group": "0", "free_block_count": "2", "soft_block_count": "4"}
    assert snapshot(managed.state.pool.pins) == before


def test_an_allocation_is_told_when_there_may_be_enough(managed: Lead) -> None:
    managed.finish(32, (4, 5), key=b"2" * 16)
    managed.call(lambda c: events.FreeBlocks(c, lists((4, 5))))
    managed.tick(1.0)
    with pytest.raises(Exhausted) as caught:
        allocate(managed, 8, reclaim=True)
    assert caught.value.retry_delay_s == FIRM_S - 1.0
    managed.tick(FIRM_S - 1.0)
    assert len(allocate(managed, 8, reclaim=True).blocks[0]) == 8


def test_an_allocation_is_told_when_the_last_of_several_leases_is_soft(managed: Lead) -> None:
    for number, block in enumerate((4, 5)):
        managed.finish(16, (block,), key=bytes([number]) * 16, firm_ttl_s=1.0 + number)
    managed.call(lambda c: events.FreeBlocks(c, lists((4, 5))))
    with pytest.raises(Exhausted) as caught:
        allocate(managed, 8, reclaim=True)
    assert caught.value.retry_delay_s == 2.0


def test_an_allocation_that_is_only_validated_takes_nothing_back(managed: Lead) -> None:
    before = snapshot(managed.state.pool.pins)
    assert allocate(managed, 5, reclaim=True, validate_only=True).allocation_id == ""
    assert snapshot(managed.state.pool.pins) == before


def test_blocks_that_an_allocation_holds_do_not_come_free_with_their_lease(managed: Lead) -> None:
    managed.finish(32, (4, 5), key=b"2" * 16, firm_ttl_s=0.0)
    with refused(Reason.POOL_EXHAUSTED, Exhausted):
        allocate(managed, 7, reclaim=True)
    assert managed.state.send.soft_leases.reclaimed == 0


def test_no_other_caller_takes_back_what_an_engine_handed_over(managed: Lead) -> None:
    assert not reclaim(managed, 4, principal="router").enough
    with refused(Reason.POOL_EXHAUSTED, Exhausted):
        managed.call(lambda c: events.AllocateBlocks(c, ((0, 5),), reclaim=True), "router")
    assert managed.state.send.soft_leases.reclaimed == 0


def test_of_a_pool_without_an_engine_a_caller_takes_back_what_it_handed_over() -> None:
    described = describe("p", 1, pool=full(blocks=8), pool_kind=PoolKind.SERVER_MANAGED)
    lead = Lead(described)
    lead.begin(described, attached=False)
    allocate(lead, 4)
    lead.finish(64, (0, 1, 2, 3))
    lead.call(lambda c: events.FreeBlocks(c, lists((0, 1, 2, 3))))
    lead.tick(FIRM_S)
    assert not reclaim(lead, 4, principal="router").enough
    assert reclaim(lead, 4).enough


def test_an_engine_gets_back_what_it_has_allocated_itself(managed: Lead) -> None:
    managed.finish(32, (4, 5), key=b"2" * 16, firm_ttl_s=0.0)
    answer = reclaim(managed, 6)
    assert answer.enough
    assert answer.freed[0].tolist() == [0, 1, 2, 3, 4, 5]
