"""Handshakes that this lead begins: calls for one address share one, and every handshake ends."""

from typing import Any

import pytest

from kvgrpc.core.actions import Dial, HangUp, MakeOffer, MapPeer, PeerConnected, SendOpen, UnmapPeer
from kvgrpc.core.events import DialFailed, EndpointOffered, Event, MeetingBegan, PeerAnswered, PeerMapped, PeerSilent
from kvgrpc.core.peers.handshakes import MEETING_S
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.errors import InvalidRequest, KVGrpcError, PermissionDenied, PreconditionFailed, Reason, Unavailable
from tests.core.nodes import Lead, access_id, describe, endpoint, endpoints, grant, hybrid, key_of, refused, snapshot
from tests.core.peers.dialled_peers import connect, introduce, state_of

P = describe("p", 1)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("d", 2))


def test_a_dial_states_our_endpoints_and_maps_theirs(lead: Lead) -> None:
    call = connect(lead)
    offer = lead.one(MakeOffer)
    assert lead.feed(EndpointOffered(0, offer.key, endpoint(0, "ours"))) == [
        Dial("p:1", "", (endpoint(0, "ours"),), "")
    ]
    lead.feed(PeerAnswered("p:1", P, endpoints(P, "theirs")))
    assert lead.seen(MapPeer) == [MapPeer(0, key_of(P), endpoint(0, "theirs"), 1)]
    assert lead.answer(call) is None
    lead.feed(PeerMapped(0, key_of(P), "shm", "same host"))
    assert lead.answer(call) == PeerConnected(key_of(P))
    peer = lead.state.peers.lives[key_of(P)]
    assert (peer.state, peer.address, peer.paths[0, 0].data_path) == (PeerState.CONNECTED, "p:1", "shm")
    assert lead.state.timers.next_deadline() is None


def test_a_connected_peer_is_told_at_once(lead: Lead) -> None:
    connect(lead)
    lead.connect(P)
    assert isinstance(lead.answer(connect(lead)), PeerConnected)
    call = connect(lead, engine_id="q")
    with refused(Reason.WRONG_ENGINE, PreconditionFailed):
        lead.answer(call)


def test_calls_for_one_address_share_a_handshake(lead: Lead) -> None:
    first = connect(lead)
    offers = lead.seen(MakeOffer)
    second = connect(lead, engine_id="p")
    assert lead.seen(MakeOffer) == []
    lead.done = offers  # type: ignore[assignment]
    lead.connect(P)
    assert isinstance(lead.answer(first), PeerConnected)
    assert isinstance(lead.answer(second), PeerConnected)


def test_an_address_is_required_and_a_pool_too(lead: Lead) -> None:
    before = snapshot(lead.node)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        lead.answer(connect(lead, ""))
    assert snapshot(lead.node) == before
    lead.begin(None, attached=False)
    with refused(Reason.NO_POOL, Unavailable):
        lead.answer(connect(lead))


def test_ranks_answer_in_any_order() -> None:
    lead, peer = Lead(describe("d", 2, world_size=3)), describe("p", 1, world_size=3)
    call = connect(lead)
    key = lead.seen(MakeOffer)[0].key
    for rank in (2, 0, 1):
        assert lead.seen(Dial) == []
        lead.feed(EndpointOffered(rank, key, endpoint(rank)))
    assert lead.one(Dial).endpoints == endpoints(peer)
    lead.feed(PeerAnswered("p:1", peer, endpoints(peer)[::-1]))
    for rank in (1, 2, 0):
        assert lead.answer(call) is None
        lead.feed(PeerMapped(rank, key_of(peer), "shm", "", peer_rank=rank))
    assert lead.answer(call) == PeerConnected(key_of(peer))
    assert sorted(lead.state.peers.lives[key_of(peer)].paths) == [(rank, rank) for rank in range(3)]


@pytest.mark.parametrize(
    "error",
    [
        PermissionDenied(Reason.DIAL_REFUSED, "not on the list"),
        Unavailable(Reason.PEER_UNREACHABLE, "connection refused"),
        PreconditionFailed(Reason.INCOMPATIBLE_POOLS, "other heads"),
    ],
    ids=lambda error: error.reason.value,
)
def test_a_failed_dial_fails_what_waits_and_the_next_dials_again(lead: Lead, error: KVGrpcError) -> None:
    call = connect(lead)
    pull = lead.pull(grant(P), 32, (0, 1))
    lead.feed(DialFailed("p:1", error))
    with refused(error.reason):
        lead.answer(call)
    assert lead.transfer(pull.id).state is State.FAILED
    assert lead.feed(DialFailed("p:1", error)) == [], "late news"
    assert lead.feed(PeerAnswered("p:1", P, endpoints(P))) == [HangUp(key_of(P))], "it would hear us for ever"
    connect(lead)
    assert lead.seen(MakeOffer)


@pytest.mark.parametrize(
    ("peer", "where", "reason"),
    [
        (describe("p", 1, pool=hybrid()), endpoints(P), Reason.INCOMPATIBLE_POOLS),
        (describe("p", 1, weights_revision="x"), endpoints(P), Reason.WEIGHTS_MISMATCH),
        (describe("p", 1, protocol_min=2, protocol_max=2), endpoints(P), Reason.PROTOCOL_UNSUPPORTED),
        (P, (), Reason.INVALID_FIELD),
        (P, (endpoint(0), endpoint(1)), Reason.INVALID_FIELD),
        (P, (endpoint(7),), Reason.INVALID_FIELD),
        (P, (endpoint(-1),), Reason.INVALID_FIELD),
    ],
)
def test_an_unusable_peer_is_refused_on_both_ways(
    lead: Lead, peer: EngineDescription, where: Any, reason: Reason
) -> None:
    before = snapshot(lead.node)
    with refused(reason):
        lead.answer(introduce(lead, peer, endpoints=where))
    assert snapshot(lead.node) == before
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", peer, where))
    assert HangUp(key_of(peer)) in lead.done
    with refused(reason):
        lead.answer(call)
    assert not lead.state.peers.lives


def test_an_answer_that_came_too_late_takes_no_channel_from_a_life_that_introduced_itself(lead: Lead) -> None:
    connect(lead)
    lead._offer()
    lead.admit(P)
    lead.feed(DialFailed("p:1", Unavailable(Reason.PEER_UNREACHABLE, "no answer in time")))
    assert lead.feed(PeerAnswered("p:1", P, endpoints(P))) == []
    assert state_of(lead, P) is PeerState.CONNECTED


def test_an_answer_of_a_life_that_is_dead_is_not_heard_any_further(lead: Lead) -> None:
    connect(lead)
    lead.connect(P)
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(lead.state.limits.peer_grace_s)
    assert state_of(lead, P) is PeerState.DEAD
    assert lead.feed(PeerAnswered("p:1", P, endpoints(P))) == [HangUp(key_of(P))]


def test_a_wrong_engine_fails_only_those_who_expected_it(lead: Lead) -> None:
    q = describe("q", 5, address="p:1")
    wrong = lead.pull(grant(describe("x", 9, address="p:1")), 32, (0, 1), number=1)
    right = lead.pull(grant(q), 32, (2, 3), number=2)
    call = connect(lead, engine_id="q")
    lead.feed(EndpointOffered(0, "h1", endpoint()))
    assert lead.one(Dial).expected_engine_id == "x"
    lead.feed(DialFailed("p:1", PreconditionFailed(Reason.WRONG_ENGINE, "this is q")))
    assert lead.transfer(wrong.id).state is State.FAILED
    assert lead.transfer(right.id).state is State.PENDING
    lead.connect(q)
    assert lead.one(SendOpen).opening.access_id == access_id(2)
    assert isinstance(lead.answer(call), PeerConnected)


def test_a_server_that_does_not_check_is_checked_here(lead: Lead) -> None:
    wrong = lead.pull(grant(describe("x", 9, address="p:1")), 32, (0, 1), number=1)
    offers = lead.seen(MakeOffer)
    right = lead.pull(grant(P), 32, (2, 3), number=2)
    calls = [connect(lead, engine_id="y"), connect(lead)]
    lead.done = offers  # type: ignore[assignment]
    lead.connect(P)
    failure = lead.transfer(wrong.id).failure
    assert failure is not None
    assert failure.reason is Reason.WRONG_ENGINE
    assert lead.transfer(right.id).waiting_for == "access"
    with refused(Reason.WRONG_ENGINE):
        lead.answer(calls[0])
    assert isinstance(lead.answer(calls[1]), PeerConnected)


def test_a_peer_that_no_data_path_reaches_is_refused_with_every_reason(lead: Lead) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.map(P, data_path="")
    with pytest.raises(PreconditionFailed, match=r"NO_DATA_PATH.*shm: it is on another host"):
        lead.answer(call)
    again = connect(lead)
    lead.connect(P)
    assert isinstance(lead.answer(again), PeerConnected), "the next handshake tries again"


def test_a_path_without_a_reason_says_so(lead: Lead) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.feed(PeerMapped(0, key_of(P), "", ""))
    with pytest.raises(PreconditionFailed, match="none is enabled on both sides"):
        lead.answer(call)


@pytest.mark.parametrize("stage", ["offer", "dial", "map"])
def test_a_handshake_ends_after_its_timeout_wherever_it_hangs(lead: Lead, stage: str) -> None:
    call = connect(lead)
    if stage != "offer":
        lead._offer()
    if stage == "map":
        lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.tick(9.9)
    assert lead.answer(call) is None
    lead.tick(0.1)
    with refused(Reason.PEER_UNREACHABLE, Unavailable):
        lead.answer(call)
    late: list[Event] = [
        EndpointOffered(0, "h1", endpoint()),
        PeerAnswered("p:1", P, endpoints(P)),
        PeerMapped(0, key_of(P), "shm", ""),
    ]
    stranger = key_of(P) not in lead.state.peers.lives
    for event in late:
        hung_up = [HangUp(key_of(P))] if stranger and isinstance(event, PeerAnswered) else []
        assert lead.feed(event) == hung_up
    again = connect(lead)
    lead.connect(P)
    assert isinstance(lead.answer(again), PeerConnected)


def began(rank: int = 0, attempt: int = 1, peer: EngineDescription = P) -> MeetingBegan:
    return MeetingBegan(rank, key_of(peer), attempt, rank)


def test_loading_a_library_takes_none_of_a_handshake_s_time(lead: Lead) -> None:
    """Time spent before the ranks meet does not count, and the extra time is granted once."""
    call = connect(lead)
    lead._offer()
    lead.tick(9.0)
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    assert lead.feed(began()) == []
    lead.tick(MEETING_S)
    lead.feed(began())
    lead.tick(9.9)
    assert lead.answer(call) is None
    lead.tick(0.1)
    with refused(Reason.PEER_UNREACHABLE, Unavailable):
        lead.answer(call)
    assert lead.seen(UnmapPeer) == [UnmapPeer(0, key_of(P))]


def test_a_peer_that_states_ever_other_endpoints_gains_that_time_once(lead: Lead) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.feed(began())
    for attempt in range(2, 8):
        lead.tick(9.0)
        introduce(lead, P, endpoints=endpoints(P, f"other {attempt}"))
        lead.feed(PeerMapped(0, key_of(P), "", "", attempt=attempt - 1))
        lead.feed(began(attempt=attempt))
    with refused(Reason.PEER_UNREACHABLE, Unavailable):
        lead.answer(call)


def test_ranks_that_met_in_time_are_connected(lead: Lead) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.feed(began())
    lead.tick(15.0)
    lead.feed(PeerMapped(0, key_of(P), "collective", "", attempt=1))
    assert isinstance(lead.answer(call), PeerConnected)
    assert lead.state.timers.next_deadline() is None


def test_a_handshake_waits_longer_for_ranks_that_met_before_it_as_well(lead: Lead) -> None:
    """The peer dialled this lead first; this lead dials back while its rank is still meeting the peer's."""
    introduce(lead, P)
    lead.feed(began())
    call = connect(lead)
    for offer in lead.seen(MakeOffer):
        lead.feed(EndpointOffered(offer.rank, offer.key, endpoint()))
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.tick(15.0)
    assert lead.answer(call) is None
    lead.feed(PeerMapped(0, key_of(P), "collective", "", attempt=1))
    assert isinstance(lead.answer(call), PeerConnected)


def test_ranks_that_did_not_meet_are_worth_another_try_and_say_so(lead: Lead) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.feed(began())
    lead.feed(PeerMapped(0, key_of(P), "", "", (("shm", "other host"), ("collective", "the other rank did not come"))))
    with pytest.raises(Unavailable, match=r"PEER_UNREACHABLE.*did not come.*try again") as caught:
        lead.answer(call)
    assert caught.value.retry_delay_s
    again = connect(lead)
    lead.connect(P)
    assert isinstance(lead.answer(again), PeerConnected)


def test_a_pair_of_ranks_without_a_path_is_no_passing_failure_because_another_pair_meets() -> None:
    lead, peer = Lead(describe("d", 2, world_size=2)), describe("p", 1, world_size=2)
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", peer, endpoints(peer)))
    lead.feed(began(peer=peer))
    lead.feed(PeerMapped(0, key_of(peer), "", "", (("collective", "the other rank did not come"),)))
    lead.feed(PeerMapped(1, key_of(peer), "", "", (("collective", "the peer offers none"),), peer_rank=1))
    with pytest.raises(PreconditionFailed, match=r"NO_DATA_PATH.*rank 1 .*the peer offers none"):
        lead.answer(call)


@pytest.mark.parametrize("other_missed", [False, True])
def test_a_meeting_that_failed_for_good_is_not_worth_a_retry_and_says_why(other_missed: bool) -> None:
    lead, peer = Lead(describe("d", 2, world_size=2)), describe("p", 1, world_size=2)
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", peer, endpoints(peer)))
    for rank in range(2):
        lead.feed(began(rank, peer=peer))
    late, lacks = (("collective", "the other rank did not come"),), (("collective", "no library"),)
    lead.feed(PeerMapped(0, key_of(peer), "", "", late if other_missed else lacks, 1, 0, not other_missed))
    lead.feed(PeerMapped(1, key_of(peer), "", "", lacks, 1, 1, permanent=True))
    with pytest.raises(PreconditionFailed, match=r"NO_DATA_PATH.*no library") as caught:
        lead.answer(call)
    assert caught.value.retry_delay_s is None


def test_ranks_that_met_in_an_earlier_mapping_count_as_strangers_in_the_next(lead: Lead) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.feed(began())
    lead.feed(PeerMapped(0, key_of(P), "", ""))
    again = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    lead.feed(PeerMapped(0, key_of(P), "", ""))
    for one, error in ((call, Unavailable), (again, PreconditionFailed)):
        with pytest.raises(error):
            lead.answer(one)


@pytest.mark.parametrize("said", [began(attempt=2), began(rank=1), began(peer=describe("q", 1))])
def test_what_a_rank_says_of_another_mapping_lengthens_no_handshake(lead: Lead, said: MeetingBegan) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    assert lead.feed(said) == []
    lead.tick(10.0)
    with refused(Reason.PEER_UNREACHABLE, Unavailable):
        lead.answer(call)


def test_a_half_mapped_peer_is_not_reachable_after_the_timeout() -> None:
    lead, peer = Lead(describe("d", 2, world_size=2)), describe("p", 1, world_size=2)
    connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", peer, endpoints(peer)))
    lead.feed(PeerMapped(0, key_of(peer), "shm", ""))
    lead.tick(10.0)
    assert not lead.state.peers.lives[key_of(peer)].reachable
