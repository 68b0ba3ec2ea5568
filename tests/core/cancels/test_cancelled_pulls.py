"""A pull cancelled at either side ends CANCELLED at both, at every stage; the scope THIS_SIDE ends one side alone."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import BlocksReturnedNews, FailedNews, SendClose
from kvgrpc.core.events import CancelScope, CloseOutcome, LeaseRef, PeerSilent
from kvgrpc.core.tables.accesses import AccessOpening, AccessState
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.transfers import Disposition, Side, State
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.cancels.pulled import (
    STAGES,
    THIS_SIDE,
    at_stage,
    both_cancelled,
    cancel,
    hand_over,
    newest,
    nothing_left,
    pull,
    states,
)
from tests.core.nodes import access_id, claim, grant, key_of
from tests.core.pairs import Pair

ON_ABORTS = pytest.mark.parametrize("on_abort", OnAbort)


@ON_ABORTS
@pytest.mark.parametrize("stage", STAGES)
def test_a_destination_that_is_cancelled_ends_its_source_too(stage: str, on_abort: OnAbort) -> None:
    pair = at_stage(stage, on_abort=on_abort)
    cancel(pair, pair.d)
    both_cancelled(pair)
    failure = pair.both()[0].failure
    assert failure is not None
    assert failure.side is Side.DESTINATION
    nothing_left(pair)


@pytest.mark.parametrize("stage", STAGES)
def test_a_source_that_is_cancelled_ends_its_reader_too(stage: str) -> None:
    pair = at_stage(stage)
    outcome = cancel(pair, pair.p).outcome
    assert outcome == "cancelled_before_access", "a peer that reads cannot hurt its blocks"
    if stage == "opening":
        assert states(pair)[1] is State.PENDING
        pair.recover()
    both_cancelled(pair)
    nothing_left(pair)


def test_a_reader_whose_bytes_are_in_flight_keeps_its_blocks_until_they_are_at_rest() -> None:
    pair = at_stage("wire")
    cancel(pair, pair.p)
    assert pair.both()[1].memory is Disposition.QUARANTINED
    assert [type(news) for news in pair.told["d"]] == [FailedNews]
    assert pair.told["d"][0].cancelled
    assert len(pair.d.state.pool.pins)
    assert not len(pair.p.state.pool.pins), "the source's blocks are free at once"
    pair.moved()
    assert pair.both()[1].memory is Disposition.RETURNED
    assert type(pair.told["d"][-1]) is BlocksReturnedNews


def test_a_reader_that_settles_before_it_hears_of_the_cancel_ends_cancelled_too() -> None:
    pair = at_stage("wire")
    pair.deaf = {SendClose}
    cancel(pair, pair.p)
    pair.moved()
    both_cancelled_by_settling = pair.both()[1]
    assert both_cancelled_by_settling.state is State.CANCELLED
    pair.recover()
    nothing_left(pair)


def test_a_reader_that_renews_before_it_hears_of_the_cancel_ends_cancelled_too() -> None:
    pair = at_stage("blocks")
    pair.deaf = {SendClose}
    cancel(pair, pair.p)
    row = pair.p.call(lambda c: events.RenewLeases(c, (LeaseRef(newest(pair.p).lease_id),))).rows[0]
    assert row == (0.0, Reason.CANCELLED, LeaseState.RELEASED)
    pair.feed(pair.d, events.RenewAnswered(newest(pair.d).id, PreconditionFailed(row[1], "")))
    assert states(pair) == [State.CANCELLED] * 2


def test_a_pull_that_comes_after_the_cancel_of_its_source_is_refused() -> None:
    pair = Pair()
    token = hand_over(pair).token
    cancel(pair, pair.p)
    pull(pair, token)
    both_cancelled(pair)
    nothing_left(pair)


def test_an_opening_that_waits_for_a_step_or_its_peer_is_refused_at_once() -> None:
    for wait in ("step", "liveness"):
        pair = Pair()
        token = hand_over(pair, after_step=5 if wait == "step" else 0).token
        if wait == "liveness":
            pair.feed(pair.p, PeerSilent(key_of(pair.d.me)))
        other = pair.finish(32, (5, 6), waits_for=events.WaitsFor.READERS, key=b"another key here", after_step=5)
        waiting = AccessOpening(access_id(9), other.token, claim(32))
        pair.p.open(pair.d.me, waiting)
        pull(pair, token)
        assert not newest(pair.d).over
        cancel(pair, pair.p)
        both_cancelled(pair, pair.d)
        assert pair.p.state.access.rows[access_id(9)].state is AccessState.WAITING, "of another lease"


def test_one_of_several_readers_is_cancelled_alone_and_the_send_goes_on_for_the_others() -> None:
    pair = Pair()
    token = hand_over(pair, consumers=2, on_abort=OnAbort.KEEP).token
    pull(pair, token)
    pull(pair, token, at=pair.e, number=2, blocks=(8, 9))
    cancel(pair, pair.d)
    sent = newest(pair.p)
    assert (sent.state, sent.consumers_done) == (State.ACTIVE, 1)
    assert newest(pair.e).state is State.ACTIVE
    pair.moved()
    assert newest(pair.e).state is newest(pair.p).state is State.SUCCEEDED
    nothing_left(pair)


def test_a_send_whose_readers_were_all_cancelled_ends_cancelled() -> None:
    pair = Pair()
    token = hand_over(pair, consumers=2, on_abort=OnAbort.KEEP).token
    pull(pair, token)
    pull(pair, token, at=pair.e, number=2, blocks=(8, 9))
    cancel(pair, pair.d)
    cancel(pair, pair.e)
    both_cancelled(pair, pair.p, pair.d, pair.e)
    nothing_left(pair)


def test_a_source_that_is_cancelled_ends_all_that_read_and_leaves_those_that_are_done() -> None:
    pair = Pair()
    token = hand_over(pair, consumers=3).token
    pull(pair, token)
    pair.moved()
    pull(pair, token, at=pair.e, number=2, blocks=(8, 9))
    cancel(pair, pair.p)
    both_cancelled(pair, pair.p, pair.e)
    assert newest(pair.d).state is State.SUCCEEDED
    nothing_left(pair)


def test_a_reader_that_was_over_before_it_heard_stays_as_it_was() -> None:
    pair = at_stage("wire")
    pair.deaf = {SendClose}
    cancel(pair, pair.p)
    pair.feed(pair.d, events.PostingEnded(pair.posts[0][1].posting_id, False, message="broken"))
    ended = newest(pair.d)
    assert ended.state is State.FAILED
    pair.recover()
    assert newest(pair.d) == ended


# -- one side only


@pytest.mark.parametrize("stage", STAGES)
def test_a_destination_that_ends_alone_is_a_consumer_that_failed_and_may_come_again(stage: str) -> None:
    pair = at_stage(stage)
    token = pair.d.state.receive.transfers[newest(pair.d).id].token
    cancel(pair, pair.d, THIS_SIDE)
    assert newest(pair.d).state is State.CANCELLED
    assert not newest(pair.p).over
    pair.recover()
    pair.moved()
    pull(pair, token, number=5)
    pair.moved()
    assert states(pair) == [State.SUCCEEDED] * 2


def test_a_source_that_ends_alone_has_taken_its_blocks_back() -> None:
    pair = at_stage("wire")
    cancel(pair, pair.p, THIS_SIDE)
    assert states(pair) == [State.CANCELLED, State.ACTIVE]
    assert not [action for action in pair.sent if isinstance(action, SendClose)]
    pair.moved()
    failure = newest(pair.d).failure
    assert failure is not None
    assert (newest(pair.d).state, failure.reason) == (State.FAILED, Reason.LEASE_RELEASED)


# -- an engine whose request is aborted


@pytest.mark.parametrize("stage", STAGES)
def test_a_destination_that_aborts_releases_or_keeps_what_its_grant_says(stage: str) -> None:
    released = at_stage(stage, on_abort=OnAbort.RELEASE)
    cancel(released, released.d, CancelScope.ON_ABORT)
    released.recover()
    both_cancelled(released)
    kept = at_stage(stage, on_abort=OnAbort.KEEP)
    cancel(kept, kept.d, CancelScope.ON_ABORT)
    kept.recover()
    assert newest(kept.d).state is State.CANCELLED
    assert not newest(kept.p).over


def test_a_source_that_aborts_ends_its_readers_cancelled() -> None:
    pair = at_stage("wire", on_abort=OnAbort.KEEP)
    cancel(pair, pair.p, CancelScope.ON_ABORT)
    both_cancelled(pair)


@ON_ABORTS
@pytest.mark.parametrize("stage", STAGES)
def test_what_an_aborted_reader_means_is_what_its_grant_says(stage: str, on_abort: OnAbort) -> None:
    pair = at_stage(stage, on_abort=on_abort)
    cancel(pair, pair.d, CancelScope.ON_ABORT)
    assert newest(pair.d).state is State.CANCELLED
    assert newest(pair.p).over is (on_abort is OnAbort.RELEASE)
    if on_abort is OnAbort.RELEASE:
        assert newest(pair.p).state is State.CANCELLED
        nothing_left(pair)


def test_a_source_that_is_aborted_ends_its_readers() -> None:
    pair = at_stage("wire")
    cancel(pair, pair.p, CancelScope.ON_ABORT)
    both_cancelled(pair)


# -- what peers may say


def test_only_the_source_of_a_pull_cancels_it_and_only_by_that_word() -> None:
    pair = at_stage("wire")
    cases = ((pair.e, CloseOutcome.CANCELLED), (pair.p, CloseOutcome.DROPPED), (pair.p, CloseOutcome.FAILED))
    for engine, outcome in cases:
        pair.e.admit(pair.d.me)
        pair.d.admit(pair.e.me)
        row = events.AccessClosing(access_id(1), outcome, quiesced=True)
        me = engine.me.engine_id, engine.me.incarnation
        pair.call(pair.d, lambda c: events.CloseAccess(c, *me, (row,)), "peer")  # noqa: B023
        assert not newest(pair.d).over
    row = events.AccessClosing(access_id(1), CloseOutcome.CANCELLED, quiesced=True)
    pair.call(pair.d, lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    failure = newest(pair.d).failure
    assert failure is not None
    assert (newest(pair.d).state, failure.side) == (State.CANCELLED, Side.SOURCE)


def test_a_cancel_that_comes_while_the_source_is_reached_anew_is_heard() -> None:
    pair = at_stage("opening")
    pair.d.feed(events.AccessAnswered(access_id(1), PreconditionFailed(Reason.NO_HANDSHAKE, "")))
    row = events.AccessClosing(access_id(1), CloseOutcome.CANCELLED, quiesced=True, message="the user left")
    pair.call(pair.d, lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    assert newest(pair.d).state is State.CANCELLED


def test_a_close_that_overtakes_its_opening_and_its_lease_counts_when_the_lease_is_announced() -> None:
    pair = Pair()
    token = grant(pair.p.me, lease_id="l-early")
    row = events.AccessClosing(
        access_id(1), CloseOutcome.CANCELLED, quiesced=True, token=token, message="the user left"
    )
    pair.call(pair.p, lambda c: events.CloseAccess(c, "d", 2, (row,)), "peer")
    hand_over(pair, lease_id="l-early", on_abort=OnAbort.KEEP)
    both_cancelled(pair, pair.p)
