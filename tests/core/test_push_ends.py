"""How pushes end that do not succeed: who is told, and when the blocks come back."""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import SendClose, SendOpen, SendParts, SendRegister, SendSettle
from kvgrpc.core.pins import PinKind
from kvgrpc.core.transfers import Disposition, State
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from tests.core.nodes import KEY, access_id, describe, endpoints, key_of, lists, refused
from tests.core.pairs import READING, UNREACHABLE, WRITING, Pair

MODES = pytest.mark.parametrize("writers", [READING, WRITING], ids=["destination moves", "source moves"])


def started(writers: frozenset[str], **fields: Any) -> Pair:
    """A push whose bytes are in flight."""
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2), **fields)
    assert len(pair.posts) == 1
    return pair


def ended(pair: Pair, source: State, destination: State) -> None:
    """Both are over and nothing is pinned any more."""
    assert [t.state for t in pair.both()] == [source, destination]
    assert [t.memory for t in pair.both()] == [Disposition.RETURNED] * 2
    assert not len(pair.p.state.pins)
    assert not len(pair.d.state.pins)
    for told, engine in ((pair.told["p"], "p"), (pair.told["d"], "d")):
        assert [type(news) for news in told][-2:] == [actions.Failed, actions.BlocksReturned], engine


def waits_for_another(pair: Pair, why: Reason) -> None:
    """The destination's end is not the source's: another may come, until the push has had its time."""
    source, destination = pair.both()
    assert (source.over, source.waiting_for) == (False, "registration")
    assert pair.reasons()[1] in (why, Reason.SOURCE_FAILED, Reason.PEER_FAILED)
    assert not pair.p.state.leases.get(source.lease_id).accesses
    assert not destination or destination.over
    pair.deaf = {SendClose}
    pair.tick(125.0)
    failure = pair.both()[0].failure
    assert failure is not None
    assert failure.reason is Reason.REGISTRATION_TIMEOUT
    assert "engine d: " in failure.message
    assert not len(pair.p.state.pins)


@MODES
def test_a_source_that_cannot_deliver_says_so_before_any_part(writers: frozenset[str]) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32).token)
    answer = pair.finish(failure="out of memory", blocks=(), content=None)
    assert isinstance(answer, actions.GaveUp)
    assert answer.transfer is not None
    assert answer.transfer.state is State.FAILED
    assert pair.reasons() == [Reason.SOURCE_FAILED, Reason.SOURCE_FAILED]
    assert pair.both()[1].memory is Disposition.RETURNED
    assert not len(pair.d.state.pins)
    with refused(Reason.SOURCE_FAILED):
        pair.finish(32)


def test_a_source_that_cannot_deliver_refuses_whoever_registers_later() -> None:
    pair = Pair()
    token = pair.reserve(32).token
    assert pair.finish(failure="no", blocks=(), validate_only=True) == actions.GaveUp(None)
    assert pair.finish(failure="no", blocks=()) == actions.GaveUp(None)
    with refused(Reason.SOURCE_FAILED):
        pair.register(token)


@MODES
@pytest.mark.parametrize("who", ["failure", "cancel", "release"])
def test_what_the_source_ends_in_flight_comes_back_when_it_is_at_rest(writers: frozenset[str], who: str) -> None:
    pair = started(writers)
    sent, lease_id = pair.both()[0], pair.both()[0].lease_id
    if who == "failure":
        pair.finish(failure="no", blocks=())
    elif who == "cancel":
        answer = pair.call(pair.p, lambda c: events.CancelTransfer(c, sent.id))
        assert answer.outcome == ("cancelled_in_flight" if writers else "cancelled_before_access")
    else:
        pair.call(pair.p, lambda c: events.ReleaseLease(c, events.LeaseRef(lease_id)))
    source, destination = pair.both()
    assert source.state is (State.FAILED if who == "failure" else State.CANCELLED)
    assert source.memory is (Disposition.QUARANTINED if writers else Disposition.RETURNED)
    assert pair.p.state.pins.has(f"{source.id}#1", PinKind.ACCESS) is bool(writers)
    assert bool(pair.p.node.missing_proof(source.id)) is bool(writers)
    assert (destination.state, destination.memory) == (State.FAILED, Disposition.QUARANTINED)
    assert pair.d.node.missing_proof(destination.id)
    pair.moved()
    ended(pair, source.state, State.FAILED)


@MODES
def test_what_the_destination_cancels_in_flight_comes_back_when_it_is_at_rest(writers: frozenset[str]) -> None:
    pair = started(writers)
    landing = pair.both()[1]
    answer = pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    assert answer.outcome == "cancelled_in_flight"
    assert pair.both()[1].memory is Disposition.QUARANTINED
    pair.moved()
    assert [t.memory for t in pair.both()] == [Disposition.RETURNED] * 2
    assert pair.both()[0].state is State.CANCELLED
    assert not len(pair.d.state.pins) + len(pair.p.state.pins)


@pytest.mark.parametrize("quiesced", [True, False])
def test_a_closing_proves_what_was_written_to_be_at_rest_only_if_it_says_so(quiesced: bool) -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    row = events.Closing(access_id(10), True, quiesced)
    pair.call(pair.d, lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    assert (pair.both()[1].memory is Disposition.RETURNED) is quiesced


def test_a_foreign_engine_proves_nothing() -> None:
    pair = started(WRITING)
    other = describe("x", 7)
    pair.d.admit(other)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    row = events.Closing(access_id(10), True, quiesced=True)
    pair.call(pair.d, lambda c: events.CloseAccess(c, "x", 7, (row,)), "peer")
    assert pair.both()[1].memory is Disposition.QUARANTINED


@pytest.mark.parametrize("incarnation", [7, 99], ids=["that has a handshake", "that has none"])
def test_another_life_of_the_source_proves_nothing(incarnation: int) -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    if incarnation == 7:
        pair.d.admit(describe("p", 7))
    for made in (
        lambda c: events.CloseAccess(c, "p", incarnation, (events.Closing(access_id(10), True, quiesced=True),)),
        lambda c: events.SettleAccess(c, "p", incarnation, (events.Settling(access_id(10), True),)),
    ):
        pair.d.ask(made, "peer")
        assert pair.both()[1].memory is Disposition.QUARANTINED


def test_the_last_settling_of_a_push_that_is_over_proves_it_at_rest() -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    assert pair.both()[1].memory is Disposition.QUARANTINED
    pair.moved()
    assert pair.both()[1].memory is Disposition.RETURNED
    assert pair.reasons() == [Reason.CANCELLED, Reason.CANCELLED]
    verdict = pair.d.settle(pair.p.me, 10)
    assert not verdict.valid


@MODES
def test_a_source_that_dies_leaves_a_quarantine_until_it_is_proved_at_rest(writers: frozenset[str]) -> None:
    pair = started(writers)
    pair.deaf = {SendClose}
    pair.feed(pair.d, events.PeerSilent(key_of(pair.p.me)))
    pair.feed(pair.d, events.Tick(), 11.0)
    landing = pair.both()[1]
    assert (landing.state, landing.memory) == (State.FAILED, Disposition.QUARANTINED)
    assert pair.reasons()[1] is Reason.PEER_LOST
    pair.feed(pair.d, events.ProcessEnded(0, "someone@1", drained=True))
    assert pair.both()[1].memory is Disposition.QUARANTINED
    if writers:
        pair.feed(pair.d, events.ProcessEnded(0, key_of(pair.p.me), drained=True))
    else:
        pair.moved()
    assert pair.both()[1].memory is Disposition.RETURNED


def test_memory_that_is_proved_at_rest_ends_what_still_moves() -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    pair.feed(pair.d, events.ProcessEnded(0, key_of(pair.p.me), drained=True))
    assert (pair.both()[1].state, pair.both()[1].memory) == (State.FAILED, Disposition.RETURNED)


def test_a_source_that_was_taken_for_dead_proves_itself_at_rest() -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    pair.feed(pair.d, events.PeerSilent(key_of(pair.p.me)))
    pair.feed(pair.d, events.Tick(), 11.0)
    row = events.Closing(access_id(10), True, quiesced=True)
    number = pair.d.ask(lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    with refused(Reason.NO_HANDSHAKE):
        pair.d.answer(number)
    assert pair.both()[1].memory is Disposition.RETURNED


@MODES
def test_a_source_that_was_taken_for_dead_is_told_of_the_end_when_it_is_back(writers: frozenset[str]) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False)
    pair.moved()
    pair.feed(pair.d, events.PeerSilent(key_of(pair.p.me)))
    pair.sent.clear()
    pair.feed(pair.d, events.Tick(), 11.0)
    assert not [action for action in pair.sent if isinstance(action, SendClose)], "nobody would hear it"
    memory = Disposition.QUARANTINED if writers else Disposition.RETURNED
    assert (pair.both()[1].state, pair.both()[1].memory) == (State.FAILED, memory)
    assert pair.both()[0].waiting_for == "parts", "the source knows nothing of it"
    call = pair.d.ask(lambda c: events.HandshakeReceived(c, pair.p.me, endpoints(pair.p.me)), principal="peer")
    pair._take(pair.d, pair.d.done)
    pair.run()
    assert call
    assert pair.both()[0].waiting_for == "registration"
    assert pair.both()[1].memory is Disposition.RETURNED


@MODES
def test_a_destination_that_dies_ends_the_push(writers: frozenset[str]) -> None:
    pair = started(writers)
    pair.deaf = {SendClose}
    pair.feed(pair.p, events.PeerSilent(key_of(pair.d.me)))
    pair.feed(pair.p, events.Tick(), 11.0)
    sent = pair.both()[0]
    assert sent.state is State.CANCELLED, "a consumer that died will not come again"
    assert sent.memory is (Disposition.QUARANTINED if writers else Disposition.RETURNED)
    pair.moved()
    assert pair.both()[0].memory is Disposition.RETURNED
    assert not len(pair.p.state.pins)


@MODES
def test_a_registration_without_parts_ends_at_both(writers: frozenset[str]) -> None:
    pair = Pair(writers, registration_timeout_s=20.0)
    pair.register(pair.reserve(32).token)
    pair.tick(20.0)
    assert pair.reasons() == [Reason.REGISTRATION_TIMEOUT, Reason.REGISTRATION_TIMEOUT]
    assert not len(pair.d.state.pins)


def test_parts_without_a_registration_end() -> None:
    pair = Pair(registration_timeout_s=20.0)
    sent = pair.finish(32).transfer
    pair.tick(20.0)
    failure = pair.p.transfer(sent.id).failure
    assert failure is not None
    assert failure.reason is Reason.REGISTRATION_TIMEOUT
    assert [type(news) for news in pair.told["p"]] == [actions.Failed, actions.BlocksReturned]


@MODES
def test_each_part_starts_the_registrations_clock_anew_up_to_the_cap(writers: frozenset[str]) -> None:
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
    assert not len(pair.d.state.pins) + len(pair.p.state.pins)


@MODES
def test_bytes_that_take_too_long_end_the_push_at_both(writers: frozenset[str]) -> None:
    pair = started(writers)
    pair.tick(31.0)
    pair.moved()
    assert pair.both()[1].memory is Disposition.RETURNED
    assert not len(pair.d.state.pins)
    waits_for_another(pair, Reason.TRANSFER_TIMEOUT)


@MODES
@pytest.mark.parametrize("quiesced", [True, False])
def test_a_posting_that_fails_ends_what_lands_there(writers: frozenset[str], quiesced: bool) -> None:
    pair = started(writers)
    ((_, post),) = pair.posts
    pair.moved(done=False, message="broken", quiesced=quiesced)
    mover = pair.p if writers else pair.d
    if not quiesced:
        assert pair.both()[1].memory is Disposition.QUARANTINED
        pair.feed(mover, events.PostingEnded(post.posting_id, done=False))
    assert pair.both()[1].memory is Disposition.RETURNED
    waits_for_another(pair, Reason.DATA_PATH_FAILED)


@MODES
def test_a_settling_that_is_not_answered_is_asked_again_and_given_up(writers: frozenset[str]) -> None:
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
        assert "did not say in time" in late.p.state.leases.get(late.both()[0].lease_id).trouble
    else:
        assert late.reasons()[1] is Reason.SETTLE_TIMEOUT


@MODES
def test_the_verdict_on_a_part_is_the_same_when_it_is_asked_for_again(writers: frozenset[str]) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False)
    pair.moved()
    issuer, asking, number = (pair.d, pair.p, 10) if writers else (pair.p, pair.d, 11)
    done = pair.both()[1].nbytes_done
    row = events.Settling(access_id(number), last=False, nbytes=16)
    again = issuer.call(
        lambda c: events.SettleAccess(c, asking.me.engine_id, asking.me.incarnation, (row,)), principal="peer"
    )
    assert again.rows[0].valid
    assert pair.both()[1].nbytes_done == done
    pair.finish(32, (2,))
    pair.moved()
    assert issuer.settle(asking.me, number).valid


def test_a_destination_settles_only_parts_that_it_was_told_of() -> None:
    for last, part, valid in ((False, 1, False), (True, 0, False), (False, 0, True)):
        pair = Pair()
        pair.register(pair.reserve(32, (3, 4)).token)
        pair.finish(32, (1,), last=False)
        row = events.Settling(access_id(11), last, 0, part)
        answer = pair.p.call(lambda c, row=row: events.SettleAccess(c, "d", 2, (row,)), principal="peer")  # type: ignore[misc]
        assert answer.rows[0].valid is valid


@MODES
def test_a_push_that_lost_its_peers_memory_of_it_starts_no_byte(writers: frozenset[str]) -> None:
    pair = Pair(writers)
    token = pair.reserve(32).token
    pair.deaf = {SendOpen}
    pair.register(token)
    pair.finish(32)
    (opening,) = [action for _, action in pair.lost if isinstance(action, SendOpen)]
    assert pair.p.state.transfers.get(pair.both()[0].id).waiting_for == "access"
    pair.feed(pair.p, events.AccessAnswered(opening.opening.access_id, UNREACHABLE, retryable=True))
    pair.feed(pair.p, events.Tick(), 0.3)
    assert len([action for _, action in pair.lost if isinstance(action, SendOpen)]) == 2
    gone = Unavailable(Reason.NO_HANDSHAKE, "who")
    pair.feed(pair.p, events.AccessAnswered(opening.opening.access_id, gone))
    assert pair.both()[0].waiting_for == "handshake"
    pair.recover()


def told_late(pair: Pair) -> SendParts:
    """A push whose second part the destination does not hear of."""
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
    pair.feed(pair.d, events.RegisterAnswered(landing.id, UNREACHABLE, retryable=True))
    pair.feed(pair.d, events.Tick(), 0.3)
    assert len(pair.lost) == 2
    pair.recover()
    assert next(iter(pair.p.state.transfers)).waiting_for == "parts"
    other = Pair()
    other.deaf = {SendRegister}
    landing = other.reserve(32, source=events.PushSource("p:1")).transfer
    other.feed(other.d, events.RegisterAnswered(landing.id, Unavailable(Reason.DRAINING, "no")))
    failure = other.d.transfer(landing.id).failure
    assert failure is not None
    assert failure.reason is Reason.DRAINING
    other.feed(other.d, events.RegisterAnswered(landing.id, None))


@MODES
def test_the_end_of_an_engine_ends_its_pushes(writers: frozenset[str]) -> None:
    for lead in ("p", "d"):
        pair = started(writers)
        me = getattr(pair, lead)
        pair.register(pair.reserve(16, (9,), key=KEY + b"2").token, number=50)
        pair.deaf = {SendClose}
        pair.feed(me, events.LifeBegan(9, b"s", replace(me.me, incarnation=9), engine_attached=True))
        me.node.check()
        assert not me.state.transfers.live


def test_an_engine_that_ends_with_a_registration_only_fails_it() -> None:
    pair = Pair()
    sent = pair.register(pair.reserve(32).token).transfer
    pair.deaf = {SendClose}
    pair.feed(pair.p, events.LifeBegan(9, b"s", replace(pair.p.me, incarnation=9), engine_attached=True))
    assert not pair.p.state.transfers.live
    assert sent.waiting_for == "parts"


@MODES
def test_memory_registered_anew_moves_nothing(writers: frozenset[str]) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32).token)
    pair.deaf = {SendOpen}
    pair.finish(32)
    ((_, sent),) = pair.lost
    assert isinstance(sent, SendOpen)
    answer = pair.d.opened(pair.p.me, sent.opening)[0]
    pair.feed(pair.p, events.AccessAnswered(sent.opening.access_id, replace(answer, memory_generation=9)))
    assert not pair.posts
    waits_for_another(pair, Reason.SOURCE_FAILED)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_count": 0},
        {"token_count": 33},
        {"blocks": ()},
        {"blocks": lists((1, 2, 3))},
        {"blocks": lists((64,))},
    ],
)
def test_an_answer_that_makes_no_sense_moves_nothing(wrong: dict[str, Any]) -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32).token)
    pair.deaf = {SendOpen}
    pair.finish(32)
    ((_, sent),) = pair.lost
    assert isinstance(sent, SendOpen)
    answer = pair.d.opened(pair.p.me, sent.opening)[0]
    pair.feed(pair.p, events.AccessAnswered(sent.opening.access_id, replace(answer, **wrong)))
    assert not pair.posts
    waits_for_another(pair, Reason.SOURCE_FAILED)


@MODES
def test_parts_wait_for_the_engines_steps(writers: frozenset[str]) -> None:
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


def test_a_closing_under_way_is_followed_by_the_one_that_proves_rest() -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    pair.finish(failure="no", blocks=())
    (first,) = [action for _, action in pair.lost]
    assert isinstance(first, SendClose)
    assert not first.closing.quiesced
    pair.moved()
    assert len(pair.lost) == 1, "one at a time"
    pair.feed(pair.p, events.CloseAnswered(first.closing.access_id, answered=False))
    second = pair.lost[-1][1]
    assert isinstance(second, SendClose)
    assert second.closing.quiesced
    pair.feed(pair.p, events.CloseAnswered(second.closing.access_id, answered=False))
    pair.tick(1.1)
    assert pair.lost[-1][1] == second
    pair.recover()
    assert pair.both()[1].memory is Disposition.RETURNED


def test_a_destination_refuses_only_its_own_accesses() -> None:
    pair = started(WRITING)
    other = describe("x", 7)
    pair.p.admit(other)
    row = events.Closing(access_id(10), True, quiesced=True)
    pair.call(pair.p, lambda c: events.CloseAccess(c, "x", 7, (row,)), "peer")
    assert not pair.both()[0].over


def test_a_destination_that_says_to_be_dead_is_no_consumer_that_is_done() -> None:
    pair = Pair(WRITING)
    pair.deaf = {SendOpen}
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    lost = PreconditionFailed(Reason.PEER_LOST, "dead")
    pair.feed(pair.p, events.AccessAnswered(access_id(10), lost))
    sent = pair.both()[0]
    assert (sent.over, sent.consumers_done) == (False, 0)


@pytest.mark.parametrize("reason", [Reason.PEER_LOST, Reason.CANCELLED])
def test_a_lead_that_refuses_a_handshake_says_nothing_of_who_is_done(reason: Reason) -> None:
    pair = Pair(WRITING)
    pair.deaf = {actions.MakeOffer}
    token = pair.reserve(32, (3, 4)).token
    pair.p.node.state.peers[key_of(pair.d.me)].forgotten = True
    pair.register(token)
    pair.finish(32, (1, 2))
    pair.feed(pair.p, events.DialFailed(pair.d.me.address, PreconditionFailed(reason, "no")))
    sent = pair.both()[0]
    assert (sent.over, sent.consumers_done) == (False, 0)


def test_what_a_source_says_of_layers_and_bytes_is_believed_only_where_it_can_be() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False)
    for layers in (((-1, 1),), ((0, 0),), ((1, 2),)):
        row = events.Settling(access_id(10), False, 1 << 60, 0, layers)
        pair.d.call(lambda c, row=row: events.SettleAccess(c, "p", 1, (row,)), principal="peer")  # type: ignore[misc]
        assert (pair.both()[1].layers_done, pair.both()[1].nbytes_done) == ((), 32)


def test_a_part_that_settles_after_the_end_is_stale_and_proves_nothing_yet() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1,), last=False)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    assert not pair.d.settle(pair.p.me, 10, last=False).valid
    assert pair.both()[1].memory is Disposition.QUARANTINED


@pytest.mark.parametrize("late", ["settling", "closing"])
def test_what_a_source_says_after_it_was_proved_at_rest_changes_nothing(late: str) -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    pair.feed(pair.d, events.ProcessEnded(0, key_of(pair.p.me), drained=True))
    after = pair.both()[1]
    assert after.memory is Disposition.RETURNED
    with refused(Reason.NO_HANDSHAKE):
        if late == "settling":
            pair.d.settle(pair.p.me, 10)
        else:
            pair.d.close(pair.p.me, 10)
    assert pair.both()[1] == after


@MODES
def test_a_push_of_which_the_destination_holds_all_moves_nothing(writers: frozenset[str]) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (), have_tokens=32).token)
    pair.finish(32)
    assert not pair.posts
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


def test_nothing_is_quarantined_where_nothing_was_reserved() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (), have_tokens=32).token)
    pair.finish(32, (1,), last=False)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    assert not len(pair.d.state.pins)
    pair.recover()
    assert pair.both()[1].memory is Disposition.RETURNED


def test_a_destination_that_ends_what_is_over_changes_nothing() -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    pair.finish(failure="no", blocks=())
    before = pair.both()[0]
    row = events.Closing(access_id(10), True, quiesced=True)
    pair.call(pair.p, lambda c: events.CloseAccess(c, "d", 2, (row,)), "peer")
    assert pair.both()[0] == before


def test_a_life_that_was_proved_at_rest_writes_again_only_after_a_new_handshake() -> None:
    pair = Pair(WRITING)
    pair.deaf = {SendOpen}
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    ((_, sent),) = pair.lost
    assert isinstance(sent, SendOpen)
    pair.feed(pair.d, events.ProcessEnded(0, key_of(pair.p.me), drained=True))
    with refused(Reason.NO_HANDSHAKE):
        pair.d.opened(pair.p.me, sent.opening)
    pair.d.admit(pair.p.me)
    (row,) = pair.d.opened(pair.p.me, sent.opening)
    assert isinstance(row, events.Opened)
