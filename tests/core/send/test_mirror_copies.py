"""Blocks of an engine with mirrors may be read once all ranks have copied them."""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.send.mirror_copies import RUNNING_MAX
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values import pieces
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.errors import KVGrpcError, Reason
from tests.core.nodes import KEY, SECRET, Lead, access_id, claim, content, describe, full, lists
from tests.core.pairs import Pair, Writers


class Mirrored(Lead):
    """A lead whose engine has mirrors, and a peer that opens what the lead hands over."""

    def __init__(self, ranks: int = 1, *, mirrored: bool = True, pool: PoolLayout | None = None) -> None:
        super().__init__()
        me = describe("p", 1, world_size=ranks, pool=pool or full())
        self.feed(events.LifeBegan(1, SECRET, me, True, True, mirrored))
        self.peer = replace(me, engine_id="d", incarnation=2, address="d:1")
        self.admit(self.peer)
        self._handed = 0

    def hand_over(self, *blocks: int, **fields: Any) -> Any:
        self._handed += 1
        fields = {"key": bytes([self._handed]) * 16, "lease_id": f"lease {self._handed}", **fields}
        return self.finish(16 * len(blocks), blocks, **fields)

    def opening(self, handed: Any) -> int:
        """Opens a hand-over as the peer, and returns the call's number."""
        self._handed += 1
        tokens = handed.lease.content.tokens
        return self.open(self.peer, AccessOpening(access_id(self._handed), handed.token, claim(tokens)))

    def copied(self, *copies: actions.CopyOut, message: str = "") -> None:
        """Feeds reports of copies, and keeps all actions that follow in `done`."""
        done: list[Any] = []
        for copy in copies:
            done += self.feed(events.CopiedOut(copy.rank, copy.name, message))
        self.done = done


def rows(answer: Any) -> Any:
    """Returns the only row of an answer to OpenAccess."""
    (row,) = answer.rows
    return row


def test_a_hand_over_is_copied_and_opens_when_the_last_rank_has_copied_it() -> None:
    lead = Mirrored(ranks=2)
    handed = lead.hand_over(3, 5)
    copies = lead.seen(actions.CopyOut)
    assert [copy.rank for copy in copies] == [0, 1]
    assert sorted(copies[0].pieces.offsets.tolist()) == [24, 40, 64 * 8 + 24, 64 * 8 + 40]
    assert (copies[0].pieces.nbytes == 8).all()
    call = lead.opening(handed)
    lead.copied(copies[1])
    lead.copied(copies[1])
    assert lead.answer(call) is None
    lead.copied(copies[0])
    assert rows(lead.answer(call)).token_count == 32


def test_each_rank_copies_the_layers_of_its_stage() -> None:
    pool = full()
    regions = tuple(replace(region, offset=0, stage=stage) for stage, region in enumerate(pool.regions))
    lead = Mirrored(len(regions), pool=PoolLayout(pool.groups, regions, pool.total_bytes))
    handed = lead.hand_over(3)
    copies = lead.seen(actions.CopyOut)
    assert [(copy.rank, copy.pieces.offsets.tolist()) for copy in copies] == [(0, [24]), (1, [24])]
    lead.copied(*copies)
    assert rows(lead.answer(lead.opening(handed))).token_count == 16


def test_an_engine_without_mirrors_copies_nothing() -> None:
    lead = Mirrored(mirrored=False)
    handed = lead.hand_over(3)
    assert not lead.seen(actions.CopyOut)
    assert rows(lead.answer(lead.opening(handed))).token_count == 16


def test_a_copy_waits_for_its_step_and_holds_up_no_other() -> None:
    lead = Mirrored()
    late, early = lead.hand_over(3, after_step=2), lead.hand_over(4)
    lead.copied(lead.one(actions.CopyOut))
    assert rows(lead.answer(lead.opening(early))).token_count == 16
    call = lead.opening(late)
    lead.feed(events.StepDone(0, 1))
    assert not lead.seen(actions.CopyOut)
    lead.feed(events.StepDone(0, 2))
    assert lead.answer(call) is None
    lead.copied(lead.one(actions.CopyOut))
    assert rows(lead.answer(call)).token_count == 16


def test_portions_come_few_at_once_and_in_the_order_of_the_hand_overs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PORTION_BYTES", 2 * pieces.PIECE_BYTES)  # one block in both layers
    lead = Mirrored()
    first = lead.hand_over(1, 2, 3)
    copies = lead.seen(actions.CopyOut)
    assert len(copies) == RUNNING_MAX
    lead.hand_over(9)
    assert not lead.seen(actions.CopyOut)
    call = lead.opening(first)
    found = []
    while copies:
        copy = copies.pop(0)
        found.append(int(copy.pieces.offsets.min()) // 8)
        assert len(found) > 3 or lead.answer(call) is None
        lead.copied(copy)
        copies += lead.seen(actions.CopyOut)
    assert found == [1, 2, 3, 9]
    assert rows(lead.answer(call)).token_count == 48


@pytest.mark.parametrize("after_step", [0, 1])
def test_of_a_lease_that_has_ended_no_portion_is_begun(after_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PORTION_BYTES", 2 * pieces.PIECE_BYTES)
    lead = Mirrored()
    handed = lead.hand_over(1, 2, 3, 4, after_step=after_step)
    copies = lead.seen(actions.CopyOut)
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(handed.lease.id)))
    lead.copied(*copies)
    assert not lead.seen(actions.CopyOut)
    lead.feed(events.StepDone(0, 1))
    assert not lead.seen(actions.CopyOut)
    assert not lead.state.send.mirrors.running
    lead.hand_over(1)
    assert lead.one(actions.CopyOut)


def test_a_copy_that_fails_ends_the_hand_over_and_tells_its_readers_why() -> None:
    lead = Mirrored(ranks=2)
    handed = lead.hand_over(3)
    copies, call = lead.seen(actions.CopyOut), lead.opening(handed)
    lead.copied(copies[1], message="the bus is on fire")
    refusal = rows(lead.answer(call))
    assert isinstance(refusal, KVGrpcError)
    assert (refusal.reason, "rank 1" in refusal.message) == (Reason.SOURCE_FAILED, True)
    failed, returned = lead.news()
    assert (failed.failure.reason, failed.failure.rank) == (Reason.SOURCE_FAILED, 1)
    assert isinstance(returned, actions.BlocksReturnedNews)
    later = rows(lead.answer(lead.opening(handed)))
    assert later.reason is Reason.SOURCE_FAILED
    lead.copied(copies[0])
    assert not lead.state.send.mirrors.running


def test_reports_of_copies_that_nobody_asked_for_change_nothing() -> None:
    lead = Mirrored()
    handed = lead.hand_over(3)
    copy, call = lead.one(actions.CopyOut), lead.opening(handed)
    lead.feed(events.CopiedOut(1, copy.name))
    lead.feed(events.CopiedOut(0, "another"))
    assert lead.answer(call) is None


def test_reports_of_an_old_life_change_nothing_in_the_next() -> None:
    lead = Mirrored()
    lead.hand_over(3)
    old = lead.one(actions.CopyOut)
    lead.feed(events.LifeBegan(2, SECRET, replace(lead.me, incarnation=2), True, True, True))
    lead.feed(events.CopiedOut(old.rank, old.name, "the bus is on fire"))
    lead.admit(lead.peer)
    handed = lead.hand_over(3)
    new = lead.one(actions.CopyOut)
    call = lead.opening(handed)
    lead.feed(events.CopiedOut(old.rank, old.name))
    assert lead.answer(call) is None
    lead.copied(new)
    assert rows(lead.answer(call)).token_count == 16


def test_a_copy_that_does_not_end_is_seen_by_its_age() -> None:
    lead = Mirrored(ranks=2)
    assert lead.node.oldest_posting() is None
    lead.hand_over(3)
    copies, began = lead.seen(actions.CopyOut), lead.now
    lead.tick(2.0)
    lead.copied(copies[0])
    assert lead.node.oldest_posting() == began
    lead.copied(copies[1])
    assert lead.node.oldest_posting() is None


def test_an_opening_does_not_wait_for_a_copy_without_an_end() -> None:
    lead = Mirrored()
    call = lead.opening(lead.hand_over(3))
    lead.tick(lead.state.limits.open_wait_s)
    refusal = rows(lead.answer(call))
    assert (refusal.reason, refusal.metadata["phase"]) == (Reason.DEADLINE, "open/copy")


def test_a_target_of_an_engine_with_mirrors_is_not_written_by_its_source() -> None:
    lead = Mirrored()
    with pytest.raises(KVGrpcError) as caught:
        writes(lead)
    assert caught.value.reason is Reason.FEATURE_UNAVAILABLE


def writes(lead: Mirrored) -> None:
    """Lets a source open an access to write into a target; raises the error of a refusal."""
    reserved = lead.call(lambda c: events.ReserveBlocks(c, KEY, lists((8, 9)), content(32)))
    row = rows(
        lead.answer(lead.open(lead.peer, AccessOpening(access_id(77), reserved.token, None, push_content=content(32))))
    )
    if isinstance(row, KVGrpcError):
        raise row


class MirroredPair(Pair):
    """A source with mirrors, and destinations; copies wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf = {actions.CopyOut}

    def _lead(self, me: Any, writers: Writers, **limits: Any) -> Lead:
        lead = super()._lead(me, writers, **limits)
        if me.engine_id == "p":
            lead.feed(events.LifeBegan(1, SECRET, me, True, True, True))
        return lead

    def copies(self) -> list[actions.CopyOut]:
        """Returns the copies that the rank was asked for since the last call."""
        asked, self.lost = self.lost, []
        return [action for _, action in asked if isinstance(action, actions.CopyOut)]


def test_a_part_of_a_push_moves_when_it_is_in_the_mirrors() -> None:
    pair = MirroredPair()
    pair.register(pair.reserve(32).token)
    pair.finish(32, last=True)
    (copy,) = pair.copies()
    assert not pair.posts
    pair.feed(pair.p, events.CopiedOut(copy.rank, copy.name))
    assert pair.posts
    pair.moved()
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED] * 2


def test_a_part_that_is_copied_before_an_earlier_one_waits_for_it() -> None:
    pair = MirroredPair()
    pair.register(pair.reserve(32).token)
    pair.finish(32, (0, 1), last=False, layers=(0, 1), after_step=5)
    pair.finish(32, (0, 1), last=True, layers=(1, 1))
    (second,) = pair.copies()
    pair.feed(pair.p, events.CopiedOut(0, second.name))
    assert not pair.posts
    pair.feed(pair.p, events.StepDone(0, 5))
    (first,) = pair.copies()
    assert not pair.posts
    pair.feed(pair.p, events.CopiedOut(0, first.name))
    while pair.posts:
        pair.moved()
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED] * 2


def test_a_part_that_could_not_be_copied_fails_its_push_at_both_sides() -> None:
    pair = MirroredPair()
    pair.register(pair.reserve(32).token)
    pair.finish(32, (0, 1), last=False, layers=(0, 1))
    pair.finish(32, (0, 1), last=True, layers=(1, 1))
    first, second = pair.copies()
    pair.feed(pair.p, events.CopiedOut(0, first.name, "the bus is on fire"))
    assert not pair.posts
    pair.feed(pair.p, events.CopiedOut(0, second.name))
    assert [transfer.state for transfer in pair.both()] == [State.FAILED] * 2
    assert pair.reasons() == [Reason.SOURCE_FAILED] * 2
    mine = pair.both()[0].failure
    assert mine is not None
    assert (mine.rank, "the bus is on fire" in mine.message) == (0, True)
    assert not len(pair.p.state.pool.pins)
    assert not len(pair.d.state.pool.pins)
    assert not pair.p.state.send.mirrors.running
