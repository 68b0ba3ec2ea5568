"""An engine that compares checksums computes those of handed-over blocks before a peer asks."""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.access.checksums import WAITING_OF_ACCESS_MAX
from kvgrpc.core.node import Node
from kvgrpc.core.send import checksum_prefetch
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Reason
from tests.core.nodes import SECRET, Lead, access_id, claim, crcs, describe, hybrid, lists, refused


class Source(Lead):
    """A lead that compares checksums; `hand_over` offers blocks of two groups, and `open_it` opens them as a peer."""

    def __init__(self, ranks: int = 1, *, mirrored: bool = False) -> None:
        super().__init__()
        self.checked = False
        self.node = Node(Limits(), checksums=True)
        self.feed(events.LifeBegan(1, SECRET, describe("p", 1, world_size=ranks, pool=hybrid()), True, True, mirrored))
        self.peer = describe("d", 2, world_size=ranks, pool=hybrid())
        self.admit(self.peer)
        self.checked = True
        self._opened = 0

    def hand_over(self, fine: tuple[int, ...] = (8, 9), other: tuple[int, ...] = (3,), **fields: Any) -> Any:
        """Hands over 32 tokens in two fine blocks and one of the other group, under a new key and lease id."""
        self._opened += 1
        fields = {"key": bytes([self._opened]) * 16, "lease_id": f"lease {self._opened}", **fields}
        return self.finish(32, fine, other, **fields)

    def open_it(self, handed: Any) -> None:
        """Lets the peer open a hand-over; access ids count up from 1."""
        number = 1 + len(self.state.access.rows)
        self.opened(self.peer, AccessOpening(access_id(number), handed.token, claim(32)))

    def ask_sums(self, *blocks: tuple[int, ...], number: int = 1, layers: Any = None) -> int:
        rows = tuple((lists(fine, other), layers) for fine, other in zip(blocks[::2], blocks[1::2], strict=True))
        return self.ask(lambda c: events.ChecksumBlocks(c, "d", 2, access_id(number), rows), "peer")

    def say(self, asked: actions.ComputeChecksums, *found: int, rank: int = 0, message: str = "") -> None:
        self.feed(events.ChecksumsComputed(rank, asked.name, crcs(*found), message))

    def end(self, handed: Any) -> None:
        self.call(lambda c: events.ReleaseLease(c, events.LeaseRef(handed.lease.id)))


def test_checksums_of_a_hand_over_are_computed_before_a_call_on_every_rank() -> None:
    lead = Source(ranks=2)
    handed = lead.hand_over()
    asked = lead.seen(actions.ComputeChecksums)
    assert [(action.rank, action.pieces.counts.tolist()) for action in asked] == [(0, [1, 1, 1]), (1, [1, 1, 1])]
    lead.say(asked[0], 1, 2, 3)
    lead.say(asked[1], 4, 5, 6, rank=1)
    lead.open_it(handed)
    both = lead.answer(lead.ask_sums((8, 9), (3,)))
    assert both == actions.Checksums((crcs(1, 2, 3), crcs(4, 5, 6)))
    some = lead.answer(lead.ask_sums((9,), (), (), (3,)))
    assert some == actions.Checksums((crcs(2, 3), crcs(5, 6)))
    assert not lead.seen(actions.ComputeChecksums)


def test_an_engine_that_does_not_compare_computes_checksums_on_call_only() -> None:
    lead = Lead()
    lead.finish()
    assert not lead.seen(actions.ComputeChecksums)


def test_an_engine_of_several_pipeline_stages_computes_checksums_on_call_only() -> None:
    lead, pool = Lead(), hybrid()
    first, second = pool.regions
    staged = replace(pool, regions=(first, replace(second, stage=1)))
    lead.node = Node(Limits(), checksums=True)
    lead.feed(events.LifeBegan(1, SECRET, describe("p", 1, world_size=2, pool=staged), True))
    lead.finish(32, (8, 9), (3,))
    assert not lead.seen(actions.ComputeChecksums)


@pytest.mark.parametrize(("fine", "layers"), [((9, 8), None), ((8, 9), (0, 1))])
def test_checksums_of_other_orders_and_single_layers_are_computed_on_call(fine: Any, layers: Any) -> None:
    lead = Source()
    handed = lead.hand_over()
    lead.say(lead.one(actions.ComputeChecksums), 1, 2, 3)
    lead.open_it(handed)
    call = lead.ask_sums(fine, (), layers=layers)
    lead.say(lead.one(actions.ComputeChecksums), 7, 8)
    assert lead.answer(call) == actions.Checksums((crcs(7, 8),))


def test_a_call_meanwhile_waits_for_what_is_under_way() -> None:
    lead = Source()
    handed = lead.hand_over()
    asked = lead.one(actions.ComputeChecksums)
    lead.open_it(handed)
    calls = [lead.ask_sums((8,), ()), lead.ask_sums((), (3,))]
    assert not lead.seen(actions.ComputeChecksums)
    assert [lead.answer(call) for call in calls] == [None, None]
    lead.say(asked, 1, 2, 3)
    assert [lead.answer(call) for call in calls] == [actions.Checksums((crcs(n),)) for n in (1, 3)]
    assert lead.state.timers.when(Timer.CHECKSUMS, asked.name) is None
    lead.say(asked, 1, 2, 3)
    assert not lead.done, "a rank that says it twice changes nothing"


def test_no_checksum_is_computed_before_its_step_is_over() -> None:
    lead = Source()
    lead.hand_over(after_step=5)
    assert not lead.seen(actions.ComputeChecksums)
    lead.feed(events.StepDone(0, 4))
    assert not lead.seen(actions.ComputeChecksums)
    lead.feed(events.StepDone(0, 5))
    assert lead.one(actions.ComputeChecksums)


def test_checksums_are_computed_lease_by_lease_and_not_for_those_that_ended() -> None:
    lead = Source()
    first = lead.hand_over()
    asked = lead.one(actions.ComputeChecksums)
    gone = lead.hand_over((10, 11), (4,))
    lead.hand_over((12, 13), (5,))
    assert not lead.seen(actions.ComputeChecksums)
    lead.end(gone)
    lead.end(first)
    assert not lead.seen(actions.ComputeChecksums), "the ranks are at the first one yet"
    lead.say(asked, 1, 2, 3)
    assert lead.one(actions.ComputeChecksums).pieces.offsets.tolist() == [12 * 8, 13 * 8, (64 + 5) * 8]


def test_a_lease_that_ends_before_its_step_holds_up_no_other() -> None:
    lead = Source()
    first = lead.hand_over(after_step=5)
    lead.hand_over((10, 11), (4,))
    assert not lead.seen(actions.ComputeChecksums)
    lead.end(first)
    assert lead.one(actions.ComputeChecksums).pieces.offsets.tolist() == [10 * 8, 11 * 8, (64 + 4) * 8]


def test_checksums_of_a_mirror_are_computed_once_it_has_the_lease_which_holds_up_no_other() -> None:
    lead = Source(mirrored=True)
    lead.hand_over(after_step=5)
    lead.hand_over((10, 11), (4,))
    early = lead.one(actions.CopyOut)
    assert not lead.seen(actions.ComputeChecksums)
    lead.feed(events.CopiedOut(0, early.name))
    asked = lead.one(actions.ComputeChecksums)
    assert asked.pieces.offsets.tolist() == [10 * 8, 11 * 8, (64 + 4) * 8]
    lead.say(asked, 1, 2, 3)
    lead.feed(events.StepDone(0, 5))
    late = lead.one(actions.CopyOut)
    assert not lead.seen(actions.ComputeChecksums)
    lead.feed(events.CopiedOut(0, late.name))
    assert lead.one(actions.ComputeChecksums).pieces.offsets.tolist() == [8 * 8, 9 * 8, (64 + 3) * 8]


def test_of_a_lease_that_could_not_be_copied_no_checksum_is_computed() -> None:
    lead = Source(mirrored=True)
    lead.hand_over()
    lead.feed(events.CopiedOut(0, lead.one(actions.CopyOut).name, "the bus is on fire"))
    assert not lead.seen(actions.ComputeChecksums)
    assert lead.node.state.send.prefetch.idle


def test_a_call_before_its_turn_is_answered_at_once_and_not_computed_again() -> None:
    lead = Source()
    lead.hand_over()
    first = lead.one(actions.ComputeChecksums)
    second = lead.hand_over((10, 11), (4,))
    lead.open_it(second)
    call = lead.ask_sums((10,), ())
    lead.say(lead.one(actions.ComputeChecksums), 5)
    assert lead.answer(call) == actions.Checksums((crcs(5),))
    lead.say(first, 1, 2, 3)
    assert not lead.seen(actions.ComputeChecksums)
    assert lead.node.state.send.prefetch.idle


def test_calls_are_refused_when_the_ranks_take_too_long_or_the_lease_ends() -> None:
    lead = Source()
    first = lead.hand_over(ttl_s=60.0)
    lead.open_it(first)
    late = lead.ask_sums((8,), ())
    lead.tick(30.0)
    with refused(Reason.DEADLINE):
        lead.answer(late)
    cut_off = lead.ask_sums((8,), ())
    lead.end(first)
    with refused(Reason.LEASE_RELEASED):
        lead.answer(cut_off)


def test_checksums_that_a_rank_could_not_give_are_computed_again_on_call() -> None:
    lead = Source()
    handed = lead.hand_over()
    asked = lead.one(actions.ComputeChecksums)
    lead.open_it(handed)
    failed = lead.ask_sums((8,), ())
    lead.say(asked, message="no library")
    with refused(Reason.DATA_PATH_FAILED):
        lead.answer(failed)
    call = lead.ask_sums((8,), ())
    lead.say(lead.one(actions.ComputeChecksums), 1)
    assert lead.answer(call) == actions.Checksums((crcs(1),))


def test_prefetched_checksums_are_bounded_and_go_with_their_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum_prefetch, "AHEAD_BYTES_MAX", 2 * 3 * 4)
    lead = Source()
    handed = []
    for first in (8, 10, 12):
        handed.append(lead.hand_over((first, first + 1), (first,)))
        for asked in lead.seen(actions.ComputeChecksums):
            lead.say(asked, 1, 2, 3)
    lead.open_it(handed[-1])
    lead.ask_sums((12,), ())
    assert len(lead.one(actions.ComputeChecksums).pieces.counts) == 1, "summed up for whoever asks, block by block"
    lead.end(handed[0])
    lead.hand_over((14, 15), (14,))
    assert len(lead.one(actions.ComputeChecksums).pieces.counts) == 3


def test_a_call_that_waits_for_a_lease_and_is_abandoned_is_over() -> None:
    lead = Source()
    handed = lead.hand_over()
    asked = lead.one(actions.ComputeChecksums)
    lead.open_it(handed)
    gone, stays = lead.ask_sums((8,), ()), lead.ask_sums((9,), ())
    lead.feed(events.CallAbandoned(gone))
    with refused(Reason.DEADLINE):
        lead.answer(gone)
    lead.say(asked, 1, 2, 3)
    assert lead.answer(stays) == actions.Checksums((crcs(2),))


def test_calls_that_wait_for_a_lease_are_bounded_with_the_others_and_end_with_the_life() -> None:
    lead = Source()
    lead.open_it(lead.hand_over())
    lead.hand_over((10, 11), (4,))
    lead.checked = False
    calls = [lead.ask_sums((8,), ()) for _ in range(WAITING_OF_ACCESS_MAX)]
    with refused(Reason.LIMIT_EXCEEDED):
        lead.answer(lead.ask_sums((8,), ()))
    lead.begin(describe("p", 5, pool=hybrid()))
    for call in calls:
        with refused(Reason.LEASE_RELEASED):
            lead.answer(call)
    assert lead.node.state.send.prefetch.idle
    assert not lead.seen(actions.ComputeChecksums)
