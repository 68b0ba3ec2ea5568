"""Blocks that the source of a push may still write: what proves that it writes no more, and what does not."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import SendClose, SendOpen
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.errors import Reason
from tests.core.nodes import access_id, describe, endpoints, key_of, refused
from tests.core.pairs import MODES, WRITING, Pair, Writers
from tests.core.send.started_pushes import started
from tests.core.shown import secret


@pytest.mark.parametrize("quiesced", [True, False])
def test_a_close_proves_rest_only_if_it_says_so(quiesced: bool) -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    row = events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced)
    pair.call(pair.d, lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    assert (pair.both()[1].memory is Disposition.RETURNED) is quiesced


def test_a_foreign_engine_proves_nothing() -> None:
    pair = started(WRITING)
    other = describe("x", 7)
    pair.d.admit(other)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    row = events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced=True)
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
        lambda c: events.CloseAccess(
            c, "p", incarnation, (events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced=True),)
        ),
        lambda c: events.SettleAccess(c, "p", incarnation, (events.AccessSettling(access_id(10), True),)),
    ):
        pair.d.ask(made, "peer")
        assert pair.both()[1].memory is Disposition.QUARANTINED


def test_who_took_the_name_of_a_dead_source_proves_nothing_until_the_source_has_it_back() -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    me, d = pair.p.me, pair.d
    own, stranger = d.state.peers.lives[key_of(me)].asks[0], secret("of", "a stranger")
    pair.feed(d, events.PeerSilent(key_of(me)))
    pair.feed(d, events.Tick(), 11.0)

    def introduce(shows: bytes, asks: bytes, *proofs: bytes) -> None:
        d.ask(lambda c: events.HandshakeReceived(c, me, endpoints(me), "", shows, asks, proofs), "peer")

    def rests(proof: bytes) -> Disposition:
        row = events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced=True)
        d.ask(lambda c: events.CloseAccess(c, me.engine_id, me.incarnation, (row,)), "peer", proof=proof)
        return pair.both()[1].memory

    introduce(stranger, stranger)
    assert rests(stranger) is Disposition.QUARANTINED
    assert rests(own) is Disposition.QUARANTINED, "it has to shake hands first"
    introduce(secret("shown", "p"), secret("asked", "p"), own)
    assert rests(stranger) is Disposition.QUARANTINED
    assert rests(own) is Disposition.RETURNED


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
def test_a_source_that_dies_leaves_a_quarantine_until_it_is_proved_at_rest(writers: Writers) -> None:
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


def test_a_source_that_was_declared_dead_proves_itself_at_rest() -> None:
    pair = started(WRITING)
    pair.deaf = {SendClose}
    pair.feed(pair.d, events.PeerSilent(key_of(pair.p.me)))
    pair.feed(pair.d, events.Tick(), 11.0)
    row = events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced=True)
    number = pair.d.ask(lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    with refused(Reason.NO_HANDSHAKE):
        pair.d.answer(number)
    assert pair.both()[1].memory is Disposition.RETURNED


def test_a_dead_source_that_is_not_believed_is_told_to_show_its_proof_and_says_it_again() -> None:
    """The source may show a proof from a handshake whose answer was lost."""
    pair = started(WRITING)
    pair.deaf = {SendClose}
    pair.feed(pair.d, events.PeerSilent(key_of(pair.p.me)))
    pair.feed(pair.d, events.Tick(), 11.0)
    row = events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced=True)
    unknown = secret("told", "in a handshake that is lost")
    number = pair.d.ask(lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer", proof=unknown)
    with refused(Reason.NOT_PROVED):
        pair.d.answer(number)
    assert pair.both()[1].memory is Disposition.QUARANTINED


def readmitted(pair: Pair) -> None:
    """Declares the source dead at the destination, and readmits it without any earlier proof."""
    me, d = pair.p.me, pair.d
    pair.feed(d, events.PeerSilent(key_of(me)))
    pair.feed(d, events.Tick(), 11.0)
    shows, asks = secret("shown", "anew"), secret("asked", "anew")
    d.ask(lambda c: events.HandshakeReceived(c, me, endpoints(me), "", shows, asks), "peer")
    d._offer()
    d.map(me)
    assert d.state.peers.lives[key_of(me)].elder


def test_a_source_that_was_readmitted_without_its_proof_proves_at_rest_what_it_has_opened_since() -> None:
    pair = Pair(WRITING)
    pair.feed(pair.d, events.PeerAlive(key_of(pair.p.me)))
    readmitted(pair)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    row = events.AccessClosing(access_id(10), events.CloseOutcome.DROPPED, quiesced=True)
    pair.call(pair.d, lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    assert pair.both()[1].memory is Disposition.RETURNED


def test_who_took_the_name_of_a_dead_source_frees_nothing_by_its_grant_either() -> None:
    pair = Pair(WRITING)
    token = pair.reserve(32, (3, 4)).token
    pair.feed(pair.d, events.PeerAlive(key_of(pair.p.me)))
    pair.register(token)
    pair.finish(32, (1, 2))
    pair.deaf = {SendClose}
    readmitted(pair)
    row = events.AccessClosing(access_id(11), events.CloseOutcome.DROPPED, quiesced=True, token=token)
    pair.call(pair.d, lambda c: events.CloseAccess(c, "p", 1, (row,)), "peer")
    assert pair.both()[1].memory is Disposition.QUARANTINED


def test_a_close_under_way_is_followed_by_the_one_that_proves_rest() -> None:
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


def test_nothing_is_quarantined_where_nothing_was_reserved() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (), have_tokens=32).token)
    pair.finish(32, (1,), last=False)
    pair.deaf = {SendClose}
    landing = pair.both()[1]
    pair.call(pair.d, lambda c: events.CancelTransfer(c, landing.id))
    assert not len(pair.d.state.pool.pins)
    pair.recover()
    assert pair.both()[1].memory is Disposition.RETURNED


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
