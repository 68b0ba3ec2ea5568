"""A close that its issuer refuses is sent again less and less often, and after the issuer's next handshake."""

import pytest

from kvgrpc.core.actions import SendClose
from kvgrpc.core.events import AccessAnswered, CancelTransfer, CloseAnswered, PeerSilent
from kvgrpc.core.moves.pending_closes import RETRIES
from tests.core.nodes import Lead, access_id, answer_of, describe, grant, key_of

P = describe("p", 1)


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


def closing(lead: Lead) -> SendClose:
    """Opens an access, cancels its pull, and returns the closing that was sent."""
    pull = lead.pull(grant(P))
    lead.feed(AccessAnswered(access_id(), answer_of(P)))
    lead.call(lambda c: CancelTransfer(c, pull.id))
    return lead.one(SendClose)


def refuse(lead: Lead, times: int) -> None:
    """Lets the issuer refuse a close so many times, each time that it is sent."""
    for number in range(times):
        assert lead.feed(CloseAnswered(access_id(), answered=False)) == []
        assert lead.tick(2.0**number - 0.1) == []
        assert len(lead.tick(0.1)) == 1


def test_a_close_that_is_not_answered_is_sent_again_each_time_after_twice_as_long(lead: Lead) -> None:
    closing(lead)
    refuse(lead, 3)
    lead.feed(CloseAnswered(access_id(), answered=True))
    assert lead.tick(100.0) == []
    assert not lead.state.moves.closes.tries


def test_a_close_that_goes_on_being_refused_waits_for_the_next_handshake(lead: Lead) -> None:
    first = closing(lead)
    refuse(lead, RETRIES)
    lead.feed(CloseAnswered(access_id(), answered=False))
    assert lead.tick(10_000.0) == []
    assert not lead.state.moves.closes.sent
    lead.state.react.peer_ready("p:1", lead.state.peers.lives[key_of(P)])
    assert lead.node.state.actions == [first]
    assert not lead.state.moves.closes.parked(key_of(P))


def test_a_close_that_was_refused_too_often_waits_for_a_life_that_is_declared_dead(lead: Lead) -> None:
    first = closing(lead)
    refuse(lead, RETRIES)
    lead.feed(CloseAnswered(access_id(), answered=False))
    lead.feed(PeerSilent(key_of(P)))
    assert not any(isinstance(action, SendClose) for action in lead.tick(100.0))
    lead.admit(P)
    assert lead.state.moves.closes.sent == {access_id(): first}


def test_a_handshake_sends_at_once_what_was_refused_before(lead: Lead) -> None:
    first = closing(lead)
    refuse(lead, 5)
    lead.feed(CloseAnswered(access_id(), answered=False))
    lead.state.react.peer_ready("p:1", lead.state.peers.lives[key_of(P)])
    assert lead.node.state.actions == [first]
    lead.node.state.actions.clear()
    lead.feed(CloseAnswered(access_id(), answered=False))
    assert lead.tick(0.9) == []
    assert lead.tick(0.1) == [first]


def test_a_close_that_is_under_way_is_not_sent_twice_by_a_handshake(lead: Lead) -> None:
    closing(lead)
    refuse(lead, 1)
    lead.state.react.peer_ready("p:1", lead.state.peers.lives[key_of(P)])
    assert lead.node.state.actions == []
