"""A prefill that starts over replaces its parts at any stage of the push, and nothing of the old parts counts."""

from dataclasses import replace

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import LayersReceivedNews, SendClose, SendOpen, SendParts, SendSettle
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from tests.core.nodes import KEY, access_id, describe, refused
from tests.core.pairs import MODES, READING, UNREACHABLE, WRITING, Pair, Writers
from tests.core.send.epochs import lease_of, returned, start_over

HOW = pytest.mark.parametrize("void", [False, True], ids=["replaced", "taken back"])


def succeeds(pair: Pair, *source_blocks: int) -> None:
    """Moves the rest from those blocks, and asserts that both sides succeed."""
    (_, post) = pair.posts[-1]
    assert {src // 8 % 64 for src in post.runs.src.tolist()} == {min(source_blocks)}
    pair.moved()
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2
    assert not len(pair.p.state.pool.pins) + len(pair.d.state.pool.pins)
    pair.tick(130.0)
    assert not pair.p.state.access.rows
    assert not pair.d.state.access.rows


@MODES
@HOW
def test_a_part_of_a_higher_epoch_replaces_all_before(writers: Writers, void: bool) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False)
    pair.moved()
    first = lease_of(pair)
    start_over(pair, void)
    sent = pair.both()[0]
    assert sent.lease_id not in ("", first)
    ended = pair.p.state.send.leases.get(first)
    assert ended.state is (LeaseState.VOIDED if void else LeaseState.RELEASED)
    assert returned(pair) == [first]
    succeeds(pair, 5, 6)


@HOW
def test_a_destination_that_drops_the_parts_that_were_replaced_is_done_with_those_that_replace_them(void: bool) -> None:
    pair = Pair(READING)
    token = pair.reserve(32, (3, 4)).token
    pair.register(token)
    pair.finish(32, (1,), last=False)
    pair.moved()
    pair.deaf = {SendOpen, actions.Dial, SendClose}
    start_over(pair, void)
    asked = next(action.opening.access_id for _, action in pair.lost if isinstance(action, SendOpen))
    pair.feed(pair.p, events.AccessAnswered(asked, PreconditionFailed(Reason.NO_HANDSHAKE, "")))
    pair.feed(pair.p, events.DialFailed(pair.d.me.address, UNREACHABLE))
    assert not pair.both()[0].over
    row = events.AccessClosing(access_id(11), events.CloseOutcome.DROPPED, quiesced=True, token=token)
    me = pair.d.me.engine_id, pair.d.me.incarnation
    pair.call(pair.p, lambda c: events.CloseAccess(c, *me, (row,)), "peer")
    assert pair.both()[0].over
    assert not len(pair.p.state.pool.pins)


@MODES
@HOW
def test_layers_that_were_there_are_to_be_discarded(writers: Writers, void: bool) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2), last=False, layers=(0, 1))
    pair.moved()
    assert pair.both()[1].has_layers(0, 1)
    start_over(pair, void)
    assert not pair.both()[1].has_layers(0, 1)
    told = [news for news in pair.told["d"] if isinstance(news, LayersReceivedNews)]
    assert [news.layers_done for news in told] == [((0, 1),), ()]
    succeeds(pair, 5, 6)


@MODES
@HOW
def test_nothing_is_posted_into_a_block_while_an_earlier_posting_may_write_there(writers: Writers, void: bool) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    assert len(pair.posts) == 1
    first = lease_of(pair)
    start_over(pair, void)
    assert len(pair.posts) == 1, "the first is under way"
    held = writers and not void
    assert pair.p.state.pool.pins.has(f"{pair.both()[0].id}#1", PinKind.ACCESS) is bool(held)
    assert returned(pair) == ([] if held else [first])
    pair.moved()
    assert returned(pair) == [first]
    assert len(pair.posts) == 1
    succeeds(pair, 5, 6)


@MODES
@pytest.mark.parametrize("done", [True, False], ids=["ends well", "breaks"])
def test_an_old_posting_that_breaks_ends_nothing_but_one_that_is_lost_does(writers: Writers, done: bool) -> None:
    for quiesced in (True, False):
        pair = Pair(writers)
        pair.register(pair.reserve(32, (3, 4)).token)
        pair.finish(32, (1, 2))
        start_over(pair, False)
        if writers:
            pair.moved(done=done, quiesced=quiesced)
            assert pair.both()[0].waiting_for == ("registration" if not quiesced else "")
            assert len(pair.posts) == quiesced


@pytest.mark.parametrize(
    ("writers", "step"),
    [(READING, SendOpen), (READING, SendParts), (READING, SendSettle), (WRITING, SendOpen), (WRITING, SendSettle)],
)
@HOW
def test_answers_to_replaced_parts_change_nothing(writers: Writers, void: bool, step: type[actions.Action]) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    if step is SendParts:  # the first parts go with the opening
        pair.finish(32, (1,), last=False)
        pair.moved()
    pair.deaf = {step}
    pair.finish(32, (2,) if step is SendParts else (1, 2))
    pair.moved()
    pair.deaf = set()
    start_over(pair, void)
    pair.recover()
    succeeds(pair, 5, 6)


@MODES
def test_parts_of_an_epoch_that_was_replaced_or_taken_back_are_refused(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False)
    pair.feed(pair.p, events.LeasesVoided((lease_of(pair),)))
    with refused(Reason.PREEMPTED):
        pair.finish(32, (2,))
    pair.finish(32, (5,), last=False, part_epoch=7)
    with refused(Reason.PREEMPTED):
        pair.finish(32, (6,), part_epoch=6)
    pair.feed(pair.p, events.LeasesVoided(("l-other",)))
    pair.finish(32, (6,), part_epoch=7)
    while pair.posts:
        pair.moved()
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


def test_a_prefill_may_start_over_before_a_destination_registered() -> None:
    pair = Pair()
    pair.finish(32, (1,), last=False)
    start_over(pair, True)
    start_over(pair, False, (7, 8), epoch=2)
    pair.register(pair.reserve(32, (3, 4)).token)
    succeeds(pair, 7, 8)


def test_one_that_starts_over_while_its_destination_is_reached_opens_the_new_parts_only() -> None:
    pair = Pair()
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.deaf = {SendOpen}
    pair.finish(32, (1, 2))
    ((_, sent),) = pair.lost
    assert isinstance(sent, SendOpen)
    gone = events.AccessAnswered(sent.opening.access_id, Unavailable(Reason.NO_HANDSHAKE, "who"))
    pair.deaf = {SendOpen, actions.Dial}
    pair.feed(pair.p, gone)
    assert pair.both()[0].waiting_for == "handshake"
    start_over(pair, True)
    pair.lost.clear()
    pair.deaf.clear()
    pair.p.connect(pair.d.me)
    opening = [action.opening for action in pair.p.done if isinstance(action, SendOpen)]
    assert [row.part_epoch for row in opening] == [1]


def test_a_destination_takes_a_higher_epoch_from_its_own_source_only() -> None:
    pair = Pair()
    token = pair.reserve(32, (3, 4)).token
    pair.register(token)
    pair.finish(32, (1,), last=False)
    other = describe("x", 7)
    pair.d.admit(other)
    (opening,) = [action.opening for action in pair.sent if isinstance(action, SendOpen)]
    foreign = replace(opening, access_id=access_id(70), reverse_access_id=access_id(71), part_epoch=1)
    (row,) = pair.d.opened(other, foreign)
    assert row.reason is Reason.ACCESS_REUSED
    gone = events.AccessClosing(access_id(90), events.CloseOutcome.DROPPED, quiesced=True, token=token)
    pair.call(pair.d, lambda c: events.CloseAccess(c, "x", 7, (gone,)), "peer")
    assert not pair.both()[1].over, "it gives up what is not its own"
    pair.moved()
    late = replace(opening, access_id=access_id(72), reverse_access_id=access_id(73))
    start_over(pair, False)
    (row,) = pair.d.opened(pair.p.me, late)
    assert row.reason is Reason.PREEMPTED


@MODES
def test_a_push_that_is_cancelled_while_old_postings_run_returns_its_blocks_after_them(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    start_over(pair, False)
    pair.call(pair.p, lambda c: events.CancelTransfer(c, key=KEY))
    source, destination = pair.both()
    assert source.state is State.CANCELLED
    assert source.memory is (Disposition.QUARANTINED if writers else Disposition.RETURNED)
    assert destination.state is State.CANCELLED
    pair.moved()
    assert [t.memory for t in pair.both()] == [Disposition.RETURNED] * 2
    assert not len(pair.p.state.pool.pins) + len(pair.d.state.pool.pins)


@MODES
def test_the_next_epoch_may_come_after_the_destination_learnt_of_the_end_of_the_last(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    pair.feed(pair.p, events.LeasesVoided((lease_of(pair),)))
    pair.moved()
    assert not pair.posts
    start_over(pair, False)
    succeeds(pair, 5, 6)


@MODES
def test_of_epochs_that_follow_one_another_only_the_last_is_received(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    start_over(pair, False)
    start_over(pair, False, (7, 8), epoch=2)
    pair.moved()
    if not writers:  # the read that waited longest goes first, and its settle is stale
        pair.moved()
    succeeds(pair, 7, 8)


@MODES
def test_however_often_a_prefill_starts_over_the_cap_bounds_its_push(writers: Writers) -> None:
    pair = Pair(writers, lease_cap_s=300.0)
    pair.register(pair.reserve(32, (3, 4)).token)
    sent = pair.finish(32, (1,), last=False).transfer
    for epoch in range(1, 9):
        pair.tick(50.0)
        if pair.p.transfer(sent.id).over:
            break
        start_over(pair, epoch % 2 == 0, (1,), epoch=epoch, last=False)
    assert pair.p.transfer(sent.id).over
    assert pair.p.now - 100.0 <= 300.0
    while pair.posts:
        pair.moved()
    assert not len(pair.p.state.pool.pins)
