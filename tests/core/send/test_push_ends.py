"""Pushes that do not succeed: which engines are told, and when the blocks come back."""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import SendClose, SendOpen, SendSettle
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from tests.core.nodes import KEY, access_id, describe, endpoints, key_of, lists, refused
from tests.core.pairs import MODES, UNREACHABLE, WRITING, Pair, Writers
from tests.core.send.started_pushes import started, waits_for_another


def ended(pair: Pair, source: State, destination: State) -> None:
    """Asserts that both transfers are over, and that nothing is pinned."""
    assert [t.state for t in pair.both()] == [source, destination]
    assert [t.memory for t in pair.both()] == [Disposition.RETURNED] * 2
    assert not len(pair.p.state.pool.pins)
    assert not len(pair.d.state.pool.pins)
    for told, engine in ((pair.told["p"], "p"), (pair.told["d"], "d")):
        assert [type(news) for news in told][-2:] == [actions.FailedNews, actions.BlocksReturnedNews], engine


@MODES
def test_a_source_that_cannot_deliver_says_so_before_any_part(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32).token)
    answer = pair.finish(failure="out of memory", blocks=(), content=None)
    assert isinstance(answer, actions.GaveUp)
    assert answer.transfer is not None
    assert answer.transfer.state is State.FAILED
    assert pair.reasons() == [Reason.SOURCE_FAILED, Reason.SOURCE_FAILED]
    assert pair.both()[1].memory is Disposition.RETURNED
    assert not len(pair.d.state.pool.pins)
    with refused(Reason.SOURCE_FAILED):
        pair.finish(32)


def test_a_source_that_cannot_deliver_refuses_later_registrations() -> None:
    pair = Pair()
    token = pair.reserve(32).token
    assert pair.finish(failure="no", blocks=(), validate_only=True) == actions.GaveUp(None)
    assert pair.finish(failure="no", blocks=()) == actions.GaveUp(None)
    with refused(Reason.SOURCE_FAILED):
        pair.register(token)


@MODES
@pytest.mark.parametrize("who", ["failure", "cancel", "release"])
def test_what_the_source_ends_in_flight_comes_back_when_it_is_at_rest(writers: Writers, who: str) -> None:
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
    assert pair.p.state.pool.pins.has(f"{source.id}#1", PinKind.ACCESS) is bool(writers)
    assert bool(pair.p.node.missing_proof(source.id)) is bool(writers)
    end = State.CANCELLED if who == "cancel" else State.FAILED
    assert (destination.state, destination.memory) == (end, Disposition.QUARANTINED)
    assert pair.d.node.missing_proof(destination.id)
    pair.moved()
    ended(pair, source.state, end)


@MODES
def test_what_the_destination_cancels_in_flight_comes_back_when_it_is_at_rest(writers: Writers) -> None:
    pair = started(writers)
    landing = pair.both()[1]
    answer = pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    assert answer.outcome == "cancelled_in_flight"
    assert pair.both()[1].memory is Disposition.QUARANTINED
    pair.moved()
    assert [t.memory for t in pair.both()] == [Disposition.RETURNED] * 2
    assert pair.both()[0].state is State.CANCELLED
    assert not len(pair.d.state.pool.pins) + len(pair.p.state.pool.pins)


@MODES
def test_a_source_that_was_declared_dead_is_told_of_the_end_when_it_is_back(writers: Writers) -> None:
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
def test_a_destination_that_dies_ends_the_push(writers: Writers) -> None:
    pair = started(writers)
    pair.deaf = {SendClose}
    pair.feed(pair.p, events.PeerSilent(key_of(pair.d.me)))
    pair.feed(pair.p, events.Tick(), 11.0)
    sent = pair.both()[0]
    assert sent.state is State.CANCELLED, "a consumer that died will not come again"
    assert sent.memory is (Disposition.QUARANTINED if writers else Disposition.RETURNED)
    pair.moved()
    assert pair.both()[0].memory is Disposition.RETURNED
    assert not len(pair.p.state.pool.pins)


@MODES
@pytest.mark.parametrize("quiesced", [True, False])
def test_a_posting_that_fails_ends_what_lands_there(writers: Writers, quiesced: bool) -> None:
    pair = started(writers)
    ((_, post),) = pair.posts
    pair.moved(done=False, message="broken", quiesced=quiesced)
    mover = pair.p if writers else pair.d
    if not quiesced:
        assert pair.both()[1].memory is Disposition.QUARANTINED
        pair.feed(mover, events.PostingEnded(post.posting_id, done=False))
    assert pair.both()[1].memory is Disposition.RETURNED
    waits_for_another(pair, Reason.DATA_PATH_FAILED)


def test_a_destination_settles_only_parts_that_it_was_told_of() -> None:
    for last, part, valid in ((False, 1, False), (True, 0, False), (False, 0, True)):
        pair = Pair()
        pair.register(pair.reserve(32, (3, 4)).token)
        pair.finish(32, (1,), last=False)
        row = events.AccessSettling(access_id(11), last, 0, part)
        answer = pair.p.call(lambda c, row=row: events.SettleAccess(c, "d", 2, (row,)), principal="peer")  # type: ignore[misc]
        assert answer.rows[0].valid is valid


@MODES
def test_a_push_that_lost_its_peers_memory_of_it_starts_no_byte(writers: Writers) -> None:
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


@MODES
def test_the_end_of_an_engine_ends_its_pushes(writers: Writers) -> None:
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
def test_memory_registered_anew_moves_nothing(writers: Writers) -> None:
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


def test_a_destination_refuses_only_its_own_accesses() -> None:
    pair = started(WRITING)
    other = describe("x", 7)
    pair.p.admit(other)
    row = events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced=True)
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


def test_nor_is_one_whose_verdict_says_so() -> None:
    pair = started(WRITING)
    pair.deaf = {SendSettle}
    pair.moved()
    (settle,) = [action for _, action in pair.lost]
    assert isinstance(settle, SendSettle)
    dead = Verdict(False, Reason.PEER_LOST, "dead")
    pair.feed(pair.p, events.SettleAnswered(settle.settling.access_id, dead))
    sent = pair.both()[0]
    assert (sent.over, sent.consumers_done) == (False, 0)


@pytest.mark.parametrize("reason", [Reason.PEER_LOST, Reason.CANCELLED])
def test_a_lead_that_refuses_a_handshake_says_nothing_of_who_is_done(reason: Reason) -> None:
    pair = Pair(WRITING)
    pair.deaf = {actions.MakeOffer}
    token = pair.reserve(32, (3, 4)).token
    pair.p.node.state.peers.lives[key_of(pair.d.me)].forgotten = True
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
        row = events.AccessSettling(access_id(10), False, 1 << 60, 0, layers)
        pair.d.call(lambda c, row=row: events.SettleAccess(c, "p", 1, (row,)), principal="peer")  # type: ignore[misc]
        assert (pair.both()[1].layers_done, pair.both()[1].nbytes_done) == ((), 32)


@MODES
def test_a_push_of_which_the_destination_holds_all_moves_nothing(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (), have_tokens=32).token)
    pair.finish(32)
    assert not pair.posts
    assert [t.state for t in pair.both()] == [State.SUCCEEDED] * 2


def test_a_destination_that_ends_what_is_over_changes_nothing() -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    pair.finish(failure="no", blocks=())
    before = pair.both()[0]
    row = events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced=True)
    pair.call(pair.p, lambda c: events.CloseAccess(c, "d", 2, (row,)), "peer")
    assert pair.both()[0] == before
