"""A server that dials a peer and then refuses it lets go: the dialled peer declares the server dead."""

from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2
from tests.service.api import refused
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import Engine, wait_until

CONNECTED = handshake_pb2.PEER_STATE_CONNECTED
DEAD = handshake_pb2.PEER_STATE_DEAD


def connect(engine: Engine, peer: Engine) -> None:
    address = common_pb2.PeerAddress(address=peer.address)
    engine.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=address))


def states(engine: Engine) -> list[int]:
    return [peer.state for peer in engine.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers]


def test_a_peer_that_is_one_too_many_is_not_kept_alive(start: Start) -> None:
    ((full,), others) = (
        start((), settings=SETTINGS + "peers = 1\npeer_grace_s = 1.0\n"),
        start((), (), settings=SETTINGS + "peer_grace_s = 1.0\n"),
    )
    known, stranger = others
    connect(full, known)
    with refused(full.api, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
        connect(full, stranger)
    wait_until(lambda: states(stranger) == [DEAD])
    assert states(full) == [CONNECTED]
    assert states(known) == [CONNECTED]
