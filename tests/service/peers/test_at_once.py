"""Two leads that shake hands with each other at the same time connect, whichever messages cross."""

from concurrent.futures import ThreadPoolExecutor

from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2
from tests.service.conftest import Start
from tests.service.engines import SUCCEEDED, Engine, wait_until
from tests.service.values import prompt

CONNECTED = handshake_pb2.PEER_STATE_CONNECTED


def connect(here: Engine, there: Engine) -> None:
    peer = common_pb2.PeerAddress(address=there.address)
    here.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=peer))


def states(engine: Engine) -> list[int]:
    return [peer.state for peer in engine.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers]


def test_leads_that_dial_each_other_at_once_stay_connected_and_move_blocks_both_ways(start: Start) -> None:
    engines = start((), (), ())
    pairs = [(here, there) for here in engines for there in engines if here is not there]
    with ThreadPoolExecutor(len(pairs)) as threads:
        list(threads.map(lambda pair: connect(*pair), pairs))
    for engine in engines:
        wait_until(lambda: states(engine) == [CONNECTED] * 2)  # noqa: B023
    for here, there in pairs:
        handed = here.hand_over(tokens := prompt(32))
        end = there.wait(there.pull(handed.grant, tokens, there.allocate(2)).transfer_id)
        assert end.state == SUCCEEDED, (end.failure, states(here), states(there))
