"""Mapping: a rank's answer counts only for the latest request, and a rank is never asked twice at once."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import MapPeer, UnmapPeer
from kvgrpc.core.events import PeerAnswered, PeerMapped
from kvgrpc.core.values.compatibility import EngineDescription
from tests.core.nodes import Lead, describe, endpoints, grant, key_of

P = describe("p", 1)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("d", 2))


def introduce(lead: Lead, peer: EngineDescription) -> None:
    lead.ask(lambda c: events.HandshakeReceived(c, peer, endpoints(peer)), principal="peer")


@pytest.mark.parametrize(("first", "second"), [("shm", ""), ("", "shm")])
def test_the_answer_of_a_mapping_that_ended_says_nothing_of_the_next(lead: Lead, first: str, second: str) -> None:
    introduce(lead, P)
    before = lead.one(MapPeer)
    anew = describe("p", 1, memory_generation=1)
    introduce(lead, anew)
    assert UnmapPeer(0, key_of(P)) in lead.done
    after = lead.one(MapPeer)
    for asked, path in ((before, first), (after, second)):
        lead.feed(PeerMapped(0, key_of(P), path, "", attempt=asked.attempt))
    assert lead.state.peers.lives[key_of(P)].reachable == (second != "")


def test_the_answer_of_a_mapping_with_a_life_that_was_readmitted_says_nothing_of_the_next_one(lead: Lead) -> None:
    introduce(lead, P)
    before = lead.one(MapPeer)
    lead.tick(10.0)
    introduce(lead, P)
    lead.feed(PeerMapped(0, key_of(P), "shm", "", attempt=before.attempt))
    assert not lead.state.peers.lives[key_of(P)].reachable


def test_a_rank_that_reaches_a_peer_lets_go_of_it_before_it_reaches_for_it_again() -> None:
    lead, peer = Lead(describe("d", 2, world_size=2)), describe("p", 1, world_size=2)
    introduce(lead, peer)
    lead.feed(PeerMapped(0, key_of(peer), "shm", ""))
    lead.feed(PeerMapped(1, key_of(peer), "", "", peer_rank=1))
    introduce(lead, peer)
    kinds = [type(action) for action in lead.done if isinstance(action, MapPeer | UnmapPeer)]
    assert kinds == [UnmapPeer, UnmapPeer, MapPeer, MapPeer]


def test_ranks_that_did_not_answer_in_time_let_go_of_the_peer() -> None:
    lead, peer = Lead(describe("d", 2, world_size=2)), describe("p", 1, world_size=2)
    lead.pull(grant(peer), 32, (0, 1))
    lead._offer()
    lead.feed(PeerAnswered("p:1", peer, endpoints(peer)))
    lead.feed(PeerMapped(0, key_of(peer), "shm", ""))
    lead.tick(10.0)
    assert lead.seen(UnmapPeer) == [UnmapPeer(0, key_of(peer)), UnmapPeer(1, key_of(peer))]
