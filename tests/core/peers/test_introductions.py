"""Handshakes that a peer begins, and the limits on handshakes that callers cause."""

import dataclasses

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import Introduced, MakeOffer, MapPeer, PeerConnected, SendOpen, UnmapPeer, WeightsUnknown
from kvgrpc.core.events import EndpointOffered, PeerAlive, PeerAnswered, PeerMapped, PeerSilent
from kvgrpc.core.peers.handshakes import ADMISSIONS_OF_A_LIFE
from kvgrpc.core.peers.liveness import DEAD_KEPT
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Exhausted, InvalidRequest, PreconditionFailed, Reason, Unavailable
from tests.core.nodes import Lead, describe, endpoint, endpoints, grant, key_of, refused, snapshot
from tests.core.peers.dialled_peers import connect, introduce, state_of

P = describe("p", 1)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("d", 2))


def test_a_peer_that_introduces_itself_learns_our_endpoints_and_is_mapped(lead: Lead) -> None:
    call = introduce(lead, P, expected="d")
    assert [type(action) for action in lead.done] == [MapPeer, MakeOffer]
    lead.feed(EndpointOffered(0, lead.one(MakeOffer).key, endpoint(0, "ours")))
    proof = lead.state.peers.lives[key_of(P)].asks[0]
    assert lead.answer(call) == Introduced(lead.me, P, (endpoint(0, "ours"),), 1, proof)
    assert state_of(lead, P) is PeerState.CONNECTED


@pytest.mark.parametrize(("ours", "theirs", "told"), [("", "", True), ("w", "w", False)])
def test_each_life_whose_weights_cannot_be_compared_is_told_of_once(ours: str, theirs: str, told: bool) -> None:
    lead = Lead(describe("p", 1, weights_revision=ours))
    peer = describe("d", 2, weights_revision=theirs)
    seen = []
    for again in (peer, peer, dataclasses.replace(peer, incarnation=3)):
        lead.ask(lambda c: events.HandshakeReceived(c, again, endpoints(again)), principal="peer")  # noqa: B023
        seen.append([action.peer for action in lead.seen(WeightsUnknown)])
    assert seen == ([[key_of(peer)], [], [key_of(dataclasses.replace(peer, incarnation=3))]] if told else [[], [], []])


def test_a_peer_that_means_another_engine_is_told(lead: Lead) -> None:
    before = snapshot(lead.node)
    with refused(Reason.WRONG_ENGINE, PreconditionFailed):
        lead.answer(introduce(lead, P, expected="x"))
    assert snapshot(lead.node) == before


def test_without_a_pool_no_peer_is_admitted(lead: Lead) -> None:
    lead.begin(None, attached=False)
    with refused(Reason.NO_POOL, Unavailable):
        lead.answer(introduce(lead, P))


def test_an_admission_ends_when_our_ranks_make_no_endpoint(lead: Lead) -> None:
    call = introduce(lead, P)
    key = lead.one(MakeOffer).key
    lead.feed(PeerAlive(key_of(P)))
    lead.tick(10.0)
    with refused(Reason.DEADLINE, Unavailable):
        lead.answer(call)
    assert lead.feed(EndpointOffered(0, key, endpoint())) == []


def test_an_address_is_never_the_name_of_a_handshake(lead: Lead) -> None:
    """The maker of a grant chooses the address in it, and no address can disturb another handshake."""
    call = introduce(lead, P)
    key = lead.one(MakeOffer).key
    lead.pull(grant(describe("x", 9, address=key)), 32, (0, 1))
    lead.feed(EndpointOffered(0, key, endpoint()))
    assert isinstance(lead.answer(call), Introduced)


def test_a_peer_that_dialled_us_is_used_without_a_dial_of_ours(lead: Lead) -> None:
    lead.admit(P)
    lead.pull(grant(P), 32, (0, 1))
    assert lead.one(SendOpen).peer == key_of(P)
    assert lead.seen(MakeOffer) == []


def test_both_may_dial_at_once(lead: Lead) -> None:
    pull = lead.pull(grant(P), 32, (0, 1))
    offer = lead.one(MakeOffer)
    admission = introduce(lead, P)
    admitted = lead.one(MakeOffer)
    assert len(lead.seen(MapPeer)) == 1
    lead.feed(EndpointOffered(0, offer.key, endpoint()))
    lead.feed(EndpointOffered(0, admitted.key, endpoint()))
    assert isinstance(lead.answer(admission), Introduced)
    lead.feed(PeerAnswered("p:1", P, endpoints(P, "newer")))
    assert lead.seen(MapPeer) == [], "its ranks are being reached already"
    lead.feed(PeerMapped(0, key_of(P), "shm", ""))
    assert lead.one(SendOpen).peer == key_of(P)
    assert lead.transfer(pull.id).waiting_for == "access"


def test_newer_endpoints_are_tried_when_the_first_did_not_work(lead: Lead) -> None:
    lead.pull(grant(P), 32, (0, 1))
    introduce(lead, P)
    lead.feed(PeerAnswered("p:1", P, endpoints(P, "newer")))
    lead.feed(PeerMapped(0, key_of(P), "", "", ()))
    assert lead.seen(MapPeer) == [MapPeer(0, key_of(P), endpoint(0, "newer"), 2)]
    lead.feed(PeerMapped(0, key_of(P), "shm", ""))
    assert lead.seen(SendOpen)


def test_peers_are_bounded() -> None:
    lead = Lead(describe("d", 2), Limits(peers=1))
    lead.admit(P)
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        lead.answer(introduce(lead, describe("q", 1)))
    introduce(lead, describe("p", 9))
    assert state_of(lead, describe("p", 9)) is PeerState.CONNECTED, "a newer life takes the place of the old"


def strangers(lead: Lead, count: int) -> list[EngineDescription]:
    """Lets `count` peers introduce themselves and do no more."""
    made = [describe(f"stranger-{number}", 1) for number in range(count)]
    for peer in made:
        introduce(lead, peer)
    return made


def test_callers_that_only_introduced_themselves_make_room_for_new_ones_the_first_first() -> None:
    lead = Lead(describe("d", 2), Limits(new_peers=2))
    lead.admit(P)
    first, second, third = strangers(lead, 3)
    expected = [PeerState.CONNECTED, PeerState.DEAD, PeerState.CONNECTED, PeerState.CONNECTED]
    assert [state_of(lead, peer) for peer in (P, first, second, third)] == expected


def test_a_caller_whose_stream_stood_once_makes_no_room_while_it_is_silent() -> None:
    lead = Lead(describe("d", 2), Limits(new_peers=1))
    introduce(lead, P)
    lead.feed(PeerAlive(key_of(P)))
    lead.feed(PeerSilent(key_of(P)))
    strangers(lead, 3)
    assert state_of(lead, P) is PeerState.SUSPECT


def test_where_no_more_peers_fit_new_callers_make_room_for_one_that_we_dial() -> None:
    lead = Lead(describe("d", 2), Limits(peers=2))
    lead.admit(P)
    (stranger,) = strangers(lead, 1)
    q = describe("q", 1, address="q:1")
    call = connect(lead, "q:1")
    lead.connect(q)
    assert isinstance(lead.answer(call), PeerConnected)
    expected = [PeerState.CONNECTED, PeerState.CONNECTED, PeerState.DEAD]
    assert [state_of(lead, peer) for peer in (P, q, stranger)] == expected


def test_a_caller_that_made_room_is_told_and_may_come_again() -> None:
    lead = Lead(describe("d", 2), Limits(new_peers=1))
    call = introduce(lead, P)
    strangers(lead, 1)
    with refused(Reason.PEER_UNREACHABLE, Unavailable):
        lead.answer(call)
    introduce(lead, P)
    assert state_of(lead, P) is PeerState.CONNECTED


def test_dead_callers_push_no_dead_peer_out_of_what_is_remembered() -> None:
    lead = Lead(describe("d", 2), Limits(new_peers=1))
    lead.admit(P)
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(11.0)
    strangers(lead, DEAD_KEPT + 5)
    assert state_of(lead, P) is PeerState.DEAD


def test_of_the_dead_nothing_is_kept_that_may_be_long(lead: Lead) -> None:
    lead.admit(P)
    lead.admit(describe("p", 9))
    dead = lead.state.peers.lives[key_of(P)]
    assert (dead.state, dead.endpoints, dead.tried) == (PeerState.DEAD, (), ())


def test_a_life_that_repeats_its_handshake_gives_up_its_oldest_and_no_other_life_s() -> None:
    lead = Lead(describe("d", 2))
    other = introduce(lead, describe("q", 1))
    calls = [introduce(lead, P) for _ in range(ADMISSIONS_OF_A_LIFE + 1)]
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        lead.answer(calls[0])
    assert [lead.answer(call) for call in (other, *calls[1:])] == [None] * (ADMISSIONS_OF_A_LIFE + 1)


def test_ranks_are_told_for_whom_an_endpoint_is_and_when_that_life_is_over(lead: Lead) -> None:
    introduce(lead, P)
    assert lead.one(MakeOffer).peer == key_of(P)
    introduce(lead, describe("p", 9))
    assert lead.one(UnmapPeer) == UnmapPeer(0, key_of(P), gone=True)
    connect(lead, "q:1")
    assert lead.one(MakeOffer).peer == "dial q:1"


@pytest.mark.parametrize("silent_s", [0.0, 10.0])
def test_what_an_engine_is_does_not_change_within_its_life(lead: Lead, silent_s: float) -> None:
    """This holds even while the life was declared dead: plans for the life stay valid afterwards."""
    lead.admit(P)
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(silent_s)
    before = snapshot(lead.node)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        lead.answer(introduce(lead, describe("p", 1, pool=type(P.pool)(P.pool.groups, P.pool.regions, 9999))))
    assert snapshot(lead.node) == before
    introduce(lead, describe("p", 1, address="moved:1"))
    assert lead.state.peers.lives[key_of(P)].description.address == "moved:1"
