"""A CloseAccess is retried until it is answered, or until no peer is left to answer."""

from functools import partial

import pytest

from kvgrpc.core.actions import Dial, SendClose, SendOpen
from kvgrpc.core.events import (
    AccessAnswered,
    AccessSettling,
    CancelTransfer,
    CloseAnswered,
    CloseOutcome,
    DialFailed,
    PeerAnswered,
    PeerSilent,
    ProcessEnded,
    RegisterPush,
    SettleAccess,
    SettleAnswered,
    WaitsFor,
)
from kvgrpc.core.moves.pending_closes import RETRIES
from kvgrpc.core.peers.liveness import DEAD_KEPT
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Disposition
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from tests.core.nodes import Lead, access_id, answer_of, describe, endpoints, grant, key_of
from tests.core.pairs import UNREACHABLE, WRITING, Pair

P = describe("p", 1)
D = describe("d", 2)
TOKEN = grant(P)


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


def cancel(lead: Lead, transfer_id: str) -> None:
    lead.call(lambda c: CancelTransfer(c, transfer_id))


def closing(lead: Lead, number: int = 1) -> SendClose:
    """Opens an access, cancels its pull, and returns the closing that was sent."""
    pull = lead.pull(TOKEN, number=number)
    lead.feed(AccessAnswered(access_id(number), answer_of(P)))
    cancel(lead, pull.id)
    return lead.one(SendClose)


def test_answers_to_what_was_never_asked_are_no_news(lead: Lead) -> None:
    for answered in (False, True):
        assert lead.feed(CloseAnswered(access_id(9), answered=answered)) == []
    closing(lead)
    lead.feed(CloseAnswered(access_id(), answered=False))
    lead.feed(CloseAnswered(access_id(), answered=True))
    assert lead.feed(CloseAnswered(access_id(), answered=False)) == []
    assert lead.tick(10.0) == []


def test_a_failure_is_no_drop(lead: Lead) -> None:
    lead.pull(TOKEN, queue_timeout_s=1.0)
    lead.tick(1.0)
    sent = lead.one(SendClose)
    assert (sent.closing.outcome, sent.closing.quiesced, sent.closing.token) == (CloseOutcome.FAILED, True, TOKEN)
    assert sent.incarnation == lead.me.incarnation


def test_a_drop_reaches_an_issuer_that_was_still_being_reached() -> None:
    lead = Lead(describe("d", 2))
    pull = lead.pull(TOKEN)
    cancel(lead, pull.id)
    assert lead.seen(SendClose) == []
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.map(P)
    sent = lead.one(SendClose)
    assert (sent.peer, sent.closing.access_id, sent.closing.outcome) == (key_of(P), access_id(), CloseOutcome.CANCELLED)


def test_a_failure_is_not_worth_a_connection() -> None:
    lead = Lead(describe("d", 2))
    lead.pull(TOKEN, queue_timeout_s=1.0)
    lead.tick(1.0)
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.map(P)
    assert lead.seen(SendClose) == []


def test_a_drop_for_an_issuer_that_cannot_be_reached_is_forgotten() -> None:
    lead = Lead(describe("d", 2))
    cancel(lead, lead.pull(TOKEN).id)
    lead.feed(DialFailed("p:1", Unavailable(Reason.PEER_UNREACHABLE, "")))
    lead.admit(P)
    assert lead.seen(SendClose) == []
    assert not lead.node.state.moves.closes.unsent


def registered() -> tuple[Lead, bytes]:
    """Makes a source of a push that is reaching for its destination, and returns it with the grant."""
    token = Pair().reserve(32).token
    lead = Lead(P)
    lead.call(lambda c: RegisterPush(c, token, "r", access_id(10), access_id(11)), "router")
    return lead, token


def test_a_source_that_finds_no_data_path_tells_the_lead_that_it_reached() -> None:
    lead, token = registered()
    d = describe("d", 2)
    lead._offer()
    lead.feed(PeerAnswered(d.address, d, endpoints(d)))
    lead.map(d, data_path="")
    sent = lead.one(SendClose)
    assert (sent.peer, sent.closing.token, sent.closing.quiesced) == (key_of(d), token, True)
    assert "no data path" in sent.closing.message


def test_nothing_is_kept_for_a_destination_that_its_source_cannot_reach() -> None:
    lead, _ = registered()
    lead.feed(DialFailed(describe("d", 2).address, Unavailable(Reason.PEER_UNREACHABLE, "no answer")))
    assert lead.seen(SendClose) == []
    assert not lead.node.state.moves.closes.unsent


def reaching_anew() -> Lead:
    """Makes a source that asked for access at a destination which no longer knows it, and that is dialling it."""
    token = Pair().reserve(32).token
    lead = Lead(P)
    lead.admit(D)
    lead.call(lambda c: RegisterPush(c, token, "r", access_id(10), access_id(11)), "router")
    lead.finish(32, waits_for=WaitsFor.REGISTRATION, last=True)
    assert lead.one(SendOpen).opening.access_id == access_id(10)
    lead.feed(AccessAnswered(access_id(10), PreconditionFailed(Reason.NO_HANDSHAKE, "")))
    assert lead.node.state.peers.dials
    return lead


def fail_to_dial(lead: Lead) -> None:
    lead.feed(DialFailed(D.address, Unavailable(Reason.PEER_UNREACHABLE, "no answer")))
    assert not lead.node.state.moves.closes.unsent


def test_an_issuer_that_may_have_opened_is_told_of_the_end_though_a_dial_fails() -> None:
    lead = reaching_anew()
    fail_to_dial(lead)
    sent = lead.one(SendClose)
    assert (sent.peer, sent.closing.access_id, sent.closing.quiesced) == (key_of(D), access_id(10), True)


def test_an_issuer_that_may_have_opened_and_was_declared_dead_is_told_when_it_is_back() -> None:
    lead = reaching_anew()
    lead.feed(PeerSilent(key_of(D)))
    lead.tick(9.9)
    assert not lead.seen(SendClose)
    fail_to_dial(lead)
    first = lead.one(SendClose)
    lead.feed(CloseAnswered(access_id(10), answered=False))
    lead.tick(0.2)
    assert lead.tick(100.0) == []
    lead.admit(D)
    assert lead.node.state.moves.closes.sent == {access_id(10): first}


def test_what_ends_after_the_death_of_its_issuer_is_told_when_the_issuer_is_back() -> None:
    lead = reaching_anew()
    lead.feed(PeerSilent(key_of(D)))
    lead.tick(5.0)
    lead.feed(ProcessEnded(0, key_of(D), drained=True))
    fail_to_dial(lead)
    assert not lead.seen(SendClose)
    assert [send.closing.access_id for send in lead.node.state.moves.closes.parked(key_of(D))] == [access_id(10)]


def test_a_failure_is_worth_a_connection_where_the_access_may_be_open(lead: Lead) -> None:
    lead.pull(TOKEN, queue_timeout_s=1.0)
    lead.feed(AccessAnswered(access_id(), PreconditionFailed(Reason.NO_HANDSHAKE, "")))
    lead.tick(1.0)
    assert not lead.seen(SendClose)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    sent = lead.one(SendClose)
    assert (sent.peer, sent.closing.access_id, sent.closing.outcome) == (key_of(P), access_id(), CloseOutcome.FAILED)


def writing() -> Pair:
    """Makes a source that is writing into a destination."""
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    return pair


def writing_while_reached_anew() -> Pair:
    """Makes a source with a write in flight to a silent destination, which it dials for the next write."""
    pair = writing()
    pair.feed(pair.p, PeerSilent(key_of(pair.d.me)))
    pair.deaf = {SendClose, Dial}
    pair.finish(32, (5, 6), part_epoch=1)
    return pair


@pytest.mark.parametrize("reached", [False, True])
def test_a_write_that_comes_to_rest_is_told_whether_its_destination_is_being_reached_anew_or_not(reached: bool) -> None:
    pair = writing_while_reached_anew()
    if reached:
        pair.call(pair.p, lambda c: CancelTransfer(c, pair.both()[0].id))
        pair.moved()
        assert not pair.p.seen(SendClose)
        pair.p._offer()
        pair.feed(pair.p, PeerAnswered(pair.d.me.address, pair.d.me, endpoints(pair.d.me)))
    else:
        pair.feed(pair.p, DialFailed(pair.d.me.address, UNREACHABLE))
        pair.feed(pair.p, CloseAnswered(access_id(10), answered=False))
        pair.moved()
        pair.tick(1.0)
    sent = [action.closing.quiesced for _, action in pair.lost if isinstance(action, SendClose)]
    assert sent == [True] if reached else [False, True]


def test_a_write_that_is_over_waits_for_no_connection_though_it_is_not_at_rest() -> None:
    pair = writing_while_reached_anew()
    pair.call(pair.p, lambda c: CancelTransfer(c, pair.both()[0].id))
    before = pair.both()[0]
    pair.feed(pair.p, DialFailed(pair.d.me.address, UNREACHABLE))
    assert pair.both()[0] == before
    assert before.memory is Disposition.QUARANTINED


def parted() -> Pair:
    """Makes a source and a destination that declared each other dead; then the source's write came to rest."""
    pair = writing()
    for here, there in ((pair.p, pair.d), (pair.d, pair.p)):
        pair.feed(here, PeerSilent(key_of(there.me)))
    pair.deaf = {SendClose, Dial}
    pair.tick(11.0)
    pair.moved()
    assert pair.both()[1].memory is Disposition.QUARANTINED
    return pair


@pytest.mark.parametrize("after_s", [0.0, 300.0])
@pytest.mark.parametrize("before", [[], [False], [True]])
def test_a_source_that_settles_its_last_write_is_at_rest_though_declared_dead(
    before: list[bool], after_s: float
) -> None:
    """`before`: for each earlier settling, whether it was of the last part. In time the access is forgotten."""
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2), last=True)
    pair.feed(pair.d, PeerSilent(key_of(pair.p.me)))
    pair.d.tick(11.0)
    pair.d.admit(pair.p.me)
    pair.d.tick(after_s)
    for last in before:
        settling, p = AccessSettling(access_id(10), last, 1024, 0), pair.p.me
        pair.d.call(partial(SettleAccess, engine_id=p.engine_id, incarnation=p.incarnation, settlings=(settling,)))
        assert (pair.both()[1].memory is Disposition.RETURNED) is last
    pair.moved()
    assert pair.both()[1].memory is Disposition.RETURNED


def test_the_late_answer_to_an_earlier_close_does_not_answer_the_one_that_proves_rest() -> None:
    """A close in flight when the destination was declared dead is answered after the destination is back."""
    pair = parted()
    (parked,) = pair.p.node.state.moves.closes.parked(key_of(pair.d.me))
    closed = parked.closing.access_id
    pair.p.admit(pair.d.me)
    pair.p.feed(CloseAnswered(closed, answered=True, quiesced=False))
    pair.p.feed(CloseAnswered(closed, answered=False))
    (sent,) = [action for action in pair.p.tick(1.0) if isinstance(action, SendClose)]
    assert sent.closing.quiesced


def test_a_source_reaches_for_a_destination_that_waits_for_its_word_and_is_declared_dead() -> None:
    pair = parted()
    pair.tick(0.9)
    assert not pair.p.node.state.peers.dials
    pair.tick(0.1)
    pair.deaf.clear()
    pair.p._offer()
    pair.feed(pair.p, PeerAnswered(pair.d.me.address, pair.d.me, endpoints(pair.d.me)))
    assert pair.both()[1].memory is Disposition.RETURNED
    pair.tick(3000.0)
    assert not pair.p.node.state.peers.dials


def test_a_source_reaches_for_a_destination_that_may_be_gone_a_few_times_only() -> None:
    pair = parted()
    for number in range(RETRIES):
        pair.tick(2.0**number)
        assert pair.p.node.state.peers.dials
        pair.feed(pair.p, DialFailed(pair.d.me.address, UNREACHABLE))
    pair.tick(2.0**RETRIES)
    assert not pair.p.node.state.peers.dials
    assert pair.p.node.state.moves.closes.parked(key_of(pair.d.me))


def test_a_source_cannot_reach_for_a_destination_that_has_no_address() -> None:
    pair = parted()
    life = pair.p.node.state.peers.lives[key_of(pair.d.me)]
    life.dialled, life.description = "", describe("d", 2, address="")
    pair.tick(1.0)
    assert not pair.p.node.state.peers.dials
    pair.p.admit(life.description)
    assert pair.p.node.state.moves.closes.sent


@pytest.mark.parametrize("how", ["replaced", "over"])
def test_a_source_reaches_for_no_life_of_a_destination_that_is_known_to_be_over(how: str) -> None:
    pair = parted()
    if how == "replaced":
        pair.p.admit(describe("d", 7))
    else:
        pair.p.begin(describe("p", 8))
    pair.tick(1.0)
    assert not pair.p.node.state.peers.dials


def test_a_source_reaches_for_a_life_again_whose_next_one_is_dead_too() -> None:
    pair = parted()
    next_one = describe("d", 7, address="elsewhere")
    pair.p.admit(next_one)
    pair.tick(1.0)
    assert not pair.p.node.state.peers.dials
    pair.feed(pair.p, PeerSilent(key_of(next_one)))
    pair.tick(pair.p.state.limits.peer_grace_s)
    due = pair.p.node.state.timers.when(Timer.DEAD_PEER_RETRY, key_of(pair.d.me))
    assert due is not None
    pair.tick(due - pair.p.now)
    assert list(pair.p.node.state.peers.dials) == [pair.d.me.address]


def test_closes_to_a_dead_peer_wait_for_it_to_come_back(lead: Lead) -> None:
    first = closing(lead)
    lead.feed(CloseAnswered(access_id(), answered=False))
    lead.feed(PeerSilent(key_of(P)))
    for _ in range(9):
        lead.tick(1.0)
        lead.feed(CloseAnswered(access_id(), answered=False))
    lead.tick(1.0)
    assert lead.tick(100.0) == []
    lead.admit(P)
    assert lead.node.state.moves.closes.sent == {access_id(): first}
    lead.feed(CloseAnswered(access_id(), answered=False))
    assert lead.tick(1.0) == [first]


def test_closes_to_a_forgotten_peer_are_forgotten(lead: Lead) -> None:
    closing(lead)
    for number in range(2, DEAD_KEPT + 3):
        lead.admit(describe("p", number))
    assert key_of(P) not in lead.state.peers.lives
    assert set(lead.node.state.moves.closes.kept) <= set(lead.state.peers.lives)
    lead.admit(P)
    assert lead.seen(SendClose) == []


def test_what_a_settle_closed_needs_no_close(lead: Lead) -> None:
    pull = lead.pull(TOKEN)
    lead.feed(AccessAnswered(access_id(), answer_of(P)))
    lead.give(pull.id)
    lead.feed(SettleAnswered(access_id(), PreconditionFailed(Reason.NO_HANDSHAKE, "")))
    assert lead.seen(SendClose) == []
