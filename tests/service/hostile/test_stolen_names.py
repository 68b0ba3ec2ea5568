"""A caller with a peer's id and incarnation, which ListPeers shows to everyone, is not taken for it without a proof."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2
from tests.service.api import read_refusal, refused
from tests.service.consumer import Consumer
from tests.service.engines import Engine, unchanged, wait_until
from tests.service.rogue import Rogue
from tests.service.streamed import info_of
from tests.service.values import new_key

UINT32, INTEGER = 2**32 - 1, 2**53 - 1
PROOFS = {"none": b"", "another one": bytes(32), "a short one": b"\0"}


@contextmanager
def standing(engine: Engine, consumer: Consumer) -> Iterator[peer_pb2.KeepLivenessResponse]:
    """Keeps a consumer's liveness stream open, and yields its first answer."""
    over = threading.Event()

    def beats() -> Iterator[peer_pb2.KeepLivenessRequest]:
        yield peer_pb2.KeepLivenessRequest(caller=consumer.caller)
        over.wait()

    stream: Any = engine.api.peer.KeepLiveness(beats(), timeout=60)
    try:
        yield next(stream)
    finally:
        over.set()
        stream.cancel()


@pytest.fixture
def honest(source: Engine) -> Iterator[Consumer]:
    """Yields a live consumer that the source knows."""
    consumer = Consumer(source)
    consumer.handshake()
    with standing(source, consumer):
        yield consumer


def listed(engine: Engine, consumer: Consumer) -> handshake_pb2.Peer:
    """Returns what ListPeers shows of a consumer."""
    peers = engine.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
    return next(peer for peer in peers if peer.incarnation == consumer.engine.incarnation)


def stolen(engine: Engine, consumer: Consumer, proof: bytes) -> peer_pb2.Caller:
    peer = listed(engine, consumer)
    return peer_pb2.Caller(engine_id=peer.engine_id, incarnation=peer.incarnation, proof=proof)


def requests() -> dict[str, Any]:
    """Returns a request of each call between leads, with every number that only grows at its maximum."""
    access, part = new_key(), peer_pb2.ReadyPart(number=UINT32)
    opening = peer_pb2.AccessOpening(access_id=access, part_epoch=UINT32, parts=[part])
    settling = peer_pb2.AccessSettling(access_id=access, part=UINT32, last=True)
    closing = peer_pb2.AccessClosing(access_id=access, quiesced=True)
    return {
        "OpenAccess": peer_pb2.OpenAccessRequest(openings=[opening]),
        "SettleAccess": peer_pb2.SettleAccessRequest(settlings=[settling]),
        "CloseAccess": peer_pb2.CloseAccessRequest(closings=[closing]),
        "PartsReady": peer_pb2.PartsReadyRequest(access_id=access, parts=[part]),
        "ChecksumBlocks": peer_pb2.ChecksumBlocksRequest(access_id=access),
        "PostSend": peer_pb2.PostSendRequest(epoch=UINT32),
    }


@pytest.mark.parametrize("proof", PROOFS.values(), ids=PROOFS)
@pytest.mark.parametrize("call", requests())
def test_no_call_in_the_name_of_a_peer_is_taken_without_its_proof(
    source: Engine, honest: Consumer, call: str, proof: bytes
) -> None:
    caller = stolen(source, honest, proof)
    with unchanged(source), refused(source.api, "FAILED_PRECONDITION", "NOT_PROVED"):
        source.api.ask(caller, requests()[call])


@pytest.mark.parametrize("proof", PROOFS.values(), ids=PROOFS)
def test_nobody_else_keeps_a_peer_alive(source: Engine, proof: bytes) -> None:
    silent = Consumer(source)
    silent.handshake()
    with standing(source, silent):
        pass
    wait_until(lambda: listed(source, silent).state == handshake_pb2.PEER_STATE_SUSPECT)
    beat = peer_pb2.KeepLivenessRequest(caller=stolen(source, silent, proof))
    with pytest.raises(grpc.RpcError) as caught:
        next(source.api.peer.KeepLiveness(iter([beat]), timeout=10))
    assert read_refusal("KeepLiveness", caught.value).reason == "NOT_PROVED"
    assert listed(source, silent).state == handshake_pb2.PEER_STATE_SUSPECT


def test_a_stream_speaks_for_the_life_that_it_has_shown_first(source: Engine, honest: Consumer) -> None:
    callers = [stolen(source, honest, bytes(32)), honest.caller]
    call = peer_pb2.PeerCall(call_id=1, settle_access=peer_pb2.SettleAccessRequest())

    def answered(callers: list[peer_pb2.Caller]) -> list[peer_pb2.PeerAnswer]:
        messages = [peer_pb2.ConverseRequest(calls=[call], caller=caller) for caller in callers]
        stream = source.api.peer.Converse(iter(messages), timeout=10)
        return [answer for reply in stream for answer in reply.answers]

    assert [info_of(answer.error.details).reason for answer in answered(callers)] == ["NOT_PROVED"] * 2
    assert all(answer.HasField("settle_access") for answer in answered(callers[::-1]))


def test_a_stream_speaks_for_nobody_before_it_has_shown_who_calls(source: Engine) -> None:
    with unchanged(source), refused(source.api, "FAILED_PRECONDITION", "NO_HANDSHAKE"):
        source.api.ask(peer_pb2.Caller(), peer_pb2.SettleAccessRequest())


@pytest.mark.parametrize("proof", PROOFS.values(), ids=PROOFS)
def test_no_handshake_in_the_name_of_a_peer_is_taken_without_its_proof(
    source: Engine, honest: Consumer, proof: bytes
) -> None:
    request = honest.introduction()
    request.engine.address, request.proof, request.proofs[:] = "127.0.0.1:1", bytes(16), [proof]
    request.engine.memory_generation = UINT32
    with unchanged(source), refused(source.api, "FAILED_PRECONDITION", "NOT_PROVED"):
        source.api.handshake.Handshake(request)
    assert honest.ask(peer_pb2.SettleAccessRequest()).HasField("header")


def test_a_peer_that_shows_its_proof_shakes_hands_again_and_keeps_it(source: Engine, honest: Consumer) -> None:
    before = honest.shows
    assert honest.handshake().proof == before


@pytest.mark.parametrize("incarnation", [1, INTEGER])
def test_a_next_life_waits_for_the_end_of_the_one_that_is_connected(source: Engine, incarnation: int) -> None:
    engine = Consumer(source)
    engine.handshake()
    following = engine.restarted()
    following.engine.incarnation = incarnation
    with standing(source, engine), unchanged(source), refused(source.api, "UNAVAILABLE", "NOT_PROVED"):
        following.handshake()
    wait_until(lambda: listed(source, engine).state == handshake_pb2.PEER_STATE_SUSPECT)
    following.handshake()
    assert listed(source, engine).state == handshake_pb2.PEER_STATE_DEAD


@pytest.mark.parametrize("length", [0, 15, 65])
def test_a_handshake_tells_a_secret_that_nobody_guesses(source: Engine, length: int) -> None:
    request = Consumer(source).introduction()
    request.proof = bytes(length)
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.api.handshake.Handshake(request)


def test_a_server_shows_who_it_is_on_a_liveness_stream(source: Engine) -> None:
    consumer = Consumer(source)
    consumer.handshake()
    with standing(source, consumer) as first:
        assert first.proof == consumer.told


def test_who_answers_in_the_place_of_a_peer_is_not_taken_for_it(source: Engine, rogue: Rogue) -> None:
    def another(reply: peer_pb2.KeepLivenessResponse) -> None:
        reply.proof = bytes(32)

    rogue.changes["KeepLiveness"] = another
    request = handshake_pb2.ConnectPeerRequest(peer=common_pb2.PeerAddress(address=rogue.engine.address))
    with refused(source.api, "FAILED_PRECONDITION", "PEER_FAILED"):
        source.api.handshake.ConnectPeer(request)
