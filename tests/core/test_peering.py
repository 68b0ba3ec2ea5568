"""Peering: both ways at once, a newer life buries the old, silence is turned into death, and every wait ends."""

import dataclasses
from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import (
    Dial,
    HangUp,
    Introduced,
    MakeOffer,
    MapPeer,
    PeerConnected,
    SendOpen,
    TransferChanged,
    UnmapPeer,
    WeightsUnknown,
)
from kvgrpc.core.compatibility import EngineDescription
from kvgrpc.core.events import DialFailed, EndpointOffered, Event, PeerAlive, PeerAnswered, PeerMapped, PeerSilent
from kvgrpc.core.limits import Limits
from kvgrpc.core.lives import DEAD_KEPT
from kvgrpc.core.peering import ADMISSIONS_OF_A_LIFE
from kvgrpc.core.peers import PeerState
from kvgrpc.core.transfers import State
from kvgrpc.errors import (
    Aborted,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from tests.core.nodes import (
    Lead,
    access_id,
    describe,
    endpoint,
    endpoints,
    grant,
    hybrid,
    key_of,
    refused,
    snapshot,
)

P = describe("p", 1)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("d", 2))


def state_of(lead: Lead, peer: EngineDescription) -> PeerState:
    state: PeerState = lead.state.peers[key_of(peer)].state
    return state


def connect(lead: Lead, address: str = "p:1", engine_id: str = "") -> int:
    return lead.ask(lambda c: events.ConnectPeer(c, address, engine_id), principal="router")


def introduce(lead: Lead, peer: EngineDescription, expected: str = "", **fields: Any) -> int:
    where = fields.get("endpoints", endpoints(peer))
    return lead.ask(lambda c: events.HandshakeReceived(c, peer, where, expected), principal="peer")


# -- we dial


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
    view = lead.answer(call).peer
    assert isinstance(lead.answer(call), PeerConnected)
    assert (view.engine_id, view.state, view.address, view.paths[0].data_path) == (
        "p", PeerState.CONNECTED, "p:1", "shm"
    )  # fmt: skip
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
        lead.feed(PeerMapped(rank, key_of(peer), "shm", ""))
    assert [path.rank for path in lead.answer(call).peer.paths] == [0, 1, 2]


@pytest.mark.parametrize(
    "error",
    [
        PermissionDenied(Reason.DIAL_REFUSED, "not on the list"),
        Unavailable(Reason.PEER_UNREACHABLE, "connection refused"),
        PreconditionFailed(Reason.INCOMPATIBLE_POOLS, "other heads"),
    ],
    ids=lambda error: error.reason.value,
)
def test_a_failed_dial_fails_whoever_waits_and_the_next_dials_again(lead: Lead, error: KVGrpcError) -> None:
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
def test_what_cannot_be_used_is_refused_on_both_ways(
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
    assert not lead.state.peers


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
    stranger = key_of(P) not in lead.state.peers
    for event in late:
        hung_up = [HangUp(key_of(P))] if stranger and isinstance(event, PeerAnswered) else []
        assert lead.feed(event) == hung_up
    again = connect(lead)
    lead.connect(P)
    assert isinstance(lead.answer(again), PeerConnected)


def test_a_half_mapped_peer_is_not_reachable_after_the_timeout() -> None:
    lead, peer = Lead(describe("d", 2, world_size=2)), describe("p", 1, world_size=2)
    connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", peer, endpoints(peer)))
    lead.feed(PeerMapped(0, key_of(peer), "shm", ""))
    lead.tick(10.0)
    assert not lead.state.peers[key_of(peer)].reachable


# -- they dial


def test_a_peer_that_introduces_itself_learns_our_endpoints_and_is_mapped(lead: Lead) -> None:
    call = introduce(lead, P, expected="d")
    assert [type(action) for action in lead.done] == [MapPeer, MakeOffer]
    lead.feed(EndpointOffered(0, lead.one(MakeOffer).key, endpoint(0, "ours")))
    assert lead.answer(call) == Introduced(lead.me, (endpoint(0, "ours"),), 1)
    assert state_of(lead, P) is PeerState.CONNECTED


@pytest.mark.parametrize(("ours", "theirs", "told"), [("", "", True), ("w", "w", False)])
def test_each_life_whose_weights_nobody_can_compare_is_told_of_once(ours: str, theirs: str, told: bool) -> None:
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


def test_without_a_pool_nobody_is_admitted(lead: Lead) -> None:
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


def test_an_address_is_never_taken_for_the_name_of_a_handshake(lead: Lead) -> None:
    """A grant names an address of its maker's choosing: whatever it is, other handshakes go on."""
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
    """That many that introduced themselves and did no more."""
    made = [describe(f"stranger-{number}", 1) for number in range(count)]
    for peer in made:
        introduce(lead, peer)
    return made


def test_callers_that_only_introduced_themselves_make_room_for_new_ones_the_first_first() -> None:
    lead = Lead(describe("d", 2), Limits(new_peers=2))
    lead.admit(P)
    first, second, third = strangers(lead, 3)
    assert [state_of(lead, peer) for peer in (P, first, second, third)] == [
        PeerState.CONNECTED, PeerState.DEAD, PeerState.CONNECTED, PeerState.CONNECTED
    ]  # fmt: skip


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
    assert [state_of(lead, peer) for peer in (P, q, stranger)] == [
        PeerState.CONNECTED, PeerState.CONNECTED, PeerState.DEAD
    ]  # fmt: skip


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
    dead = lead.state.peers[key_of(P)]
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


def test_what_an_engine_is_does_not_change_within_its_life(lead: Lead) -> None:
    lead.admit(P)
    before = snapshot(lead.node)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        lead.answer(introduce(lead, describe("p", 1, pool=type(P.pool)(P.pool.groups, P.pool.regions, 9999))))
    assert snapshot(lead.node) == before
    introduce(lead, describe("p", 1, address="moved:1"))
    assert lead.state.peers[key_of(P)].description.address == "moved:1"


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
    assert lead.node.peers()[0].silence_s == 100.0


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
    old = lead.state.peers[key_of(P)]
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(10.0)
    lead.admit(P)
    assert state_of(lead, P) is PeerState.CONNECTED
    assert lead.state.peers[key_of(P)] is not old
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
        lead.answer(introduce(lead, P))
    assert snapshot(lead.node) == before


def test_a_life_that_was_taken_for_the_older_comes_back_when_the_other_does_not_stream(lead: Lead) -> None:
    new, old = describe("p", 9), P
    lead.admit(new)
    introduce(lead, old)
    assert state_of(lead, new) is PeerState.DEAD
    lead.admit(new)
    assert (state_of(lead, new), state_of(lead, old)) == (PeerState.CONNECTED, PeerState.DEAD)


def test_a_peer_that_dies_during_its_handshake_fails_whoever_waits(lead: Lead) -> None:
    call = connect(lead)
    lead._offer()
    lead.feed(PeerAnswered("p:1", P, endpoints(P)))
    introduce(lead, describe("p", 9))
    with refused(Reason.PEER_UNREACHABLE, Unavailable):
        lead.answer(call)


def test_a_silent_peer_is_dialled_again_by_whoever_needs_it(lead: Lead) -> None:
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
    states = [peer.state for peer in lead.state.peers.values()]
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


def test_the_end_of_our_life_refuses_whoever_waits_and_forgets_everybody(lead: Lead) -> None:
    lead.admit(P)
    calls = [connect(lead, "q:1"), introduce(lead, describe("r", 1))]
    done = lead.begin(describe("d", 3))
    for call in calls:
        with refused(Reason.ENGINE_LOST, Unavailable):
            lead.answer(call)
    assert HangUp(key_of(P)) in done
    assert not lead.state.peers
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
        events.PostingEnded("t-1/0", True),
    )
    for event in late:
        assert lead.feed(event) == ([HangUp(key_of(P))] if isinstance(event, PeerAnswered) else [])
