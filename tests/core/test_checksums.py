"""Checksums of blocks: planned, asked for, given, and compared before a round is settled."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core import actions, chunks, events, move_steps
from kvgrpc.core import sums as core_sums
from kvgrpc.core.accesses import Opening, Verdict
from kvgrpc.core.chunks import Chunk, Size, Sizes, batches, pieces_of, place_of, plan_chunks, slices_of
from kvgrpc.core.layout import PoolLayout, Region, uniform_layout
from kvgrpc.core.limits import Limits
from kvgrpc.core.node import Node
from kvgrpc.core.transfers import Disposition, State
from kvgrpc.errors import Exhausted, PreconditionFailed, Reason
from tests.core.nodes import (
    Lead,
    access_id,
    answer_of,
    claim,
    describe,
    full,
    grant,
    hybrid,
    ids,
    key_of,
    lists,
    refused,
)
from tests.core.pairs import WRITING, Pair

UNAVAILABLE = Exhausted(Reason.LIMIT_EXCEEDED, "busy", retry_delay_s=0.1)


def sums(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


# ---- what is summed up


def test_a_sum_is_over_the_regions_of_a_block_in_their_order_and_of_those_layers_only() -> None:
    pool = uniform_layout(full(8, layers=3).groups[0], 8)
    regions = pool.regions
    found = pieces_of(pool, [((ids(5, 2),), None), ((ids(1),), (1, 1))])
    assert found.counts.tolist() == [len(regions)] * 2 + [1]
    assert found.offsets.tolist() == [r.offset + block * r.stride_bytes for block in (5, 2) for r in regions] + [
        regions[1].offset + regions[1].stride_bytes
    ]
    assert found.nbytes.tolist() == [regions[0].block_bytes] * (2 * len(regions) + 1)


def test_nothing_is_summed_of_groups_without_blocks_or_without_those_layers() -> None:
    pool = hybrid()
    found = pieces_of(pool, [((ids(), ids(3)), None), ((ids(), ids()), None)])
    assert found.counts.tolist() == [1]
    assert not len(pieces_of(pool, []).counts)


def test_a_difference_is_named_by_its_block_at_both_sides() -> None:
    pool = full(8, layers=3)
    chunks = [Chunk((ids(5, 2),), (ids(0, 1),), None), Chunk((ids(7),), (ids(4),), (1, 2))]
    assert place_of(pool, chunks, 1) == "block 2 of group 0, received into block 1"
    assert place_of(pool, chunks, 2) == "block 7 of group 0, layers 1 +2, received into block 4"
    two = hybrid()
    late = [Chunk((ids(1), ids(2)), (ids(3), ids(4)), None)]
    assert place_of(two, late, 1) == "block 2 of group 1, received into block 4"


def test_groups_without_those_layers_count_for_nothing() -> None:
    pool = PoolLayout(
        (*full(8, layers=3).groups, replace(full(8, layers=1).groups[0], name="shallow")),
        (*full(8, layers=3).regions, Region(1, 0, 1, 192, 8, 8)),
        256,
    )
    deep = Chunk((ids(5), ids(6)), (ids(0), ids(1)), (1, 2))
    other = Chunk((ids(7), ids()), (ids(2), ids()), None)
    assert len(pieces_of(pool, [(deep.source, deep.layers)]).counts) == 1
    assert place_of(pool, [deep, other], 1) == "block 7 of group 0, received into block 2"
    slices = slices_of([deep, other], Sizes(pool), Size(1, 9, 9))
    assert [len(plan_chunks([part], pool, pool)) for part in slices] == [2, 3]
    assert Sizes(pool).of([deep, other]) == Size(8 * 5, 3, 5)


def test_a_source_is_asked_for_so_many_blocks_at_once_in_their_order() -> None:
    sizes, most = Sizes(full(8)), Size(999, 999, 999)
    chunks = [Chunk((ids(5, 2, 7),), (ids(0, 1, 4),), None), Chunk((ids(6),), (ids(3),), (0, 2))]
    parts = slices_of(chunks, sizes, most._replace(nbytes=1))
    assert [part.source[0].tolist() for part in parts] == [[5], [2], [7], [6]]
    asked = batches(parts, sizes, most._replace(blocks=2))
    assert [[part.source[0].tolist() for part in some] for some in asked] == [[[5], [2]], [[7], [6]]]
    assert [len(some) for some in batches(parts, sizes, most._replace(blocks=1))] == [1, 1, 1, 1]


def test_what_is_planned_at_once_has_so_many_bytes_blocks_and_runs() -> None:
    """Each block has 8 bytes in each of two layers."""
    sizes, most = Sizes(full(8)), Size(999, 999, 999)
    chunks = [Chunk((ids(5, 2, 7),), (ids(0, 1, 4),), None)]
    for least in (most._replace(nbytes=47), most._replace(blocks=2), most._replace(runs=5)):
        parts = slices_of(chunks, sizes, least)
        assert [part.source[0].tolist() for part in parts] == [[5, 2], [7]]
        assert [len(some) for some in batches(parts, sizes, least)] == [1, 1]
        assert [len(some) for some in batches(parts, sizes, most)] == [2]


# ---- at the source


class Source(Lead):
    """A lead of which a peer reads blocks 8 and 9."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(describe("p", 1, world_size=ranks))
        self.peer = describe("d", 2, world_size=ranks)
        self.admit(self.peer)
        self.handed = self.finish(32, (8, 9))
        self.opened(self.peer, Opening(access_id(), self.handed.token, claim(32)))

    def ask_sums(self, *blocks: int, number: int = 1, layers: Any = None, peer: Any = None) -> int:
        who = peer or self.peer
        rows = ((lists(blocks), layers),)
        return self.ask(
            lambda c: events.ChecksumBlocks(c, who.engine_id, who.incarnation, access_id(number), rows), "peer"
        )


def test_a_peer_gets_the_sums_of_every_rank_in_their_order() -> None:
    lead = Source(ranks=2)
    call = lead.ask_sums(9, 8)
    asked = lead.seen(actions.Sum)
    assert [action.rank for action in asked] == [0, 1]
    assert asked[0].pieces.counts.tolist() == [2, 2]
    lead.feed(events.Summed(1, asked[0].name, sums(3, 4)))
    assert lead.answer(call) is None
    lead.feed(events.Summed(0, asked[0].name, sums(1, 2)))
    assert lead.answer(call) == actions.Checksums((sums(1, 2), sums(3, 4)))
    lead.feed(events.Summed(0, asked[0].name, sums(1, 2)))


def test_only_blocks_of_a_valid_access_of_ones_own_are_summed_up() -> None:
    lead = Source()
    stranger = describe("e", 3)
    lead.admit(stranger)
    for call, reason in (
        (lead.ask_sums(8, number=7), Reason.ACCESS_NOT_FOUND),
        (lead.ask_sums(8, peer=stranger), Reason.ACCESS_NOT_FOUND),
        (lead.ask_sums(8, 10), Reason.NOT_OWNER),
        (lead.ask_sums(64), Reason.BLOCK_OUT_OF_RANGE),
    ):
        with refused(reason):
            lead.answer(call)
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(lead.handed.lease.id)))
    with refused(Reason.LEASE_RELEASED):
        lead.answer(lead.ask_sums(8))
    lead.close(lead.peer)
    with refused(Reason.LEASE_RELEASED):
        lead.answer(lead.ask_sums(8))


def test_a_rank_that_cannot_sum_up_or_takes_too_long_fails_the_call() -> None:
    lead = Source()
    call = lead.ask_sums(8)
    lead.feed(events.Summed(0, lead.one(actions.Sum).name, b"", "no library"))
    with refused(Reason.DATA_PATH_FAILED):
        lead.answer(call)
    late = lead.ask_sums(8)
    lead.call(lambda c: events.RenewLeases(c, (events.LeaseRef(lead.handed.lease.id),), 60.0))
    lead.tick(30.0)
    with refused(Reason.DEADLINE):
        lead.answer(late)


@pytest.mark.parametrize("bound", ["WAITING_MAX", "WAITING_OF_PEER_MAX", "WAITING_OF_ACCESS_MAX"])
def test_calls_that_wait_for_sums_are_bounded_and_end_with_the_life(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(core_sums, bound, 3)
    lead = Source()
    calls = [lead.ask_sums(8) for _ in range(3)]
    with refused(Reason.LIMIT_EXCEEDED):
        lead.answer(lead.ask_sums(8))
    lead.begin(describe("p", 5))
    for call in calls:
        with refused(Reason.ENGINE_LOST):
            lead.answer(call)


@pytest.mark.parametrize(
    ("rows", "fine"),
    [
        ([((8, 9), None), ((9,), None)], False),
        ([((8, 9), (0, 2)), ((9, 8), (1, 1))], False),
        ([((8,), (1, 1)), ((9,), None), ((8,), (0, 1))], True),
        ([((8,), (0, 1)), ((8,), None)], False),
        ([((8, 9), (1, 1)), ((8, 9), (0, 1))], True),
    ],
)
def test_nothing_is_summed_up_twice_in_one_call(rows: Any, fine: bool) -> None:
    lead = Source()
    asked = tuple((lists(blocks), layers) for blocks, layers in rows)
    call = lead.ask(lambda c: events.ChecksumBlocks(c, "d", 2, access_id(), asked), "peer")
    if fine:
        assert lead.one(actions.Sum)
        return
    with refused(Reason.BLOCK_DUPLICATE):
        lead.answer(call)
    assert not lead.seen(actions.Sum)


def in_portions(monkeypatch: pytest.MonkeyPatch, running: int = 1) -> None:
    """A block a portion, so many at once."""
    monkeypatch.setattr(chunks, "PORTION_BYTES", 1)
    monkeypatch.setattr(core_sums, "RUNNING_MAX", running)


def test_the_ranks_get_what_one_call_asks_for_portion_by_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    in_portions(monkeypatch, running=4)
    lead = Source(ranks=2)
    call = lead.ask_sums(9, 8)
    names = set()
    for values in ((1, 3), (2, 4)):
        asked = lead.seen(actions.Sum)
        assert [(action.rank, len(action.pieces.counts)) for action in asked] == [(0, 1), (1, 1)]
        names.add(asked[0].name)
        for rank, value in enumerate(values):
            lead.feed(events.Summed(rank, asked[0].name, sums(value)))
    assert len(names) == 2
    assert lead.answer(call) == actions.Checksums((sums(1, 2), sums(3, 4)))


def test_no_blocks_have_no_sums_and_cost_the_ranks_nothing() -> None:
    lead = Source(ranks=2)
    assert lead.answer(lead.ask_sums()) == actions.Checksums((b"", b""))
    assert not lead.seen(actions.Sum)


def portions(*blocks: tuple[int, ...]) -> list[list[list[int]]]:
    wanted = [((ids(*some),), None) for some in blocks]
    return [[rows[0].tolist() for rows, _ in some] for some in chunks.portions_of(full(64), wanted)]


def test_portions_are_of_whole_blocks_and_bounded_in_bytes_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the blocks has a piece in each of its two layers, and a piece counts for 1 KB at least."""
    monkeypatch.setattr(chunks, "PORTION_BYTES", 3 * 2 * chunks.PIECE_BYTES)
    assert portions((1, 2), (3, 4, 5, 6), (), (7,)) == [[[1, 2], [3]], [[4, 5, 6]], [[7]]]
    monkeypatch.setattr(chunks, "PORTION_ROWS", 1)
    assert portions((1,), (2,)) == [[[1]], [[2]]]
    assert portions() == []


def test_peers_have_their_turns_one_after_the_other_however_many_calls_one_of_them_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_portions(monkeypatch)
    lead = Source()
    other = describe("e", 3)
    lead.admit(other)
    handed = lead.finish(32, (10, 11), key=b"another key of 16", lease_id="another")
    lead.opened(other, Opening(access_id(2), handed.token, claim(32)))
    lead.ask_sums(8, 9)
    asked = lead.seen(actions.Sum)
    lead.ask_sums(8, 9)
    lead.ask_sums(10, 11, number=2, peer=other)
    order = []
    while asked:
        order.append(int(asked[0].pieces.offsets[0]) // 8)
        lead.feed(events.Summed(0, asked[0].name, sums(1)))
        asked = lead.seen(actions.Sum)
    assert order == [8, 8, 10, 9, 11, 9]


def test_what_nobody_waits_for_is_not_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    in_portions(monkeypatch)
    lead = Source()
    first = lead.ask_sums(8, 9)
    under_way = lead.one(actions.Sum)
    second = lead.ask_sums(9)
    for call in (second, first):
        lead.feed(events.CallAbandoned(call))
        with refused(Reason.DEADLINE):
            lead.answer(call)
    lead.feed(events.CallAbandoned(first))
    assert not lead.seen(actions.Sum), "the ranks are at the first portion yet"
    lead.feed(events.Summed(0, under_way.name, sums(1)))
    assert not lead.seen(actions.Sum)
    call = lead.ask_sums(9)
    lead.feed(events.Summed(0, lead.one(actions.Sum).name, sums(2)))
    assert lead.answer(call) == actions.Checksums((sums(2),))


@pytest.mark.parametrize("end", ["closed", "lease", "dead"])
def test_an_access_that_is_over_is_not_summed_up_further(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    in_portions(monkeypatch)
    lead = Source()
    calls = [lead.ask_sums(8, 9)]
    under_way = lead.one(actions.Sum)
    calls.append(lead.ask_sums(9))
    if end == "closed":
        lead.close(lead.peer)
    elif end == "lease":
        lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(lead.handed.lease.id)))
    else:
        lead.feed(events.PeerSilent(key_of(lead.peer)))
        lead.tick(20.0)
    lead.feed(events.Summed(0, under_way.name, sums(1)))
    assert not lead.seen(actions.Sum)
    for call in calls:
        with refused(Reason.LEASE_RELEASED if end == "lease" else Reason.ACCESS_CLOSED):
            lead.answer(call)


# ---- at the destination


class Comparing(Lead):
    """A destination that pulls two blocks and compares them."""

    def __init__(self, ranks: int = 1, **limits: Any) -> None:
        super().__init__(describe("d", 2, world_size=ranks))
        self.node = Node(Limits(**limits), checksums=True)
        self.begin(describe("d", 2, world_size=ranks))
        self.source = describe("p", 1, world_size=ranks)
        self.pulled = self.pull(grant(self.source), 32, (8, 9))
        self.connect(self.source)
        self.feed(events.AccessAnswered(access_id(), answer_of(self.source, 32, (3, 4))))
        self.posted = self.seen(actions.Post)
        assert not self.seen(actions.SendChecksums), "nothing holds up the first bytes"
        self.tick(move_steps.ASK_DELAY_MAX_S)
        self.asked = self.one(actions.SendChecksums)

    def move(self) -> None:
        for post in self.posted:
            self.feed(events.PostingEnded(post.posting_id, done=True, nbytes=1))

    def here(self, *values: int, rank: int = 0, message: str = "", part: int | str = 0) -> None:
        self.feed(events.Summed(rank, f"{self.asked.name}.{part}", sums(*values), message))

    def there(self, result: Any, retryable: bool = False) -> None:
        self.feed(events.ChecksumsAnswered(self.asked.name, 0, result, retryable))

    def settled(self, stale: Reason | None = None) -> None:
        self.feed(events.SettleAnswered(access_id(), Verdict(stale is None, stale)))

    def end(self) -> tuple[State, Disposition, Any]:
        found = self.transfer(self.pulled.id)
        return found.state, found.memory, found.failure and found.failure.reason


def summed(post: actions.Post) -> actions.Sum:
    assert post.sum is not None
    return post.sum


def test_the_source_is_asked_while_the_bytes_move_and_settled_with_when_both_agree() -> None:
    lead = Comparing()
    ((blocks, layers),) = lead.asked.blocks
    assert ([found.tolist() for found in blocks], layers) == ([[3, 4]], None)
    (post,) = lead.posted
    assert summed(post).pieces.offsets.tolist()[:1] == [8 * 8]
    lead.move()
    assert lead.transfer(lead.pulled.id).waiting_for == "checksums"
    lead.here(1, 2)
    assert not lead.seen(actions.SendSettle)
    lead.there((sums(1, 2),))
    assert lead.one(actions.SendSettle)


def test_sums_that_are_known_before_a_rank_has_said_that_its_posting_is_over_wait_for_that() -> None:
    lead = Comparing(ranks=2)
    lead.there((sums(1, 2), sums(3, 4)))
    lead.here(1, 2)
    lead.here(3, 4, rank=1)
    assert not lead.seen(actions.SendSettle)
    lead.move()
    assert lead.one(actions.SendSettle)


def test_what_may_be_in_flight_at_once_is_summed_up_by_itself() -> None:
    """Each of the two blocks has 8 bytes in each of its two layers."""
    lead = Comparing(in_flight_bytes=16)
    (first,) = lead.posted
    assert first.runs.total_bytes == 16
    assert len(summed(first).pieces.counts) == 1
    lead.there((sums(1, 2),))
    lead.feed(events.PostingEnded(first.posting_id, done=True, nbytes=16))
    second = lead.one(actions.Post)
    assert summed(second).name != summed(first).name
    lead.here(1)
    assert not lead.seen(actions.SendSettle)
    lead.feed(events.PostingEnded(second.posting_id, done=True, nbytes=16))
    for nonsense in (2, "x"):
        lead.here(2, part=nonsense)
    assert not lead.seen(actions.SendSettle)
    lead.here(2, part=1)
    assert lead.one(actions.SendSettle)


def test_a_block_that_is_larger_than_what_may_be_in_flight_is_summed_up_when_all_of_it_moved() -> None:
    lead = Comparing(in_flight_bytes=8)
    for moved in range(4):
        (post,) = lead.posted
        assert post.runs.total_bytes == 8
        assert (post.sum is not None) == moved % 2
        lead.feed(events.PostingEnded(post.posting_id, done=True, nbytes=8))
        lead.posted = lead.seen(actions.Post)
    assert not lead.posted


@pytest.mark.parametrize("first", ["here", "there"])
def test_a_difference_fails_the_pull_whoever_is_first(first: str) -> None:
    lead = Comparing(ranks=2)
    theirs = (sums(1, 2), sums(3, 4))
    if first == "there":
        lead.there(theirs)
    lead.move()
    lead.here(1, 2)
    lead.here(3, 5, rank=1)
    if first == "here":
        lead.there(theirs)
    assert not lead.one(actions.SendSettle).settling.last, "its consumer does not count"
    lead.settled()
    assert lead.end() == (State.FAILED, Disposition.RETURNED, Reason.CHECKSUM_MISMATCH)
    assert lead.one(actions.SendClose)
    failure = lead.transfer(lead.pulled.id).failure
    assert failure is not None
    assert failure.message.startswith(
        "1 blocks of rank 1 differ from their source's: block 4 of group 0, received into"
    )


def test_a_difference_of_blocks_that_were_taken_back_meanwhile_is_none() -> None:
    lead = Comparing()
    lead.move()
    lead.here(1, 2)
    lead.there((sums(1, 3),))
    lead.settled(Reason.LEASE_VOIDED)
    assert lead.end()[2] is Reason.LEASE_VOIDED
    assert lead.one(actions.SendClose)


def test_who_compares_is_not_written_to() -> None:
    pair = Pair(WRITING)
    pair.d.node = Node(Limits(), WRITING, checksums=True)
    pair.d.begin(describe("d", 2))
    pair.meet()
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    assert not pair.posts
    assert pair.reasons()[0] is None, "another destination may come"


def test_sums_that_cannot_be_had_or_compared_fail_the_pull() -> None:
    for there, message, reason in (
        ((sums(1, 2),), "no library", Reason.DATA_PATH_FAILED),
        ((sums(1),), "", Reason.PEER_FAILED),
        ((), "", Reason.PEER_FAILED),
    ):
        lead = Comparing()
        lead.move()
        lead.there(there)
        lead.here(*(() if message else (1, 2)), message=message)
        assert lead.end()[2] is reason
    lead = Comparing()
    lead.there(PreconditionFailed(Reason.LEASE_EXPIRED, "too late"))
    assert lead.end()[2] is Reason.LEASE_EXPIRED
    lead.here(1, 2)
    lead.there((sums(1, 2),))


def test_an_answer_that_may_come_yet_is_asked_for_again_within_the_transfer_timeout() -> None:
    lead = Comparing()
    lead.there(UNAVAILABLE, retryable=True)
    lead.tick(0.2)
    assert lead.one(actions.SendChecksums).name == lead.asked.name
    lead.there(UNAVAILABLE, retryable=True)
    lead.tick(30.0)
    assert lead.end()[2] is Reason.TRANSFER_TIMEOUT


def test_what_is_pushed_is_compared_round_by_round() -> None:
    pair = Pair()
    pair.d.node = Node(Limits(), checksums=True)
    pair.d.begin(pair.d.me if pair.d.node.state.description else describe("d", 2))
    pair.meet()
    pair.deaf = {actions.SendChecksums, actions.Sum}
    pair.register(pair.reserve(32, (3, 4)).token)
    for number, block in enumerate((1, 2)):
        pair.finish(32, (block,), last=number == 1)
        pair.moved()
        pair.tick(move_steps.ASK_DELAY_MAX_S)
        names = {action.name for _, action in pair.lost if isinstance(action, actions.SendChecksums)}
        name = max(names)
        pair.feed(pair.d, events.Summed(0, f"{name}.0", sums(7)))
        assert pair.both()[1].state is State.ACTIVE
        pair.feed(pair.d, events.ChecksumsAnswered(name, 0, (sums(7),)))
        pair.feed(pair.d, events.ChecksumsAnswered(name, 0, (sums(8),)))
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


def test_a_push_that_arrived_as_something_else_fails_and_its_source_does_not_count_that_destination() -> None:
    pair = Pair()
    pair.d.node = Node(Limits(), checksums=True)
    pair.d.begin(describe("d", 2))
    pair.meet()
    pair.deaf = {actions.SendChecksums, actions.Sum}
    pair.register(pair.reserve(16, (3,)).token)
    pair.finish(16, (1,))
    pair.moved()
    pair.tick(move_steps.ASK_DELAY_MAX_S)
    ((name, _),) = {(action.name, 0) for _, action in pair.lost if isinstance(action, actions.SendChecksums)}
    pair.feed(pair.d, events.Summed(0, f"{name}.0", sums(7)))
    pair.feed(pair.d, events.ChecksumsAnswered(name, 0, (sums(8),)))
    source, destination = pair.both()
    assert (destination.state, pair.reasons()[1]) == (State.FAILED, Reason.CHECKSUM_MISMATCH)
    assert (source.over, source.consumers_done) == (False, 0), "another destination may come"


def test_the_answers_of_a_source_that_is_asked_in_turn_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_steps, "ANSWER_BYTES", 4)  # else it takes more than 16,384 blocks
    lead = Comparing()
    assert [blocks[0].tolist() for blocks, _ in lead.asked.blocks] == [[3]]
    lead.there((sums(1),))
    second = lead.one(actions.SendChecksums)
    assert ([blocks[0].tolist() for blocks, _ in second.blocks], second.number) == ([[4]], 1)
    lead.there((sums(7),))  # the first answer once more
    lead.feed(events.ChecksumsAnswered(second.name, 1, (sums(2),)))
    lead.move()
    lead.posted = lead.seen(actions.Post)
    lead.here(1)
    lead.move()
    lead.here(2, part=1)
    lead.settled()
    assert lead.end()[0] is State.SUCCEEDED


def test_answers_that_name_now_more_ranks_and_now_fewer_are_no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_steps, "ANSWER_BYTES", 4)
    lead = Comparing()
    lead.move()
    lead.posted = lead.seen(actions.Post)
    lead.here(1)
    lead.move()
    lead.here(2, part=1)
    lead.there((sums(1),))
    lead.feed(events.ChecksumsAnswered(lead.asked.name, 1, (sums(2), sums(2))))
    assert lead.end()[2] is Reason.PEER_FAILED
