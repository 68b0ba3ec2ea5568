"""Checksums at the source: who may ask for them, in which order ranks compute them, and which limits apply."""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.access import checksums
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.values import pieces
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.errors import Reason, Unimplemented
from tests.core.nodes import Lead, access_id, claim, crcs, describe, full, ids, key_of, lists, refused


class Source(Lead):
    """A lead whose blocks 8 and 9 a peer reads."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(describe("p", 1, world_size=ranks))
        self.peer = describe("d", 2, world_size=ranks)
        self.admit(self.peer)
        self.handed = self.finish(32, (8, 9))
        self.opened(self.peer, AccessOpening(access_id(), self.handed.token, claim(32)))

    def ask_sums(self, *blocks: int, number: int = 1, layers: Any = None, peer: Any = None) -> int:
        who = peer or self.peer
        rows = ((lists(blocks), layers),)
        return self.ask(
            lambda c: events.ChecksumBlocks(c, who.engine_id, who.incarnation, access_id(number), rows), "peer"
        )


def test_a_peer_gets_the_checksums_of_every_rank_in_their_order() -> None:
    lead = Source(ranks=2)
    call = lead.ask_sums(9, 8)
    asked = lead.seen(actions.ComputeChecksums)
    assert [action.rank for action in asked] == [0, 1]
    assert asked[0].pieces.counts.tolist() == [2, 2]
    lead.feed(events.ChecksumsComputed(1, asked[0].name, crcs(3, 4)))
    assert lead.answer(call) is None
    lead.feed(events.ChecksumsComputed(0, asked[0].name, crcs(1, 2)))
    assert lead.answer(call) == actions.Checksums((crcs(1, 2), crcs(3, 4)))
    lead.feed(events.ChecksumsComputed(0, asked[0].name, crcs(1, 2)))


def test_only_blocks_of_a_peers_own_valid_access_have_checksums() -> None:
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


def test_a_rank_that_cannot_compute_checksums_or_takes_too_long_fails_the_call() -> None:
    lead = Source()
    call = lead.ask_sums(8)
    lead.feed(events.ChecksumsComputed(0, lead.one(actions.ComputeChecksums).name, b"", "no library"))
    with refused(Reason.DATA_PATH_FAILED):
        lead.answer(call)
    late = lead.ask_sums(8)
    lead.call(lambda c: events.RenewLeases(c, (events.LeaseRef(lead.handed.lease.id),), 60.0))
    lead.tick(30.0)
    with refused(Reason.DEADLINE):
        lead.answer(late)


@pytest.mark.parametrize("bound", ["WAITING_MAX", "WAITING_OF_PEER_MAX", "WAITING_OF_ACCESS_MAX"])
def test_calls_that_wait_for_checksums_are_bounded_and_end_with_the_life(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(checksums, bound, 3)
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
def test_no_checksum_is_computed_twice_in_one_call(rows: Any, fine: bool) -> None:
    lead = Source()
    asked = tuple((lists(blocks), layers) for blocks, layers in rows)
    call = lead.ask(lambda c: events.ChecksumBlocks(c, "d", 2, access_id(), asked), "peer")
    if fine:
        assert lead.one(actions.ComputeChecksums)
        return
    with refused(Reason.BLOCK_DUPLICATE):
        lead.answer(call)
    assert not lead.seen(actions.ComputeChecksums)


def in_portions(monkeypatch: pytest.MonkeyPatch, running: int = 1) -> None:
    """Limits a portion to one block, and the portions in flight to `running`."""
    monkeypatch.setattr(pieces, "PORTION_BYTES", 1)
    monkeypatch.setattr(checksums, "RUNNING_MAX", running)


def test_the_ranks_get_what_one_call_asks_for_portion_by_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    in_portions(monkeypatch, running=4)
    lead = Source(ranks=2)
    call = lead.ask_sums(9, 8)
    names = set()
    for values in ((1, 3), (2, 4)):
        asked = lead.seen(actions.ComputeChecksums)
        assert [(action.rank, len(action.pieces.counts)) for action in asked] == [(0, 1), (1, 1)]
        names.add(asked[0].name)
        for rank, value in enumerate(values):
            lead.feed(events.ChecksumsComputed(rank, asked[0].name, crcs(value)))
    assert len(names) == 2
    assert lead.answer(call) == actions.Checksums((crcs(1, 2), crcs(3, 4)))


def test_no_blocks_have_no_checksums_and_cost_the_ranks_nothing() -> None:
    lead = Source(ranks=2)
    assert lead.answer(lead.ask_sums()) == actions.Checksums((b"", b""))
    assert not lead.seen(actions.ComputeChecksums)


def portions(*blocks: tuple[int, ...]) -> list[list[list[int]]]:
    wanted = [((ids(*some),), None) for some in blocks]
    return [[rows[0].tolist() for rows, _ in some] for some in pieces.portions_of(full(64), wanted)]


def test_portions_are_of_whole_blocks_and_bounded_in_bytes_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has a piece in each of two layers, and a piece counts as at least 1 KB."""
    monkeypatch.setattr(pieces, "PORTION_BYTES", 3 * 2 * pieces.PIECE_BYTES)
    assert portions((1, 2), (3, 4, 5, 6), (), (7,)) == [[[1, 2], [3]], [[4, 5, 6]], [[7]]]
    monkeypatch.setattr(pieces, "PORTION_ROWS", 1)
    assert portions((1,), (2,)) == [[[1]], [[2]]]
    assert portions() == []


def test_peers_take_turns_however_many_calls_one_of_them_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    in_portions(monkeypatch)
    lead = Source()
    other = describe("e", 3)
    lead.admit(other)
    handed = lead.finish(32, (10, 11), key=b"another key of 16", lease_id="another")
    lead.opened(other, AccessOpening(access_id(2), handed.token, claim(32)))
    lead.ask_sums(8, 9)
    asked = lead.seen(actions.ComputeChecksums)
    lead.ask_sums(8, 9)
    lead.ask_sums(10, 11, number=2, peer=other)
    order = []
    while asked:
        order.append(int(asked[0].pieces.offsets[0]) // 8)
        lead.feed(events.ChecksumsComputed(0, asked[0].name, crcs(1)))
        asked = lead.seen(actions.ComputeChecksums)
    assert order == [8, 8, 10, 9, 11, 9]


def test_checksums_that_are_not_waited_for_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_portions(monkeypatch)
    lead = Source()
    first = lead.ask_sums(8, 9)
    under_way = lead.one(actions.ComputeChecksums)
    second = lead.ask_sums(9)
    for call in (second, first):
        lead.feed(events.CallAbandoned(call))
        with refused(Reason.DEADLINE):
            lead.answer(call)
    lead.feed(events.CallAbandoned(first))
    assert not lead.seen(actions.ComputeChecksums), "the ranks are at the first portion yet"
    lead.feed(events.ChecksumsComputed(0, under_way.name, crcs(1)))
    assert not lead.seen(actions.ComputeChecksums)
    call = lead.ask_sums(9)
    lead.feed(events.ChecksumsComputed(0, lead.one(actions.ComputeChecksums).name, crcs(2)))
    assert lead.answer(call) == actions.Checksums((crcs(2),))


@pytest.mark.parametrize("end", ["closed", "lease", "dead"])
def test_no_further_checksums_are_computed_for_an_ended_access(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    in_portions(monkeypatch)
    lead = Source()
    calls = [lead.ask_sums(8, 9)]
    under_way = lead.one(actions.ComputeChecksums)
    calls.append(lead.ask_sums(9))
    if end == "closed":
        lead.close(lead.peer)
    elif end == "lease":
        lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(lead.handed.lease.id)))
    else:
        lead.feed(events.PeerSilent(key_of(lead.peer)))
        lead.tick(20.0)
    lead.feed(events.ChecksumsComputed(0, under_way.name, crcs(1)))
    assert not lead.seen(actions.ComputeChecksums)
    for call in calls:
        with refused(Reason.LEASE_RELEASED if end == "lease" else Reason.ACCESS_CLOSED):
            lead.answer(call)


def test_ranks_of_several_stages_compute_none() -> None:
    """A peer that asks anyway is refused: a rank has no layer of some of the blocks."""
    lead = Source()
    pool = lead.me.pool
    staged = [replace(region, offset=0, stage=stage) for stage, region in enumerate(pool.regions)]
    lead.state.life.description = replace(
        lead.me, pool=PoolLayout(pool.groups, tuple(staged), pool.total_bytes), world_size=len(staged)
    )
    with refused(Reason.FEATURE_UNAVAILABLE, Unimplemented):
        lead.answer(lead.ask_sums(8))
