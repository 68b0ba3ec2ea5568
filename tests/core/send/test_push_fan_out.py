"""One push to several destinations, and a destination that takes the place of a failed one."""

from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import SendClose
from kvgrpc.core.tables.transfers import State, Transfer
from kvgrpc.core.values.grants import AccessKind, OnAbort
from kvgrpc.errors import Reason
from tests.core.nodes import KEY, Lead, access_id, grant, key_of, refused
from tests.core.pairs import MODES, Pair, Writers


def sent(pair: Pair) -> Transfer:
    found: Transfer = next(iter(pair.p.state.transfers))
    return found


def landed(lead: Lead) -> Transfer:
    found: Transfer = next(iter(lead.state.transfers))
    return found


def two(writers: Writers, **fields: Any) -> Pair:
    """Registers two destinations, and starts moving the first part to both."""
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.register(pair.reserve(32, (8, 9), at=pair.e).token, number=40)
    pair.finish(32, (1,), last=False, consumers=2, **fields)
    return pair


@MODES
def test_every_destination_gets_every_part_and_the_blocks_live_until_the_last_is_done(writers: Writers) -> None:
    pair = two(writers)
    pair.moved(1)
    pair.finish(32, (2,))
    while len(pair.posts) > 1:
        pair.moved(1)
    states = sorted([landed(pair.d).state.value, landed(pair.e).state.value])
    assert states == ["active", "succeeded"]
    assert (sent(pair).over, sent(pair).consumers, sent(pair).consumers_done) == (False, 2, 1)
    assert len(pair.p.state.pool.pins)
    pair.moved()
    assert [landed(pair.d).state, landed(pair.e).state, sent(pair).state] == [State.SUCCEEDED] * 3
    assert sent(pair).consumers_done == 2
    assert not len(pair.p.state.pool.pins)
    assert [type(news) for news in pair.told["p"]] == [actions.BlocksReturnedNews]


@MODES
def test_one_that_registers_late_gets_what_came_before(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False, consumers=2)
    pair.moved()
    pair.finish(32, (2,))
    pair.moved()
    assert landed(pair.d).state is State.SUCCEEDED
    assert pair.register(pair.reserve(32, (8, 9), at=pair.e).token, number=40).transfer.id == sent(pair).id
    pair.moved()
    assert [landed(pair.e).state, sent(pair).state] == [State.SUCCEEDED] * 2


@MODES
@pytest.mark.parametrize("on_abort", OnAbort)
def test_a_destination_that_is_gone_is_done_unless_the_hand_over_keeps_its_place(
    writers: Writers, on_abort: OnAbort
) -> None:
    pair = two(writers, on_abort=on_abort)
    number = 10 if writers else 11
    row = events.AccessClosing(access_id(number), events.CloseOutcome.DROPPED, quiesced=True)
    me = pair.d.me.engine_id, pair.d.me.incarnation
    pair.call(pair.p, lambda c: events.CloseAccess(c, *me, (row,)), "peer")
    pair.finish(32, (2,))
    while pair.posts:
        pair.moved()
    assert landed(pair.e).state is State.SUCCEEDED
    assert sent(pair).over is (on_abort is OnAbort.RELEASE)
    if on_abort is OnAbort.RELEASE:
        assert sent(pair).state is State.SUCCEEDED
        return
    pair.tick(125.0)
    failure = sent(pair).failure
    assert failure is not None
    assert failure.reason is Reason.REGISTRATION_TIMEOUT


@MODES
def test_another_destination_takes_the_place_of_one_that_failed(writers: Writers) -> None:
    pair = Pair(writers)
    token = pair.reserve(32, (3, 4)).token
    pair.register(token)
    pair.finish(32, (1, 2))
    pair.moved(done=False, message="broken")
    assert landed(pair.d).state is State.FAILED
    assert (sent(pair).over, sent(pair).waiting_for) == (False, "registration")
    with refused(Reason.TRANSFER_ENDED):
        pair.register(token)
    pair.register(pair.reserve(32, (8, 9), at=pair.e).token, number=40)
    pair.moved()
    assert [landed(pair.e).state, sent(pair).state] == [State.SUCCEEDED] * 2
    assert not len(pair.p.state.pool.pins)


@MODES
def test_more_destinations_than_declared_are_refused(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.register(pair.reserve(32, (8, 9), at=pair.e).token, number=40)
    pair.finish(32, (1, 2))
    assert landed(pair.e).state is State.FAILED
    failure = landed(pair.e).failure
    assert failure is not None
    assert "1 destinations already" in failure.message
    pair.moved()
    assert [landed(pair.d).state, sent(pair).state] == [State.SUCCEEDED] * 2


@MODES
def test_all_who_came_for_a_push_that_is_done_when_its_first_part_comes_are_told(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.feed(pair.p, events.PeerSilent(key_of(pair.d.me)))
    pair.feed(pair.p, events.Tick(), 11.0)
    pair.replace_destination(writers)
    pair.register(pair.reserve(32, (3, 4)).token, number=20)
    pair.register(pair.reserve(32, (8, 9), at=pair.e).token, number=40)
    pair.finish(32, (1, 2))
    assert sent(pair).over, "the one destination that it is for gave up, and that counts"
    assert all(transfer.over for lead in (pair.d, pair.e) for transfer in lead.state.transfers)
    assert not any(len(lead.state.pool.pins) for lead in (pair.p, pair.d, pair.e))


def test_registrations_that_no_part_followed_are_bounded() -> None:
    pair = Pair(registrations=1)
    pair.register(pair.reserve(32, (3, 4)).token)
    late = pair.reserve(32, (8, 9), at=pair.e).token
    with refused(Reason.TRANSFER_EXISTS):
        pair.register(late, number=40)


@MODES
def test_a_destination_that_dies_leaves_the_others_alone(writers: Writers) -> None:
    pair = two(writers)
    pair.deaf = {SendClose}
    pair.feed(pair.p, events.PeerSilent(key_of(pair.d.me)))
    pair.feed(pair.p, events.Tick(), 11.0)
    pair.deaf.clear()
    pair.finish(32, (2,))
    pair.moved()
    pair.moved()
    assert landed(pair.e).state is State.SUCCEEDED
    assert sent(pair).over


@MODES
def test_a_source_that_cannot_deliver_tells_every_destination(writers: Writers) -> None:
    pair = two(writers)
    pair.finish(failure="no", blocks=(), content=None)
    pair.moved()
    for lead in (pair.p, pair.d, pair.e):
        failure = landed(lead).failure
        assert failure is not None
        assert failure.reason is Reason.SOURCE_FAILED
        assert not len(lead.state.pool.pins)


@MODES
def test_a_destination_that_gave_up_before_the_first_part_counts_by_on_abort(writers: Writers) -> None:
    for on_abort in OnAbort:
        pair = Pair(writers)
        reserved = pair.reserve(32, (3, 4))
        pair.register(reserved.token)
        pair.deaf = {SendClose}
        pair.feed(pair.p, events.PeerSilent(key_of(pair.d.me)))
        pair.feed(pair.p, events.Tick(), 11.0)
        assert not sent(pair).over
        pair.finish(32, (1, 2), on_abort=on_abort)
        assert sent(pair).over is (on_abort is OnAbort.RELEASE)


@pytest.mark.parametrize("parts_first", [False, True])
@pytest.mark.parametrize("on_abort", list(OnAbort))
def test_a_destination_that_gave_up_before_it_met_its_source_counts_too(parts_first: bool, on_abort: OnAbort) -> None:
    pair = Pair()
    token = pair.reserve(32, (3, 4)).token
    if parts_first:
        pair.finish(32, (1, 2), on_abort=on_abort)
    row = events.AccessClosing(access_id(77), events.CloseOutcome.DROPPED, quiesced=True, token=token)
    me = pair.d.me.engine_id, pair.d.me.incarnation
    pair.call(pair.p, lambda c: events.CloseAccess(c, *me, (row,)), "peer")
    if not parts_first:
        pair.finish(32, (1, 2), on_abort=on_abort)
    assert sent(pair).over is (on_abort is OnAbort.RELEASE)
    assert "it gave up" in pair.p.state.send.leases.get(sent(pair).lease_id).trouble


def test_a_push_is_given_up_only_by_destinations_of_it_that_speak_for_themselves() -> None:
    for wrong in ("engine", "grant", "failure", "key", "readers"):
        pair = Pair()
        token = pair.reserve(32, (3, 4)).token
        if wrong == "key":
            pair.call(pair.p, lambda c: events.CancelTransfer(c, key=KEY))
        elif wrong == "readers":
            pair.finish(32, (1, 2), waits_for=events.WaitsFor.READERS, last=True)
        row = events.AccessClosing(
            access_id(77),
            events.CloseOutcome.FAILED if wrong == "failure" else events.CloseOutcome.DROPPED,
            quiesced=True,
            token=token if wrong != "grant" else grant(pair.d.me),
        )
        before = len(list(pair.p.state.transfers))
        me = (pair.e if wrong == "engine" else pair.d).me
        pair.call(pair.p, lambda c: events.CloseAccess(c, me.engine_id, me.incarnation, (row,)), "peer")  # noqa: B023
        assert len(list(pair.p.state.transfers)) == before, wrong


def test_a_push_without_a_destination_says_why_the_last_one_failed() -> None:
    pair = Pair()
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.feed(pair.p, events.PeerSilent(key_of(pair.d.me)))
    pair.feed(pair.p, events.Tick(), 125.0)
    failure = sent(pair).failure
    assert failure is not None
    assert failure.reason is Reason.REGISTRATION_TIMEOUT
    assert "declared dead" in failure.message


@MODES
def test_layers_move_as_soon_as_the_step_has_written_them(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2), last=False, layers=(0, 1), after_step=5)
    pair.finish(32, (1, 2), layers=(1, 1), after_step=5)
    assert not pair.posts
    assert sent(pair).waiting_for == "step"
    pair.feed(pair.p, events.StepDone(0, 5, layers=(0, 1)))
    pair.moved()
    assert landed(pair.d).layers_done == ((0, 1),)
    assert not pair.posts
    pair.feed(pair.p, events.StepDone(0, 5))
    pair.moved()
    assert landed(pair.d).state is State.SUCCEEDED


def test_destinations_that_fail_one_after_another_are_bounded_too() -> None:
    pair = Pair(registrations=2)
    pair.finish(32, (1, 2))
    for attempt in range(2):
        pair.register(grant(pair.d.me, access=AccessKind.WRITE, lease_id=f"forged {attempt}"), number=40 + 10 * attempt)
        assert sent(pair).waiting_for == "registration"
    with refused(Reason.TRANSFER_EXISTS):
        pair.register(grant(pair.d.me, access=AccessKind.WRITE, lease_id="one more"), number=90)
