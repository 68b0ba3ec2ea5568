"""Lives of peers: a newer life ends an older one, silence kills after the grace, and a lead forgets all at its end."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import HangUp, MakeOffer, MapPeer, SendOpen, TransferChanged, UnmapPeer
from kvgrpc.core.events import DialFailed, EndpointOffered, PeerAlive, PeerAnswered, PeerMapped, PeerSilent
from kvgrpc.core.peers.liveness import DEAD_KEPT
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.errors import Aborted, Reason, Unavailable
from tests.core.nodes import Lead, describe, endpoint, endpoints, grant, key_of, refused, snapshot
from tests.core.peers.dialled_peers import connect, introduce, state_of

P = describe("p", 1)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("d", 2))


# -- life and death


def test_silence_makes_suspect_and_the_grace_kills(lead: Lead) -> None:
    lead.admit(P)
    lead.feed(PeerSilent(key_of(P)))
    assert state_of(lead, P) is PeerState.SUSPECT
    assert lead.feed(PeerSilent(key_of(P)), 5.0) == []
    lead.tick(4.9)
    assert state_of(lead, P) is PeerState.SUSPECT
    done = lead.tick(0.1)
    assert state_of(lead, P) is PeerState.DEAD
    assert done == [UnmapPeer(0, key_of(P), gone=True), HangUp(key_of(P))]


def test_a_peer_heard_within_the_grace_lives(lead: Lead) -> None:
    lead.admit(P)
    lead.feed(PeerSilent(key_of(P)))
    lead.feed(PeerAlive(key_of(P)), 9.9)
    lead.tick(100.0)
    assert state_of(lead, P) is PeerState.CONNECTED
    assert lead.now - lead.state.peers.lives[key_of(P)].heard == 100.0


def test_a_peer_that_never_brings_up_its_stream_is_dead_after_the_grace(lead: Lead) -> None:
    introduce(lead, P)
    lead.tick(9.9)
    assert state_of(lead, P) is PeerState.CONNECTED
    lead.tick(0.1)
    assert state_of(lead, P) is PeerState.DEAD


def test_a_handshake_of_a_streaming_peer_needs_no_new_stream(lead: Lead) -> None:
    lead.admit(P)
    introduce(lead, P)
    lead.tick(20.0)
    assert state_of(lead, P) is PeerState.CONNECTED


def test_the_dead_are_not_heard(lead: Lead) -> None:
    lead.admit(P)
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(10.0)
    for event in (PeerAlive(key_of(P)), PeerSilent(key_of(P)), PeerMapped(0, key_of(P), "shm", "")):
        assert lead.feed(event) == []
    assert state_of(lead, P) is PeerState.DEAD
    for event in (PeerAlive("x"), PeerSilent("x"), PeerMapped(0, "x", "shm", "")):
        assert lead.feed(event) == []


def test_only_a_new_handshake_readmits(lead: Lead) -> None:
    lead.admit(P)
    old = lead.state.peers.lives[key_of(P)]
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(10.0)
    lead.admit(P)
    assert state_of(lead, P) is PeerState.CONNECTED
    assert lead.state.peers.lives[key_of(P)] is not old
    assert old.state is PeerState.DEAD


def test_a_newer_life_buries_the_old(lead: Lead) -> None:
    lead.admit(P)
    pull = lead.pull(grant(P), 32, (0, 1))
    introduce(lead, describe("p", 9))
    assert state_of(lead, P) is PeerState.DEAD
    assert HangUp(key_of(P)) in lead.done
    failure = lead.transfer(pull.id).failure
    assert failure is not None
    assert failure.reason is Reason.PEER_LOST
    assert state_of(lead, describe("p", 9)) is PeerState.CONNECTED


def test_a_message_of_the_older_life_that_was_long_under_way_is_refused(lead: Lead) -> None:
    lead.admit(P)
    lead.admit(describe("p", 9))
    before = snapshot(lead.node)
    with refused(Reason.INCARNATION_CHANGED, Aborted):
        lead.answer(introduce(lead, P, late=True))
    assert snapshot(lead.node) == before


def test_a_life_believed_to_be_older_comes_back_when_the_other_does_not_stream(lead: Lead) -> None:
    new, old = describe("p", 9), P
    lead.admit(new)
    introduce(lead, old)
    assert state_of(lead, new) is PeerState.DEAD
    lead.admit(new)
    assert (state_of(lead, new), state_of(lead, old)) == (PeerState.CONNECTED, PeerState.DEAD)


def test_a_peer_that_dies_during_its_handshake_fails_what_waits(lead: Lead) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    introduce(lead, describe("p", 9))
    with refused(Reason.PEER_UNREACHABLE, Unavailable):
        lead.answer(call)


def test_a_silent_peer_is_dialled_again_by_the_next_move(lead: Lead) -> None:
    lead.admit(P)
    lead.feed(PeerSilent(key_of(P)))
    lead.pull(grant(P), 32, (0, 1))
    lead.connect(P)
    assert state_of(lead, P) is PeerState.CONNECTED
    assert lead.one(SendOpen).peer == key_of(P)
    assert lead.node.next_deadline() == lead.now + 30.0, "the grace is over; what is left is the pull's queue timeout"


def test_only_so_many_of_the_dead_are_shown(lead: Lead) -> None:
    for number in range(1, DEAD_KEPT + 5):
        lead.admit(describe("p", number))
    states = [peer.state for peer in lead.state.peers.lives.values()]
    assert states.count(PeerState.DEAD) == DEAD_KEPT
    assert states.count(PeerState.CONNECTED) == 1


# -- memory


def test_memory_that_was_registered_anew_is_mapped_anew_and_its_pulls_fail(lead: Lead) -> None:
    lead.admit(P)
    pull = lead.pull(grant(P), 32, (0, 1))
    lead.ask(
        lambda c: events.HandshakeReceived(c, describe("p", 1, memory_generation=1), endpoints(P, "anew")),
        principal="peer",
    )
    failure = lead.transfer(pull.id).failure
    assert failure is not None
    assert failure.reason is Reason.MEMORY_CHANGED
    assert UnmapPeer(0, key_of(P)) in lead.done
    assert lead.seen(MapPeer) == [MapPeer(0, key_of(P), endpoint(0, "anew"), 2)]
    assert HangUp(key_of(P)) not in lead.done


# -- the end of a life


def test_the_end_of_a_life_refuses_what_waits_and_forgets_all_peers(lead: Lead) -> None:
    lead.admit(P)
    calls = [connect(lead, "q:1"), introduce(lead, describe("r", 1))]
    done = lead.begin(describe("d", 3))
    for call in calls:
        with refused(Reason.ENGINE_LOST, Unavailable):
            lead.answer(call)
    assert HangUp(key_of(P)) in done
    assert not lead.state.peers.lives
    assert lead.seen(TransferChanged) == []
    assert lead.feed(EndpointOffered(0, "h2", endpoint())) == []


def test_the_end_of_our_life_hangs_up_on_the_living_only(lead: Lead) -> None:
    lead.admit(P)
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(10.0)
    done = lead.begin(describe("d", 3))
    assert HangUp(key_of(P)) not in done


def test_reports_of_ranks_after_the_engine_is_gone_are_no_news(lead: Lead) -> None:
    connect(lead)
    key = lead.one(MakeOffer).key
    lead.begin(None, attached=False)
    late = (
        EndpointOffered(0, key, endpoint()),
        PeerAnswered("p:1", P, endpoints(P)),
        DialFailed("p:1", Unavailable(Reason.PEER_UNREACHABLE, "")),
        PeerMapped(0, key_of(P), "shm", ""),
        PeerAlive(key_of(P)),
        PeerSilent(key_of(P)),
        events.StepDone(0, 5),
        events.PostingEnded("t-1/0.0", True),
    )
    for event in late:
        assert lead.feed(event) == ([HangUp(key_of(P))] if isinstance(event, PeerAnswered) else [])
