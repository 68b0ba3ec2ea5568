"""A lead whose two groups share a block space: no block is allocated, pinned or counted for both of them."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.state.engine_status import GroupLoad, engine_status
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE, SCHEDULER
from kvgrpc.errors import Exhausted, OutOfRange, Reason
from tests.core.nodes import (
    KEY,
    Lead,
    access_id,
    aliased,
    answer_of,
    claim,
    content,
    describe,
    grant,
    lists,
    refused,
    snapshot,
)
from tests.core.pairs import MODES, Pair, Writers

FIRM_S = Limits().firm_ttl_s
D = describe("d", 2, pool=aliased())


@pytest.fixture
def lead() -> Lead:
    """Makes a lead whose engine manages sixteen blocks."""
    made = Lead(describe("p", 1, pool=aliased()))
    made.admit(D)
    return made


@pytest.fixture
def managed() -> Lead:
    return Lead(describe("p", 1, pool=aliased(), pool_kind=PoolKind.SERVER_MANAGED))


def allocate(lead: Lead, full: int, window: int, principal: str = ENGINE, **fields: Any) -> Any:
    counts = ((0, full), (1, window))
    return lead.call(lambda c: events.AllocateBlocks(c, counts, **fields), principal)


def free(lead: Lead, *blocks: tuple[int, ...], allocation_id: str = "") -> Any:
    return lead.call(lambda c: events.FreeBlocks(c, lists(*blocks), allocation_id))


def unchanged(lead: Lead, reason: Reason, do: Callable[[], Any]) -> None:
    before = snapshot(lead.node)
    with refused(reason):
        do()
    assert snapshot(lead.node) == before


# ---- blocks that the server gives out


def test_an_allocation_for_several_groups_of_a_space_has_different_blocks(managed: Lead) -> None:
    first, second = allocate(managed, 3, 2), allocate(managed, 1, 4)
    assert [blocks.tolist() for blocks in first.blocks] == [[0, 1, 2], [3, 4]]
    assert [blocks.tolist() for blocks in second.blocks] == [[5], [6, 7, 8, 9]]
    assert managed.state.pool.allocator.free_count(0) == 6
    assert [blocks.tolist() for blocks in free(managed, (1,), (3, 4)).freed] == [[1], [3, 4]]
    assert [blocks.tolist() for blocks in allocate(managed, 0, 4).blocks] == [[], [10, 11, 12, 13]]


def test_an_allocation_is_bounded_by_its_space(managed: Lead) -> None:
    with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
        allocate(managed, 9, 8)
    allocate(managed, 5, 4)
    for counts in ((8, 0), (0, 8), (4, 4)):
        with refused(Reason.POOL_EXHAUSTED, Exhausted):
            allocate(managed, *counts)
    assert allocate(managed, 3, 4)


def test_only_blocks_of_the_group_that_they_were_allocated_for_are_freed_or_handed_over(managed: Lead) -> None:
    made = allocate(managed, 2, 2)
    for wrong in (((2,), ()), ((), (0,)), ((0, 2), (3,))):
        unchanged(managed, Reason.BLOCK_NOT_ALLOCATED, lambda wrong=wrong: free(managed, *wrong))  # type: ignore[misc]
        unchanged(
            managed,
            Reason.BLOCK_NOT_ALLOCATED,
            lambda wrong=wrong: free(managed, *wrong, allocation_id=made.allocation_id),  # type: ignore[misc]
        )
    unchanged(managed, Reason.BLOCK_NOT_ALLOCATED, lambda: managed.finish(32, (2, 3), (0, 1)))
    assert managed.finish(32, (0, 1), (2, 3))


def test_an_allocation_takes_back_blocks_of_whichever_group_of_its_space(managed: Lead) -> None:
    """The first lease has blocks of both groups; blocks that another allocation holds do not come free."""
    allocate(managed, 6, 4)
    managed.finish(96, range(6), (7, 8), content=content(96), key=b"1" * 16)
    free(managed, tuple(range(6)), (6, 7, 8))
    managed.tick(FIRM_S)
    with pytest.raises(Exhausted) as caught:
        allocate(managed, 2, 14, SCHEDULER, reclaim=True)
    assert caught.value.metadata == {"group": "1", "free_block_count": "5", "soft_block_count": "8"}
    taken = allocate(managed, 2, 13, SCHEDULER, reclaim=True)
    assert [len(blocks) for blocks in taken.blocks] == [2, 13]
    assert len({block for blocks in taken.blocks for block in blocks.tolist()} - {9}) == 15


# ---- lists of blocks


def test_a_block_in_two_groups_of_a_space_is_refused_wherever_blocks_are_listed(lead: Lead, managed: Lead) -> None:
    allocate(managed, 2, 2)
    twice = lists((0, 1), (1, 2))
    wrong = Reason.BLOCK_DUPLICATE
    unchanged(managed, wrong, lambda: free(managed, (0, 1), (2, 1)))
    unchanged(lead, wrong, lambda: lead.finish(32, blocks=twice))
    unchanged(lead, wrong, lambda: lead.finish(32, blocks=twice, waits_for=events.WaitsFor.REGISTRATION))
    unchanged(lead, wrong, lambda: lead.pull(grant(D), 32, (0, 1), (1, 2)))
    unchanged(lead, wrong, lambda: lead.call(lambda c: events.ReserveBlocks(c, KEY, twice, content(32))))
    made = lead.finish(32, (0, 1), (2, 3))
    lead.opened(D, AccessOpening(access_id(), made.token, claim(32)))
    rows = ((twice, None),)
    unchanged(lead, wrong, lambda: lead.call(lambda c: events.ChecksumBlocks(c, "d", 2, access_id(), rows), "peer"))


def test_a_pull_whose_source_lists_a_block_in_two_groups_of_its_space_moves_nothing(lead: Lead) -> None:
    pulled = lead.pull(grant(D), 32, (0, 1), (2, 3))
    lead.connect(D)
    lead.feed(events.AccessAnswered(access_id(), answer_of(D, 32, (4, 5), (5, 6))))
    assert not lead.seen(actions.Post)
    failure = lead.transfer(pulled.id).failure
    assert failure is not None
    assert "block 5 is listed twice" in failure.message


def pair_of(writers: Writers = frozenset()) -> Pair:
    return Pair(writers, p=describe("p", 1, pool=aliased()))


def test_no_part_of_a_push_lists_a_block_that_an_earlier_one_has_in_another_group() -> None:
    pair = pair_of()
    pair.register(pair.reserve(64, (8, 9, 10, 11), (12, 13)).token)
    pair.finish(64, (0, 1), (), last=False)
    for wrong in (((), (1, 4)), ((2, 3), (0,)), ((2, 3), (3,))):
        unchanged(pair.p, Reason.BLOCK_DUPLICATE, lambda wrong=wrong: pair.finish(64, *wrong, last=False))  # type: ignore[misc]
    pair.finish(64, (2, 3), (4, 5))
    pair.moved()
    pair.moved()
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED] * 2


def test_a_destination_believes_no_source_that_says_a_block_in_two_groups_of_its_space() -> None:
    pair = pair_of()
    pair.register(pair.reserve(64, (8, 9, 10, 11), (12, 13)).token)
    pair.finish(64, (0, 1), (), last=False)

    def ready(*blocks: tuple[int, ...]) -> None:
        row = events.ReadyPart(1, lists(*blocks), (), None, last=False)
        pair.call(pair.d, lambda c: events.PartsReady(c, "p", 1, access_id(10), (row,)), "peer")

    unchanged(pair.d, Reason.BLOCK_DUPLICATE, lambda: ready((), (1,)))
    unchanged(pair.d, Reason.BLOCK_DUPLICATE, lambda: ready((5,), (5,)))
    ready((2,), (5,))


# ---- pins


def test_a_block_that_is_pinned_as_of_one_group_is_not_pinned_as_of_another(lead: Lead) -> None:
    lead.finish(32, (0, 1), (2, 3))
    other = b"another request's"
    unchanged(lead, Reason.BLOCK_PINNED, lambda: lead.finish(32, (4, 2), (5, 6), key=other))
    unchanged(lead, Reason.BLOCK_PINNED, lambda: lead.finish(32, (4, 5), (0, 6), key=other))
    unchanged(lead, Reason.BLOCK_PINNED, lambda: lead.pull(grant(D), 32, (4, 3), (5, 6)))
    assert lead.finish(32, (0, 4), (2, 5), key=other), "prefix caching: the same blocks of the same group"
    pulled = lead.pull(grant(D), 32, (6, 7), (8, 9))
    unchanged(lead, Reason.BLOCK_PINNED, lambda: lead.finish(32, (8, 10), (11, 12), key=b"one request more"))
    lead.call(lambda c: events.CancelTransfer(c, pulled.id))
    assert lead.finish(32, (8, 10), (11, 12), key=b"one request more")


def test_what_is_free_for_one_group_is_what_is_free_in_its_space(lead: Lead) -> None:
    lead.finish(48, (0, 1, 2), (3, 4))
    assert engine_status(lead.state).groups == (GroupLoad(16, 11, 0),) * 2
    lead.tick(FIRM_S)
    assert engine_status(lead.state).groups == (GroupLoad(16, 11, 5),) * 2


def test_reclaiming_counts_blocks_of_all_groups_of_a_space(lead: Lead) -> None:
    leases = []
    for number, blocks in enumerate([((0, 1), (2, 3)), ((4, 5), (6, 7)), ((8, 9), (10, 11))]):
        leases.append(lead.finish(32, *blocks, key=bytes([number]) * 16).lease.id)
        lead.tick(0.1)
    (soon, *_), enough = reclaim(lead, 1).later, reclaim(lead, 1).enough
    assert (soon.block_counts, enough) == ((4, 4), False)
    lead.tick(FIRM_S)
    assert not reclaim(lead, 9, 4).enough
    answer = reclaim(lead, 4, 1)
    assert [row.lease_id for row in answer.leases] == leases[:2]
    assert [blocks.tolist() for blocks in answer.freed] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert lead.state.pool.pins.free == [12]


def reclaim(lead: Lead, full: int, window: int = 0) -> actions.Reclaimed:
    answer = lead.call(lambda c: events.ReclaimBlocks(c, ((0, full), (1, window))))
    assert isinstance(answer, actions.Reclaimed)
    return answer


def test_the_budget_of_quarantine_is_that_of_the_space() -> None:
    """Seven of sixteen blocks are not more than half of them; nine are."""
    lead = Lead(describe("d", 2, pool=aliased()), Limits(quarantine_share=0.5))
    source = describe("p", 1, pool=aliased())
    lead.admit(source)
    for number, (full, window) in enumerate([((0, 1, 2, 3, 4), (5, 6)), ((7,), (8,))], 1):
        tokens = 16 * len(full)
        pulled = lead.pull(grant(source, tokens=tokens), tokens, full, window, number=number)
        lead.connect(source)
        answer = answer_of(source, tokens, range(len(full)), range(8, 8 + len(window)))
        lead.feed(events.AccessAnswered(access_id(number), answer))
        (post,) = lead.seen(actions.Post)
        lead.feed(events.PostingEnded(post.posting_id, done=False, quiesced=False))
        assert lead.state.pool.pins.has(pulled.id, PinKind.QUARANTINE)
        assert bool(lead.state.pool.quarantine_full()) is (number == 2)
    assert lead.state.pool.pins.quarantined == [9]
    unchanged(lead, Reason.QUARANTINED, lambda: lead.finish(16, (14,), (15,)))


# ---- moves


@MODES
def test_a_push_fills_blocks_of_both_groups_part_by_part(writers: Writers) -> None:
    pair = pair_of(writers)
    pair.register(pair.reserve(64, (15, 14, 13, 12), (0, 1)).token)
    for full, window, last in (((3, 2), (), False), ((1,), (8,), False), ((7,), (9,), True)):
        pair.finish(64, full, window, last=last)
        pair.moved()
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED] * 2
    assert pair.d.state.pool.pins.free == [16]
    pair.d.state.pool.pins.check()
