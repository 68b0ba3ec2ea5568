"""Lives of a peer at PeerService: a handshake admits a life, and silence during the grace ends it."""

import queue
from collections.abc import Callable, Iterator
from contextlib import closing

import grpc
import pytest
from google.protobuf.message import Message

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2
from tests.service.api import Api, read_refusal, refused
from tests.service.conftest import SETTINGS, SHARED
from tests.service.consumer import Consumer
from tests.service.engines import Engine, ServeProcess, unchanged, wait_until
from tests.service.peers.accesses import VALID, open_one
from tests.service.values import new_key, prompt

TOKENS = prompt(40)
DEAD = handshake_pb2.PEER_STATE_DEAD
HASTY = SETTINGS + "peer_grace_s = 0.6\nopen_wait_s = 0.2\nsettle_timeout_s = 0.2\n"


@pytest.fixture
def consumer(source: Engine) -> Consumer:
    """Returns a consumer that the source knows and hears."""
    consumer = Consumer(source)
    consumer.handshake()
    return consumer


@pytest.fixture(scope="module")
def shared_hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(ServeProcess(tmp_path_factory.mktemp("hasty"), *SHARED, settings=HASTY))
    yield engine
    engine.close()


@pytest.fixture
def hasty(shared_hasty: Engine) -> Iterator[Engine]:
    """Yields an issuer with short timeouts."""
    yield shared_hasty
    shared_hasty.reset()


@pytest.mark.parametrize(
    "request_type", [peer_pb2.OpenAccessRequest, peer_pb2.SettleAccessRequest, peer_pb2.CloseAccessRequest]
)
def test_a_caller_without_a_handshake_is_refused(source: Engine, request_type: Callable[[], Message]) -> None:
    with unchanged(source), refused(source.api, "FAILED_PRECONDITION", "NO_HANDSHAKE"):
        Consumer(source).ask(request_type())


def test_a_liveness_stream_without_a_handshake_is_refused(source: Engine) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        next(Consumer(source).beats())
    assert read_refusal("KeepLiveness", caught.value).reason == "NO_HANDSHAKE"


def test_an_older_life_is_refused_once_a_newer_one_introduced_itself(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS, on_abort=common_pb2.ON_ABORT_KEEP)
    access = new_key()
    open_one(consumer, handed.grant, access)
    consumer.restarted().handshake()
    assert source.lease(handed.lease.lease_id).open_access_count == 0
    with unchanged(source), refused(source.api, "FAILED_PRECONDITION", "NO_HANDSHAKE"):
        consumer.settle(access)


def peer_state(engine: Engine, consumer: Consumer) -> int:
    peers = engine.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
    return next(peer.state for peer in peers if peer.engine_id == consumer.engine.engine_id)


def test_a_peer_that_falls_silent_is_dead_after_the_grace_and_holds_nothing(hasty: Engine) -> None:
    consumer = Consumer(hasty)
    consumer.handshake()
    access = new_key()
    consumer.open(hasty.hand_over(TOKENS).grant, TOKENS, access)
    assert list(consumer.beats(3))
    wait_until(lambda: peer_state(hasty, consumer) == DEAD)
    assert not [pin for pin in hasty.pins() if pin.kind == admin_pb2.PIN_KIND_ACCESS]
    with refused(hasty.api, "FAILED_PRECONDITION", "NO_HANDSHAKE"):
        consumer.settle(access)


def test_a_peer_that_is_never_heard_after_its_handshake_is_dead_after_the_grace(hasty: Engine) -> None:
    consumer = Consumer(hasty)
    consumer.handshake()
    handed = hasty.hand_over(TOKENS)
    open_one(consumer, handed.grant, new_key())
    wait_until(lambda: peer_state(hasty, consumer) == DEAD)
    assert hasty.lease(handed.lease.lease_id).open_access_count == 0


def test_a_dead_peer_is_readmitted_by_a_new_handshake(hasty: Engine) -> None:
    consumer = Consumer(hasty)
    consumer.handshake()
    wait_until(lambda: peer_state(hasty, consumer) == DEAD)
    consumer.handshake()
    assert peer_state(hasty, consumer) == handshake_pb2.PEER_STATE_CONNECTED


def test_a_peer_that_is_silent_opens_nothing_until_it_is_heard(hasty: Engine) -> None:
    consumer = Consumer(hasty)
    consumer.handshake()
    assert list(consumer.beats())
    wait_until(lambda: peer_state(hasty, consumer) != handshake_pb2.PEER_STATE_CONNECTED)
    refusals = {"DEADLINE", "ACCESS_CLOSED"}  # the opening times out, or the peer is declared dead first
    refusal = ""
    try:
        refusal = open_one(consumer, hasty.hand_over(TOKENS).grant, new_key())
    except grpc.RpcError as error:
        refusal = read_refusal("OpenAccess", error).reason
        refusals = {"NO_HANDSHAKE"}
    assert refusal in refusals
    assert not [pin for pin in hasty.pins() if pin.kind == admin_pb2.PIN_KIND_ACCESS]


def test_a_peer_that_ends_one_of_two_streams_is_still_heard(source: Engine, consumer: Consumer) -> None:
    beats: queue.SimpleQueue[peer_pb2.KeepLivenessRequest | None] = queue.SimpleQueue()
    beats.put(peer_pb2.KeepLivenessRequest(caller=consumer.caller))
    with closing(Api(source.address)) as before:  # the peer connects again
        stands = before.peer.KeepLiveness(iter(beats.get, None), timeout=20)
        next(stands)
        assert list(consumer.beats())
        access = new_key()
        assert open_one(consumer, source.hand_over(TOKENS).grant, access) == ""
        assert consumer.settle(access).verdict == VALID
        beats.put(None)
        assert list(stands) == []
