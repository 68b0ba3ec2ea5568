"""Nobody speaks for a life of a peer without the proof that the life was given."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.events import Call, DialFailed, EndpointOffered, HandshakeReceived, PeerAlive, PeerAnswered, PeerSilent
from kvgrpc.core.peers.proofs import NEXT_LIFE_DELAY_S
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.ids import PROOFS_MAX
from kvgrpc.core.values.sends import MEET, SendAsk
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason, Unavailable
from tests.core.nodes import Lead, access_id, describe, endpoint, endpoints, grant, key_of, refused, snapshot
from tests.core.peers.dialled_peers import connect, state_of
from tests.core.shown import secret

P = describe("p", 1)
KEY = key_of(P)
A, B, C, D, LIE = (secret("s", name) for name in "abcde")
UINT32 = 2**32 - 1


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("d", 2))


@pytest.fixture
def met() -> Lead:
    """Makes a lead that has met P: the lead shows A to P, and P shows B."""
    lead = Lead(describe("d", 2))
    assert introduced(lead, shows=A, asks=B) == B
    lead.feed(PeerAlive(KEY, B))
    return lead


def introduced(lead: Lead, *proofs: bytes, shows: bytes, asks: bytes = C, incarnation: int = 1) -> bytes:
    """Lets a life of P shake hands, and returns the proof that the life must show."""
    life = replace(P, incarnation=incarnation)
    call = lead.ask(
        lambda c: HandshakeReceived(c, life, endpoints(life), shows=shows, asks=asks, proofs=proofs), principal="peer"
    )
    lead._offer()
    answer = lead.answer(call)
    assert isinstance(answer, actions.Introduced)
    return answer.proof


def begin(lead: Lead) -> actions.Dial:
    """Lets this lead dial P up to its call, and returns the `Dial` action."""
    connect(lead)
    lead.feed(EndpointOffered(0, lead.one(actions.MakeOffer).key, endpoint()))
    return lead.one(actions.Dial)


def wants_proof(life: str = "p", incarnation: int = 1) -> KVGrpcError:
    """Makes the error of a life that demands a proof."""
    error = PreconditionFailed(Reason.NOT_PROVED, "show it")
    error.engine_id, error.incarnation = life, incarnation
    return error


CALLS: dict[str, Callable[[Call], events.Event]] = {
    "open": lambda c: events.OpenAccess(c, "p", 1, ()),
    "settle": lambda c: events.SettleAccess(c, "p", 1, (events.AccessSettling(access_id(), last=True),)),
    "close": lambda c: events.CloseAccess(
        c, "p", 1, (events.AccessClosing(access_id(), events.CloseOutcome.DROPPED, quiesced=True),)
    ),
    "parts": lambda c: events.PartsReady(c, "p", 1, access_id(), ()),
    "checksums": lambda c: events.ChecksumBlocks(c, "p", 1, access_id(), ()),
    "send": lambda c: events.PostSend(c, "p", 1, b"", SendAsk(0, 0, UINT32, MEET)),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_no_call_is_taken_in_the_name_of_a_peer_without_its_proof(
    met: Lead, make: Callable[[Call], events.Event]
) -> None:
    before = snapshot(met.node)
    with refused(Reason.NOT_PROVED, PreconditionFailed):
        met.call(make, principal="peer", proof=LIE)
    assert snapshot(met.node) == before


def test_a_proof_is_never_empty(lead: Lead) -> None:
    introduced(lead, shows=A, asks=B)
    assert not lead.state.peers.lives[KEY].proves(b"")


def test_a_liveness_stream_without_the_proof_keeps_nobody_alive(met: Lead) -> None:
    met.feed(PeerSilent(KEY))
    met.feed(PeerAlive(KEY, LIE))
    assert state_of(met, P) is PeerState.SUSPECT
    met.feed(PeerAlive(KEY, B))
    assert state_of(met, P) is PeerState.CONNECTED


@pytest.mark.parametrize("proofs", [(), (LIE,), (b"",)], ids=["none", "another one", "an empty one"])
def test_a_handshake_in_the_name_of_a_life_that_has_met_is_refused(met: Lead, proofs: tuple[bytes, ...]) -> None:
    before = snapshot(met.node)
    with refused(Reason.NOT_PROVED, PreconditionFailed):
        introduced(met, *proofs, shows=LIE)
    assert snapshot(met.node) == before


def test_a_life_that_shows_its_proof_keeps_it(met: Lead) -> None:
    assert introduced(met, LIE, B, shows=A) == B
    assert met.state.peers.lives[KEY].shows == (A,)


def test_a_handshake_that_arrives_twice_is_of_one_caller(met: Lead) -> None:
    assert introduced(met, shows=A) == B


def test_of_a_life_that_has_not_met_the_last_handshake_counts(lead: Lead) -> None:
    """The answer to the earlier handshake may be lost, or the handshake was a stranger's."""
    introduced(lead, shows=LIE, asks=C)
    assert introduced(lead, shows=A, asks=B) == B
    assert not lead.state.peers.lives[KEY].proves(C)


def test_a_life_that_was_dead_shows_what_it_was_told_before(met: Lead) -> None:
    met.feed(PeerSilent(KEY))
    met.tick(10.0)
    assert introduced(met, B, shows=A) == B
    assert state_of(met, P) is PeerState.CONNECTED


def test_who_took_a_name_while_its_life_was_dead_gives_it_back(met: Lead) -> None:
    met.feed(PeerSilent(KEY))
    met.tick(10.0)
    assert introduced(met, shows=LIE, asks=C) == C
    met.feed(PeerAlive(KEY, C))
    assert introduced(met, B, shows=A) == B
    assert (met.state.peers.lives[KEY].proves(B), met.state.peers.lives[KEY].proves(C)) == (True, False)


@pytest.mark.parametrize("incarnation", [2, 2**53 - 1])
def test_a_next_life_waits_for_the_end_of_the_stream_of_the_one_before(met: Lead, incarnation: int) -> None:
    before = snapshot(met.node)
    with refused(Reason.NOT_PROVED, Unavailable):
        introduced(met, shows=LIE, incarnation=incarnation)
    assert snapshot(met.node) == before
    met.feed(PeerSilent(KEY))
    introduced(met, shows=LIE, incarnation=incarnation)
    assert state_of(met, P) is PeerState.DEAD


def test_a_next_life_that_answers_where_the_one_before_lives_is_taken_at_once(met: Lead) -> None:
    begin(met)
    following = replace(P, incarnation=2)
    for _ in range(2):  # the lead dials once more, since the next life has secrets of its own
        met.feed(PeerAnswered("p:1", following, endpoints(following)))
    assert state_of(met, P) is PeerState.DEAD


def test_a_life_that_answers_elsewhere_is_not_the_one_that_has_met(met: Lead) -> None:
    call = connect(met, "q:1")
    met.feed(EndpointOffered(0, met.one(actions.MakeOffer).key, endpoint()))
    before = met.state.peers.lives[KEY].asks
    met.feed(PeerAnswered("q:1", P, endpoints(P), LIE, LIE))
    with refused(Reason.PEER_FAILED, PreconditionFailed):
        met.answer(call)
    assert met.state.peers.lives[KEY].asks == before


@pytest.mark.parametrize("streams", [False, True])
def test_who_introduced_itself_as_a_life_has_no_part_in_what_that_life_is_told_at_its_address(
    lead: Lead, streams: bool
) -> None:
    begin(lead)
    introduced(lead, shows=LIE, asks=LIE)
    if streams:
        lead.feed(PeerAlive(KEY, LIE))
    lead.feed(PeerAnswered("p:1", P, endpoints(P), A, B))
    known = lead.state.peers.lives[KEY]
    assert (known.proves(LIE), known.proves(B), known.shows) == (False, True, (A, LIE))


def test_a_dead_life_that_answers_without_its_proof_is_told_anew(met: Lead) -> None:
    met.feed(PeerSilent(KEY))
    met.tick(10.0)
    begin(met)
    met.feed(PeerAnswered("p:1", P, endpoints(P), A, C))
    assert (met.state.peers.lives[KEY].proves(C), met.state.peers.lives[KEY].elder) == (True, (B,))


def test_a_life_that_shows_what_it_was_told_before_it_died_and_since_is_known_to_be_both(met: Lead) -> None:
    met.feed(PeerSilent(KEY))
    met.tick(10.0)
    introduced(met, shows=D, asks=C)
    assert (met.state.peers.lives[KEY].asks, met.state.peers.lives[KEY].elder) == ((C,), (B,))
    introduced(met, C, B, shows=D)
    assert (met.state.peers.lives[KEY].asks, met.state.peers.lives[KEY].elder) == ((C, B), ())


def test_no_more_is_kept_of_what_was_told_than_a_handshake_may_show(lead: Lead) -> None:
    for number in range(2 * PROOFS_MAX):
        (lead.state.peers.lives.get(KEY) and lead.feed(events.ProofRefused(KEY))) or begin(lead)
        if lead.seen(actions.MakeOffer):
            lead.feed(EndpointOffered(0, lead.one(actions.MakeOffer).key, endpoint()))
        lead.feed(PeerAnswered("p:1", P, endpoints(P), secret("s", str(number)), secret("t", str(number))))
        lead.map(P)
    assert len(lead.state.peers.lives[KEY].shows) == PROOFS_MAX


# -- this lead as the caller


def test_a_life_that_has_met_is_shown_its_proof_where_it_lives(met: Lead) -> None:
    dial = begin(met)
    assert (dial.address, dial.to, dial.proofs, dial.asks) == ("p:1", "", (A,), B)
    met.feed(PeerAnswered("p:1", P, endpoints(P), A, B))
    assert met.state.peers.lives[KEY].shows == (A,)


def test_so_is_one_that_was_declared_dead(met: Lead) -> None:
    met.feed(PeerSilent(KEY))
    met.tick(10.0)
    assert begin(met).proofs == (A,)


Q = describe("q", 3)


def test_another_life_than_the_one_that_is_proved_to_gets_secrets_of_its_own(met: Lead) -> None:
    """Otherwise P, which knows the proof shown here, could speak for the engine that has its address now."""
    assert begin(met).asks == B
    met.feed(PeerAnswered("p:1", Q, endpoints(Q), LIE, B))
    assert key_of(Q) not in met.state.peers.lives
    again = met.one(actions.Dial)
    assert (again.address, again.proofs, again.asks) == ("p:1", (LIE,), b"")
    met.feed(PeerAnswered("p:1", Q, endpoints(Q), LIE, C))
    other = met.state.peers.lives[key_of(Q)]
    assert (other.proves(B), other.proves(C)) == (False, True)


def test_lives_that_take_turns_at_an_address_end_the_dial(met: Lead) -> None:
    lead, living = met, replace(Q, address="p:1")
    introduced_as(lead, living)
    call = connect(lead, "p:1")
    lead.feed(EndpointOffered(0, lead.one(actions.MakeOffer).key, endpoint()))
    lead.feed(PeerAnswered("p:1", P, endpoints(P), A, B))
    lead.feed(PeerAnswered("p:1", living, endpoints(living), A, B))
    with refused(Reason.PEER_FAILED, PreconditionFailed):
        lead.answer(call)


def test_who_states_the_address_of_another_engine_is_not_what_that_one_is_shown(met: Lead) -> None:
    introduced_as(met, replace(Q, address="p:1"))
    connect(met, "p:1", "p")
    met.feed(EndpointOffered(0, met.one(actions.MakeOffer).key, endpoint()))
    assert met.one(actions.Dial).proofs == (A,)


def introduced_as(lead: Lead, life: EngineDescription) -> None:
    """Lets a life shake hands and open its liveness stream, so that it has met this lead."""
    call = lead.ask(lambda c: HandshakeReceived(c, life, endpoints(life), shows=LIE, asks=C), principal="peer")
    lead._offer()
    assert isinstance(lead.answer(call), actions.Introduced)
    lead.feed(PeerAlive(key_of(life), C))


def test_a_proof_is_shown_where_its_life_lives_and_nowhere_else(met: Lead) -> None:
    connect(met, "alias:1")
    met.feed(EndpointOffered(0, met.one(actions.MakeOffer).key, endpoint()))
    met.feed(DialFailed("alias:1", wants_proof()))
    again = met.one(actions.Dial)
    assert (again.address, again.to, again.proofs) == ("alias:1", "p:1", (A,))
    met.feed(PeerAnswered("alias:1", P, endpoints(P), A, B))
    assert met.state.peers.lives[KEY].dialled == "p:1"


def test_who_says_nothing_of_itself_is_shown_what_is_known_of_its_address(met: Lead) -> None:
    begin(met)
    met.feed(DialFailed("p:1", wants_proof("", 0)))
    assert met.one(actions.Dial).proofs == (A,)


def test_a_proof_that_is_not_taken_ends_the_dial(met: Lead) -> None:
    call = connect(met)
    met.feed(EndpointOffered(0, met.one(actions.MakeOffer).key, endpoint()))
    met.feed(DialFailed("p:1", wants_proof()))
    met.feed(DialFailed("p:1", wants_proof()))
    with refused(Reason.NOT_PROVED, PreconditionFailed):
        met.answer(call)


def test_a_lead_that_knows_no_proof_ends_the_dial(lead: Lead) -> None:
    call = connect(lead)
    lead.feed(EndpointOffered(0, lead.one(actions.MakeOffer).key, endpoint()))
    lead.feed(DialFailed("p:1", wants_proof()))
    with refused(Reason.NOT_PROVED, PreconditionFailed):
        lead.answer(call)


def test_a_lead_whose_life_before_is_connected_there_tries_again_until_its_time_is_over(lead: Lead) -> None:
    begin(lead)
    standing = Unavailable(Reason.NOT_PROVED, "another life")
    lead.feed(DialFailed("p:1", standing))
    assert lead.seen(actions.Dial) == []
    lead.tick(NEXT_LIFE_DELAY_S)
    assert lead.one(actions.Dial).address == "p:1"
    lead.feed(DialFailed("p:1", standing))
    lead.tick(lead.state.limits.connect_timeout_s)
    assert lead.state.peers.dials == {}
    lead.tick(NEXT_LIFE_DELAY_S)
    assert lead.seen(actions.Dial) == []


def test_a_peer_that_takes_no_proof_is_dialled_anew(met: Lead) -> None:
    met.map(P)
    met.feed(events.ProofRefused(KEY))
    assert [offer.rank for offer in met.seen(actions.MakeOffer)] == [0]
    assert met.state.peers.lives[KEY].forgotten


@pytest.mark.parametrize("address", ["p:1", ""])
def test_one_that_is_gone_or_cannot_be_dialled_is_not(lead: Lead, address: str) -> None:
    peer = replace(P, address="")
    lead.admit(peer)
    lead.feed(events.ProofRefused(KEY if not address else "p@nobody"))
    assert lead.seen(actions.MakeOffer) == []


def test_a_move_whose_proof_is_refused_shakes_hands_again_and_goes_on(lead: Lead) -> None:
    lead.admit(P)
    transfer = lead.pull(grant(P), 32, (0, 1))
    lead.feed(events.AccessAnswered(access_id(), wants_proof()))
    assert lead.transfer(transfer.id).waiting_for == "handshake"


def test_no_secret_is_in_the_text_of_anything(met: Lead) -> None:
    call = Call(1, "peer", proof=B)
    said = HandshakeReceived(call, P, endpoints(P), shows=A, asks=B, proofs=(C,))
    found = [met.state.peers.lives[KEY], said, PeerAlive(KEY, B), PeerAnswered("p:1", P, (), A, B), call]
    text = " ".join(map(repr, found))
    assert all(repr(one)[2:10] not in text for one in (A, B, C))


def test_leads_that_shook_hands_at_once_find_together(lead: Lead) -> None:
    """Each has dropped the proof that the other one shows; both still know a proof that is accepted."""
    begin(lead)
    introduced(lead, shows=A, asks=LIE)
    lead.feed(PeerAnswered("p:1", P, endpoints(P), C, B))
    assert introduced(lead, LIE, B, shows=A) == B
    assert lead.state.peers.lives[KEY].shows[0] == A, "it is what the caller has shown to take"


def test_what_an_answer_tells_is_known_though_its_dial_is_over(lead: Lead) -> None:
    """Otherwise two leads whose handshakes crossed could refuse each other's proofs for ever."""
    begin(lead)
    introduced(lead, shows=A, asks=B)
    lead.feed(PeerAlive(KEY, B))
    lead.tick(lead.state.limits.connect_timeout_s)
    assert not lead.state.peers.dials
    lead.feed(PeerAnswered("p:1", P, endpoints(P), C, D))
    peer = lead.state.peers.lives[KEY]
    assert (peer.asks, peer.shows) == ((B, D), (A, C))
    assert introduced(lead, D, shows=A) == B


def test_a_late_answer_from_elsewhere_tells_nothing(met: Lead) -> None:
    met.feed(PeerAnswered("elsewhere:1", P, endpoints(P), C, D))
    peer = met.state.peers.lives[KEY]
    assert (peer.asks, peer.shows) == ((B,), (A,))


def test_what_another_life_than_the_intended_one_tells_is_known_though_the_second_call_fails(met: Lead) -> None:
    living = replace(Q, address="p:1")
    introduced_as(met, living)
    connect(met, "p:1", "p")
    met.feed(EndpointOffered(0, met.one(actions.MakeOffer).key, endpoint()))
    met.feed(PeerAnswered("p:1", living, endpoints(living), D, B))
    assert met.state.peers.lives[key_of(living)].shows == (LIE, D)
