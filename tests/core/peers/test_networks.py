"""Data paths that send plain text are told and tried only where the operator declares the network private."""

from dataclasses import replace

import pytest

from kvgrpc.core.actions import Dial, Introduced, MapPeer
from kvgrpc.core.events import ConnectPeer, EndpointOffered, HandshakeReceived, PeerAnswered, PeerMapped
from kvgrpc.core.node import Node
from kvgrpc.core.values.endpoints import CollectiveEndpoint, RankEndpoint
from kvgrpc.core.values.networks import PrivateNetworks, unreadable
from kvgrpc.errors import PreconditionFailed, Reason
from kvgrpc.wire.description import path_to_proto
from kvgrpc.wire.values import reason
from tests.core.nodes import Lead, describe, endpoint, key_of

OWN = "10.1.0.1:50051"
DECLARED = PrivateNetworks(("10.2.0.0/16", "decode.example"))
PUBLIC = ["10.3.0.1:1", "other.example:1", "[fd00::1]:1", ""]
PRIVATE = ["10.2.9.9:1", "decode.example:1", "127.0.0.1:1", "[::1]:1", "localhost:1", "10.1.0.1:2"]
BOTH = replace(endpoint(), collective=CollectiveEndpoint("gloo", 1024, 1))


class Declaring(Lead):
    """A lead whose operator declares networks."""

    def __init__(self, networks: PrivateNetworks = DECLARED) -> None:
        super().__init__(describe("d", 2))
        self.node = Node(networks=networks)
        self.begin(describe("d", 2, address=OWN))

    def offer(self, key: str) -> None:
        self.feed(EndpointOffered(0, key, BOTH))

    def introduced(self, address: str) -> tuple[RankEndpoint, RankEndpoint]:
        """Lets a peer introduce itself, and returns what it is told and what our rank tries."""
        peer = describe("p", 1, address=address)
        call = self.ask(lambda c: HandshakeReceived(c, peer, (BOTH,)), principal="peer")
        tried = self.one(MapPeer).endpoint
        self.offer(next(iter(self.state.peers.handshakes)))
        answer = self.answer(call)
        assert isinstance(answer, Introduced)
        return answer.endpoints[0], tried


def has(found: RankEndpoint) -> bool:
    return found.collective is not None


@pytest.mark.parametrize("address", PUBLIC)
def test_a_caller_off_the_declared_networks_is_told_no_path_in_plain_text(address: str) -> None:
    assert [has(one) for one in Declaring().introduced(address)] == [False, False]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_caller_on_a_declared_network_or_on_this_host_is_told_all_paths(address: str) -> None:
    assert Declaring().introduced(address) == (BOTH, BOTH)


def test_without_tls_every_network_counts_as_private() -> None:
    assert all(Declaring(PrivateNetworks()).introduced(address) == (BOTH, BOTH) for address in PUBLIC)


@pytest.mark.parametrize(("address", "all_paths"), [("10.3.0.1:1", False), ("decode.example:1", True)])
def test_the_address_that_is_dialled_decides_what_the_peer_is_told(address: str, all_paths: bool) -> None:
    lead = Declaring()
    lead.ask(lambda c: ConnectPeer(c, address), principal="router")
    lead.offer(next(iter(lead.state.peers.handshakes)))
    assert has(lead.one(Dial).endpoints[0]) is all_paths
    # The peer's own word on where it lives changes nothing.
    lead.feed(PeerAnswered(address, describe("p", 1, address="127.0.0.1:9"), (BOTH,)))
    assert has(lead.one(MapPeer).endpoint) is all_paths


def test_a_path_that_the_network_rules_out_is_listed_with_its_reason() -> None:
    lead, peer = Declaring(), describe("p", 1, address="10.3.0.1:1")
    lead.introduced(peer.address)
    rejected = (("shm", "it is on another host"), ("collective", "the peer offers no process group"))
    lead.feed(PeerMapped(0, key_of(peer), "", "", rejected))
    path = path_to_proto(lead.state.peers.lives[key_of(peer)].paths[0, 0])
    assert [one.reason for one in path.rejected_paths] == [reason(None), reason(Reason.NETWORK_NOT_PRIVATE)]
    assert path.rejected_paths[0].why == "it is on another host"
    assert "10.3.0.1" in path.rejected_paths[1].why
    assert "private_networks" in path.rejected_paths[1].why


def test_a_handshake_that_only_ruled_out_paths_would_help_says_what_to_declare() -> None:
    lead, peer = Declaring(), describe("p", 1, address="10.3.0.1:1")
    call = lead.ask(lambda c: ConnectPeer(c, peer.address), principal="router")
    lead.offer(next(iter(lead.state.peers.handshakes)))
    lead.feed(PeerAnswered(peer.address, peer, (BOTH,)))
    lead.feed(PeerMapped(0, key_of(peer), "", "", (("collective", "the peer offers no process group"),)))
    with pytest.raises(PreconditionFailed, match=r"NO_DATA_PATH.*collective: it sends plain text.*private_networks"):
        lead.answer(call)


def test_the_node_after_a_defect_keeps_the_declared_networks() -> None:
    after, _ = Declaring().node.successor(9, 200.0)
    assert after.state.peers.networks == DECLARED


def test_a_name_that_is_neither_a_host_nor_a_network_is_found() -> None:
    assert (
        unreadable(("localhost", "a-b.example", "10.0.0.0/8", "10.0.0.1/8", "::1", "::1/128", "fe80::1%eth0", "*"))
        == ""
    )
    wrong = ("10.0.0.0/99", "x/y", "10.0.0.*", "*.example", "host:50051", "[::1]", "http://host", "two words")
    assert [unreadable(("10.0.0.0/8", name)) for name in wrong] == list(wrong)
