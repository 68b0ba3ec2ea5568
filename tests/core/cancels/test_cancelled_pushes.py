"""A push cancelled at either side ends CANCELLED at both, whichever side moves the bytes and however far it is."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import BlocksReturnedNews, SendClose, SendOpen, SendParts, SendRegister, SendSettle
from kvgrpc.core.events import CancelScope, CloseOutcome, LeasesVoided, PushSource
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.errors import Reason
from tests.core.cancels.pulled import THIS_SIDE, both_cancelled, cancel, newest, nothing_left, states
from tests.core.nodes import Lead, access_id, key_of, refused
from tests.core.pairs import MODES, WRITING, Pair, Writers

STAGES = ("registered", "opening", "parts", "wire", "between parts", "settling")


def reserve(pair: Pair, at: Lead, *blocks: int) -> None:
    """Reserves blocks at a destination, whose lead registers them at the source."""
    pair.reserve(32, blocks, at=at, source=PushSource(pair.p.me.address, "p"))


def at_stage(stage: str, writers: Writers, **fields: object) -> Pair:
    """Brings a push to a stage; both sides know of each other."""
    pair = Pair(writers)
    reserve(pair, pair.d, 3, 4)
    if stage == "registered":
        return pair
    if stage == "opening":
        pair.deaf = {SendOpen}
    if stage == "settling":
        pair.deaf = {SendSettle}
    step = 5 if stage == "parts" else 0
    last = stage in ("wire", "settling")
    blocks = (1, 2) if last else (1,)
    pair.finish(32, blocks, last=last, after_step=step, **fields)
    if stage in ("between parts", "settling"):
        pair.moved()
    return pair


@MODES
@pytest.mark.parametrize("on_abort", OnAbort)
@pytest.mark.parametrize("stage", STAGES)
def test_a_destination_that_is_cancelled_ends_its_source_too(stage: str, on_abort: OnAbort, writers: Writers) -> None:
    fields = {} if stage == "registered" else {"on_abort": on_abort}
    pair = at_stage(stage, writers, **fields)
    cancel(pair, pair.d)
    pair.recover()
    both_cancelled(pair)
    nothing_left(pair)


@MODES
@pytest.mark.parametrize("stage", STAGES)
def test_a_destination_that_aborts_ends_its_source_too(stage: str, writers: Writers) -> None:
    pair = at_stage(stage, writers)
    cancel(pair, pair.d, CancelScope.ON_ABORT)
    pair.recover()
    both_cancelled(pair)
    nothing_left(pair)


@MODES
@pytest.mark.parametrize("stage", ["registered", "opening"])
def test_a_destination_that_aborts_before_it_knows_of_a_hand_over_ends_its_source_too(
    stage: str, writers: Writers
) -> None:
    pair = at_stage(stage, writers, on_abort=OnAbort.KEEP)
    cancel(pair, pair.d, CancelScope.ON_ABORT)
    pair.recover()
    both_cancelled(pair)


@MODES
@pytest.mark.parametrize("stage", STAGES)
def test_a_source_that_is_cancelled_ends_its_destination_too(stage: str, writers: Writers) -> None:
    pair = at_stage(stage, writers)
    cancel(pair, pair.p)
    both_cancelled(pair)
    nothing_left(pair)


@MODES
@pytest.mark.parametrize("first", ["source", "destination"])
def test_blocks_that_are_moved_into_stay_in_quarantine_until_they_are_at_rest(first: str, writers: Writers) -> None:
    pair = at_stage("wire", writers)
    outcome = cancel(pair, pair.p if first == "source" else pair.d).outcome
    moves = first == "source" if writers else first == "destination"
    into = first == "destination"
    assert outcome == ("cancelled_in_flight" if moves or into else "cancelled_before_access")
    assert newest(pair.d).memory is Disposition.QUARANTINED
    assert newest(pair.p).memory is (Disposition.QUARANTINED if writers else Disposition.RETURNED)
    pair.moved()
    assert [newest(lead).memory for lead in (pair.p, pair.d)] == [Disposition.RETURNED] * 2
    assert [type(pair.told[name][-1]) for name in ("p", "d")] == [BlocksReturnedNews] * 2


@MODES
def test_a_word_that_is_lost_is_said_again_as_what_it_was(writers: Writers) -> None:
    for who in ("p", "d"):
        pair = at_stage("wire", writers)
        pair.deaf = {SendClose}
        cancel(pair, getattr(pair, who))
        pair.moved()
        pair.lost.clear()
        pair.deaf.clear()
        for lead in (pair.p, pair.d):
            for access in list(lead.state.moves.closes.sent):
                pair.feed(lead, events.CloseAnswered(access, answered=False))
        pair.tick(1.0)
        both_cancelled(pair, getattr(pair, who))
        assert newest(pair.p).state is newest(pair.d).state is State.CANCELLED


def test_a_source_that_opens_or_tells_or_settles_after_the_cancel_is_told_so() -> None:
    for late in (SendOpen, SendParts):
        pair = at_stage("parts" if late is SendParts else "registered", frozenset())
        pair.deaf = {late}
        if late is SendParts:
            pair.feed(pair.p, events.StepDone(0, 5))
        else:
            pair.finish(32, (1, 2))
        pair.deaf |= {SendClose}
        cancel(pair, pair.d)
        assert not newest(pair.p).over
        pair.lost = [(lead, action) for lead, action in pair.lost if type(action) is late]
        pair.recover()
        both_cancelled(pair)


def test_a_source_that_settles_what_it_wrote_after_the_cancel_is_told_so() -> None:
    pair = at_stage("wire", WRITING)
    pair.deaf = {SendClose}
    cancel(pair, pair.d)
    pair.moved()
    assert states(pair) == [State.CANCELLED] * 2


def test_a_registration_that_comes_after_the_cancel_of_its_source_is_refused() -> None:
    pair = Pair()
    pair.finish(32, (1, 2))
    cancel(pair, pair.p)
    pair.reserve(32, (3, 4), source=PushSource(pair.p.me.address, "p"))
    both_cancelled(pair)
    nothing_left(pair)


def test_a_destination_that_is_cancelled_before_it_is_registered_ends_what_its_source_hands_over() -> None:
    for parts_first in (True, False):
        pair = Pair()
        if parts_first:
            pair.finish(32, (1, 2), on_abort=OnAbort.KEEP)
        pair.deaf = {SendRegister}
        pair.reserve(32, (3, 4), source=PushSource(pair.p.me.address, "p"))
        pair.call(pair.d, lambda c: events.CancelTransfer(c, newest(pair.d).id, message="the user left"))  # noqa: B023
        if parts_first:
            both_cancelled(pair)
        else:
            with refused(Reason.CANCELLED):
                pair.finish(32, (1, 2))
        pair.recover()
        assert len(list(pair.p.state.transfers)) == parts_first, "its registration comes too late"
        nothing_left(pair)


def test_a_source_that_was_not_told_by_a_destination_that_knows_none_learns_it_when_it_opens() -> None:
    pair = Pair()
    token = pair.reserve(32, (3, 4)).token
    cancel(pair, pair.d)
    pair.finish(32, (1, 2))
    pair.register(token)
    both_cancelled(pair)


# -- several destinations


def two(writers: Writers, **fields: object) -> Pair:
    pair = Pair(writers)
    reserve(pair, pair.d, 3, 4)
    reserve(pair, pair.e, 8, 9)
    if fields:
        pair.finish(32, (1,), last=False, **fields)
    return pair


@MODES
@pytest.mark.parametrize("on_abort", OnAbort)
def test_one_of_several_destinations_is_cancelled_alone(writers: Writers, on_abort: OnAbort) -> None:
    pair = two(writers, consumers=2, on_abort=on_abort)
    cancel(pair, pair.d)
    assert not newest(pair.p).over
    pair.finish(32, (2,))
    while pair.posts:
        pair.moved()
    assert newest(pair.e).state is newest(pair.p).state is State.SUCCEEDED
    assert newest(pair.d).state is State.CANCELLED
    nothing_left(pair)


@MODES
def test_a_push_whose_destinations_were_all_cancelled_ends_cancelled(writers: Writers) -> None:
    for fields in ({}, {"consumers": 2, "on_abort": OnAbort.KEEP}):
        pair = two(writers, **fields)
        cancel(pair, pair.d)
        assert not newest(pair.p).over, "the other one goes on"
        cancel(pair, pair.e)
        both_cancelled(pair, pair.p, pair.d, pair.e)
        nothing_left(pair)


@MODES
def test_a_push_of_which_more_destinations_are_declared_waits_for_them(writers: Writers) -> None:
    pair = Pair(writers)
    reserve(pair, pair.d, 3, 4)
    made = pair.finish(32, (1,), last=False, consumers=2)
    pair.feed(pair.p, LeasesVoided((made.lease.id,)))
    cancel(pair, pair.d)
    assert not newest(pair.p).over
    reserve(pair, pair.e, 8, 9)
    cancel(pair, pair.e)
    both_cancelled(pair, pair.p, pair.d, pair.e)


@MODES
def test_a_source_that_is_cancelled_ends_all_its_destinations(writers: Writers) -> None:
    pair = two(writers, consumers=2)
    cancel(pair, pair.p)
    both_cancelled(pair, pair.p, pair.d, pair.e)
    nothing_left(pair)


@pytest.mark.parametrize("outcome", CloseOutcome)
@pytest.mark.parametrize("again", [False, True])
def test_a_destination_that_failed_and_then_gives_up_is_done_unless_it_has_come_again(
    outcome: CloseOutcome, again: bool
) -> None:
    pair = at_stage("parts", frozenset())
    failed = events.AccessClosing(access_id(31), CloseOutcome.FAILED, quiesced=True)
    pair.deaf = {SendClose}
    pair.call(pair.p, lambda c: events.CloseAccess(c, "d", 2, (failed,)), "peer")
    assert newest(pair.p).waiting_for == "registration"
    token = next(token for push in pair.p.state.send.pushes for token in push.registrations)
    if again:
        cancel(pair, pair.d, THIS_SIDE)
        reserve(pair, pair.d, 5, 6)
    row = events.AccessClosing(access_id(70), outcome, quiesced=True, token=token, message="the user left")
    pair.call(pair.p, lambda c: events.CloseAccess(c, "d", 2, (row,)), "peer")
    assert newest(pair.p).over is (outcome is not CloseOutcome.FAILED and not again)


@MODES
@pytest.mark.parametrize("on_abort", OnAbort)
@pytest.mark.parametrize("stage", ["parts", "wire", "between parts"])
def test_what_an_aborted_destination_means_is_what_the_hand_over_says(
    stage: str, on_abort: OnAbort, writers: Writers
) -> None:
    pair = at_stage(stage, writers, on_abort=on_abort)
    cancel(pair, pair.d, CancelScope.ON_ABORT)
    assert newest(pair.d).state is State.CANCELLED
    pair.recover()
    pair.moved()
    assert newest(pair.p).over is (on_abort is OnAbort.RELEASE)


# -- one side only


@MODES
@pytest.mark.parametrize("stage", STAGES)
def test_a_destination_that_ends_alone_leaves_its_place_to_another(stage: str, writers: Writers) -> None:
    pair = at_stage(stage, writers)
    cancel(pair, pair.d, THIS_SIDE)
    assert newest(pair.d).state is State.CANCELLED
    pair.recover()
    pair.moved()
    assert not newest(pair.p).over
    pair.register(pair.reserve(32, (8, 9), at=pair.e).token, number=40)
    assert newest(pair.e).state in (State.PENDING, State.ACTIVE)


@MODES
@pytest.mark.parametrize("stage", STAGES)
def test_a_source_that_ends_alone_fails_its_destination(stage: str, writers: Writers) -> None:
    pair = at_stage(stage, writers)
    cancel(pair, pair.p, THIS_SIDE)
    pair.deaf.clear()
    pair.moved()
    assert states(pair) == [State.CANCELLED, State.FAILED]
    failure = newest(pair.d).failure
    assert failure is not None
    assert failure.reason in (Reason.SOURCE_FAILED, Reason.LEASE_RELEASED)


def test_a_destination_that_comes_after_a_source_ended_alone_is_not_told_that_it_was_cancelled() -> None:
    pair = Pair()
    pair.finish(32, (1,), last=False)
    cancel(pair, pair.p, THIS_SIDE)
    with refused(Reason.TRANSFER_ENDED):
        pair.register(pair.reserve(32, (3, 4)).token)


def test_a_source_whose_destination_was_declared_dead_goes_on() -> None:
    pair = at_stage("registered", frozenset())
    pair.deaf = {SendClose}
    pair.feed(pair.p, events.PeerSilent(key_of(pair.d.me)))
    pair.feed(pair.p, events.Tick(), 11.0)
    assert not newest(pair.p).over


def lead_of(pair: Pair, name: str) -> Lead:
    found: Lead = getattr(pair, name)
    return found


def test_a_verdict_that_was_given_before_the_cancel_stands() -> None:
    pair = at_stage("settling", frozenset())
    pair.recover()
    assert states(pair) == [State.SUCCEEDED] * 2
    for name in ("p", "d"):
        assert cancel(pair, lead_of(pair, name)).outcome == "already_ended"
    assert states(pair) == [State.SUCCEEDED] * 2
