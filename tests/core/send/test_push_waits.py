"""Every wait of a push ends, and unanswered calls are retried."""

from kvgrpc.core import actions, events
from kvgrpc.core.actions import SendClose, SendParts, SendRegister, SendSettle
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from tests.core.nodes import access_id, key_of
from tests.core.pairs import MODES, UNREACHABLE, WRITING, Pair, Writers
from tests.core.send.started_pushes import started, waits_for_another


@MODES
def test_a_registration_without_parts_ends_at_both(writers: Writers) -> None:
    pair = Pair(writers, registration_timeout_s=20.0)
    pair.register(pair.reserve(32).token)
    pair.tick(20.0)
    assert pair.reasons() == [Reason.REGISTRATION_TIMEOUT, Reason.REGISTRATION_TIMEOUT]
    assert not len(pair.d.state.pool.pins)


def test_parts_without_a_registration_end() -> None:
    pair = Pair(registration_timeout_s=20.0)
    sent = pair.finish(32).transfer
    pair.tick(20.0)
    failure = pair.p.transfer(sent.id).failure
    assert failure is not None
    assert failure.reason is Reason.REGISTRATION_TIMEOUT
    assert [type(news) for news in pair.told["p"]] == [actions.FailedNews, actions.BlocksReturnedNews]


@MODES
def test_each_part_starts_the_registrations_clock_anew_up_to_the_cap(writers: Writers) -> None:
    pair = Pair(writers, registration_timeout_s=20.0, lease_cap_s=70.0)
    pair.register(pair.reserve(160).token)
    for i in range(4):
        pair.tick(15.0)
        pair.finish(160, (i,), last=False)
        pair.moved()
        assert [t.over for t in pair.both()] == [False, False]
    pair.tick(15.0)
    assert pair.reasons()[1] is Reason.REGISTRATION_TIMEOUT
    pair.tick(60.0)
    assert all(t.over for t in pair.both())
    assert not len(pair.d.state.pool.pins) + len(pair.p.state.pool.pins)


@MODES
def test_bytes_that_take_too_long_end_the_push_at_both(writers: Writers) -> None:
    pair = started(writers)
    pair.tick(31.0)
    pair.moved()
    assert pair.both()[1].memory is Disposition.RETURNED
    assert not len(pair.d.state.pool.pins)
    waits_for_another(pair, Reason.TRANSFER_TIMEOUT)


@MODES
def test_bytes_of_a_push_have_time_by_their_number_at_both(writers: Writers) -> None:
    """The source keeps its blocks, and the destination waits, as long as the side that moves the bytes may take."""
    pair = Pair(writers, transfer_timeout_s=30.0, least_bytes_per_s=0.1, registration_timeout_s=20.0)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    nbytes = pair.both()[0].nbytes
    assert nbytes > 10
    pair.tick(10 * nbytes - 1.0)
    assert [t.over for t in pair.both()] == [False, False]
    pair.moved()
    assert [t.state for t in pair.both()] == [State.SUCCEEDED, State.SUCCEEDED]


@MODES
def test_a_settling_that_is_not_answered_is_asked_again_and_given_up(writers: Writers) -> None:
    pair = started(writers)
    pair.deaf = {SendSettle}
    pair.moved()
    mover = pair.p if writers else pair.d
    (settle,) = [action for _, action in pair.lost]
    assert isinstance(settle, SendSettle)
    pair.feed(mover, events.SettleAnswered(settle.settling.access_id, UNREACHABLE, retryable=True))
    pair.feed(mover, events.Tick(), 0.3)
    assert len(pair.lost) == 2
    pair.recover()
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2
    late = started(writers)
    late.deaf = {SendSettle, SendClose}
    late.moved()
    late.tick(6.0)
    if writers:
        assert not late.both()[0].over
        assert "did not say in time" in late.p.state.send.leases.get(late.both()[0].lease_id).trouble
    else:
        assert late.reasons()[1] is Reason.SETTLE_TIMEOUT


@MODES
def test_the_verdict_on_a_part_is_the_same_when_it_is_asked_for_again(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False)
    pair.moved()
    issuer, asking, number = (pair.d, pair.p, 10) if writers else (pair.p, pair.d, 11)
    done = pair.both()[1].nbytes_done
    row = events.AccessSettling(access_id(number), last=False, nbytes=16)
    again = issuer.call(
        lambda c: events.SettleAccess(c, asking.me.engine_id, asking.me.incarnation, (row,)), principal="peer"
    )
    assert again.rows[0].valid
    assert pair.both()[1].nbytes_done == done
    pair.finish(32, (2,))
    pair.moved()
    assert issuer.settle(asking.me, number).valid


def told_late(pair: Pair) -> SendParts:
    """Starts a push whose second part the destination does not hear of, and returns the lost `SendParts`."""
    pair.register(pair.reserve(32).token)
    pair.finish(32, (1,), last=False)
    pair.moved()
    pair.deaf = {SendParts}
    pair.finish(32, (2,))
    ((_, parts),) = pair.lost
    assert isinstance(parts, SendParts)
    return parts


def test_parts_that_are_not_answered_are_told_again() -> None:
    pair = Pair()
    parts = told_late(pair)
    pair.feed(pair.p, events.PartsAnswered(access_id(99), None))
    pair.feed(pair.p, events.PartsAnswered(parts.access_id, UNREACHABLE, retryable=True))
    pair.feed(pair.p, events.Tick(), 0.3)
    assert len(pair.lost) == 2
    pair.recover()
    assert len(pair.posts) == 1, "parts that are known already are skipped"
    refusing = Pair()
    told_late(refusing)
    refusing.feed(refusing.p, events.PartsAnswered(access_id(10), Unavailable(Reason.INVALID_FIELD, "no")))
    waits_for_another(refusing, Reason.SOURCE_FAILED)


def test_parts_that_come_while_others_are_told_are_told_after_them() -> None:
    pair = Pair()
    pair.register(pair.reserve(48).token)
    pair.finish(48, (1,), last=False)
    pair.moved()
    pair.deaf = {SendParts}
    pair.finish(48, (2,), last=False)
    pair.finish(48, (3,))
    assert len(pair.lost) == 1
    pair.recover()
    while pair.posts:
        pair.moved()
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


def test_a_registration_that_is_not_answered_is_sent_again() -> None:
    pair = Pair()
    pair.deaf = {SendRegister}
    landing = pair.reserve(32, source=events.PushSource("p:1")).transfer
    pair.feed(pair.d, events.RegisterAnswered(landing.id, key_of(pair.p.me), UNREACHABLE, retryable=True))
    pair.feed(pair.d, events.Tick(), 0.3)
    assert len(pair.lost) == 2
    pair.recover()
    assert next(iter(pair.p.state.transfers)).waiting_for == "parts"
    other, source = Pair(), key_of(pair.p.me)
    other.deaf = {SendRegister}
    landing = other.reserve(32, source=events.PushSource("p:1")).transfer
    other.feed(other.d, events.RegisterAnswered(landing.id, source, PreconditionFailed(Reason.DRAINING, "no")))
    failure = other.d.transfer(landing.id).failure
    assert failure is not None
    assert failure.reason is Reason.DRAINING
    other.feed(other.d, events.RegisterAnswered(landing.id, source, None))


@MODES
def test_parts_wait_for_the_engines_steps(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(48).token)
    pair.finish(48, (1,), last=False, after_step=1)
    pair.finish(48, (2,), last=False, after_step=2)
    pair.feed(pair.p, events.StepDone(0, 1, layers=(0, 1)))
    assert not pair.posts, "some layers are not the step"
    pair.feed(pair.p, events.StepDone(0, 1))
    assert len(pair.posts) == 1
    pair.moved()
    assert not pair.posts
    pair.feed(pair.p, events.StepDone(0, 2))
    pair.finish(48, (3,))
    pair.moved()
    pair.moved()
    assert pair.both()[1].state is State.SUCCEEDED


def test_a_source_writes_only_after_the_destinations_step() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, after_step=3).token)
    pair.finish(32)
    assert not pair.posts
    pair.feed(pair.d, events.StepDone(0, 3))
    assert [expect.writes for expect in pair.d.seen(actions.Expect)] == [False, True]


def test_a_source_opens_only_while_it_is_heard() -> None:
    pair = Pair(WRITING)
    pair.feed(pair.d, events.PeerSilent(key_of(pair.p.me)))
    pair.register(pair.reserve(32).token)
    pair.finish(32)
    assert not pair.posts
    pair.feed(pair.d, events.PeerAlive(key_of(pair.p.me)))
    assert pair.d.seen(actions.Expect)
