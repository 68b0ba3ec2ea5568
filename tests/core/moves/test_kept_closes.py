"""Closes that no issuer answers are few, and a forgotten one frees no block."""

import pytest

from kvgrpc.core.actions import SendClose
from kvgrpc.core.events import AccessAnswered, AccessClosing, CancelTransfer, CloseAnswered, CloseOutcome, PeerSilent
from kvgrpc.core.moves.pending_closes import RETRIES
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.transfers import Disposition
from kvgrpc.core.values.limits import Limits
from tests.core.nodes import Lead, access_id, answer_of, describe, grant, key_of
from tests.core.pairs import WRITING, Pair

P, Q = describe("p", 1), describe("q", 1)
FEW = Limits(remembered_bytes=20_000)


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("d", 2), FEW)
    made.admit(P)
    made.admit(Q)
    return made


def refuse(lead: Lead, number: int, times: int) -> None:
    """Lets the issuer refuse a close so many times, each time that it is sent."""
    for tried in range(times):
        lead.feed(CloseAnswered(access_id(number), answered=False))
        lead.tick(2.0 ** min(tried, RETRIES))


def refused(lead: Lead, number: int, times: int) -> None:
    """Pulls from P and cancels, and lets P refuse the close."""
    pull = lead.pull(grant(P), number=number)
    lead.feed(AccessAnswered(access_id(number), answer_of(P)))
    lead.call(lambda c: CancelTransfer(c, pull.id))
    refuse(lead, number, times)


def close(number: int, peer: str, *, proves: bool = False) -> SendClose:
    return SendClose(peer, AccessClosing(access_id(number), CloseOutcome.FAILED, quiesced=proves), 2, "", proves=proves)


def kept(lead: Lead, peer: str) -> list[bytes]:
    return list(lead.state.moves.closes.kept.get(peer, ()))


@pytest.mark.parametrize("times", [1, RETRIES + 1], ids=["waits for a retry", "waits for a handshake"])
def test_an_issuer_that_refuses_every_close_makes_its_opener_keep_few(lead: Lead, times: int) -> None:
    for number in range(1, 61):
        refused(lead, number, times)
        lead.node.check()
    assert lead.state.ledger.by_kind[RowKind.CLOSE] <= FEW.remembered_bytes
    assert access_id(60) in kept(lead, key_of(P))
    assert access_id(1) not in kept(lead, key_of(P))


def test_the_life_with_the_most_unanswered_closes_loses_some(lead: Lead) -> None:
    for number in (1, 2, 3):
        lead.node._closes._tell(close(number, key_of(Q)))
    for number in range(4, 60):
        lead.node._closes._tell(close(number, key_of(P)))
    assert kept(lead, key_of(Q)) == [access_id(number) for number in (1, 2, 3)]


def test_closes_that_prove_that_writes_have_ended_are_forgotten_last(lead: Lead) -> None:
    for number in range(1, 60):
        lead.node._closes._tell(close(number, key_of(P), proves=number <= 3))
    assert kept(lead, key_of(P))[:3] == [access_id(number) for number in (1, 2, 3)]


def test_a_forgotten_close_is_not_sent_again(lead: Lead) -> None:
    for number in range(1, 61):
        lead.node._closes._tell(close(number, key_of(P)))
        lead.feed(CloseAnswered(access_id(number), answered=False))
    left = kept(lead, key_of(P))
    assert [action.closing.access_id for action in lead.tick(1.0) if isinstance(action, SendClose)] == left
    assert lead.feed(CloseAnswered(access_id(1), answered=False)) == []


def test_the_blocks_of_a_destination_stay_in_quarantine_when_its_source_forgets_the_close() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    pair.p.state.ledger.limits = Limits(remembered_bytes=0)
    for here, there in ((pair.p, pair.d), (pair.d, pair.p)):
        pair.feed(here, PeerSilent(key_of(there.me)))
    pair.deaf = {SendClose}
    pair.tick(11.0)
    pair.moved()
    assert not pair.p.state.moves.closes.kept
    pair.deaf.clear()
    pair.p.admit(pair.d.me)
    pair.d.admit(pair.p.me)
    pair.tick(3_000.0)
    assert pair.both()[1].memory is Disposition.QUARANTINED
    assert sum(pair.d.state.pool.pins.quarantined) == 2


def test_a_close_takes_the_place_of_an_earlier_one_of_its_access_that_was_refused(lead: Lead) -> None:
    lead.node._closes._tell(close(1, key_of(P)))
    refuse(lead, 1, RETRIES + 1)
    proof = close(1, key_of(P), proves=True)
    lead.node._closes._tell(proof)
    lead.state.react.peer_ready("p:1", lead.state.peers.lives[key_of(P)])
    lead.feed(CloseAnswered(access_id(1), answered=False))
    assert lead.tick(1.0) == [proof]
