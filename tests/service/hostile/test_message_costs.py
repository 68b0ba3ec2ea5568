"""Costs of one message for a server: memory that it keeps, and time in which no other call is served."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, pool_types_pb2
from tests.service.api import Api
from tests.service.conftest import Start
from tests.service.consumer import Consumer
from tests.service.engines import Engine, wait_until
from tests.service.footprint import resident_bytes
from tests.service.hostile.rows import rows_of

KEPT_BYTES_MAX = 4 << 20
"""Maximum memory kept of one message, in bytes, without what it was granted."""
BUFFERS_BYTES_MAX = 4 * KEPT_BYTES_MAX
"""Maximum buffers that a process keeps after its first message and reuses for later ones, in bytes."""
BUSY_S_MAX = 0.5

Messages = Callable[[Engine], bytes]
WHOLE = common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[0], counts=[65_536]))
"""The maximum number of blocks that a request may name, in a few bytes."""


MANY_BLOCKS = peer_pb2.OpenAccessRequest(
    openings=[peer_pb2.AccessOpening(parts=[peer_pb2.ReadyPart(blocks=[WHOLE])] * 64)] * 32
)
"""A request of 29 KB that names 134 million blocks."""


def said(caller: peer_pb2.Caller, **call: Any) -> bytes:
    """Returns a message with one call between leads."""
    made = peer_pb2.ConverseRequest(caller=caller, calls=[peer_pb2.PeerCall(call_id=1, **call)])
    return made.SerializeToString()


def rows(request: Any, field: str, count: int = 2_000_000) -> Any:
    """Returns a request with that many empty rows."""
    return request.FromString(rows_of(request, field, count))


def handshake(engine: Engine, endpoint: pool_types_pb2.RankEndpoint) -> bytes:
    made = handshake_pb2.HandshakeRequest(engine=Consumer(engine).engine, endpoints=[endpoint], proof=bytes(32))
    return made.SerializeToString()


def many_segments(engine: Engine) -> bytes:
    segments = [pool_types_pb2.Segment(address=1 << 40, size_bytes=4096 + i) for i in range(65_536)]
    return handshake(engine, pool_types_pb2.RankEndpoint(cma=pool_types_pb2.CmaEndpoint(segments=segments)))


def long_metadata(engine: Engine) -> bytes:
    nixl = pool_types_pb2.NixlEndpoint(agent="a", metadata=b"x" * 4_000_000)
    return handshake(engine, pool_types_pb2.RankEndpoint(nixl=nixl))


def known(engine: Engine) -> peer_pb2.Caller:
    consumer = Consumer(engine)
    consumer.handshake()
    return consumer.caller


CONVERSE = "peer.v1.PeerService/Converse"
MESSAGES: dict[str, tuple[str, Messages]] = {
    "a stranger names millions of blocks": (
        CONVERSE,
        lambda engine: said(Consumer(engine).caller, open_access=MANY_BLOCKS),
    ),
    "a peer names millions of blocks": (CONVERSE, lambda engine: said(known(engine), open_access=MANY_BLOCKS)),
    "a stranger opens two million accesses": (
        CONVERSE,
        lambda engine: said(Consumer(engine).caller, open_access=rows(peer_pb2.OpenAccessRequest, "openings")),
    ),
    "a stranger has parts without end": (
        CONVERSE,
        lambda engine: said(Consumer(engine).caller, parts_ready=rows(peer_pb2.PartsReadyRequest, "parts", 100_000)),
    ),
    "a stranger has more memory than there is room for": ("v1.HandshakeService/Handshake", many_segments),
    "a stranger has much to say of its memory": ("v1.HandshakeService/Handshake", long_metadata),
}


def refused(engine: Engine, rpc: str, body: bytes) -> None:
    """Sends a message, which must be refused, or whose call must be."""
    if rpc == CONVERSE:
        stream: Any = engine.api.channel.stream_stream(f"/kvgrpc.{rpc}")
        (reply,) = stream(iter([body]), timeout=60)
        (answer,) = peer_pb2.ConverseResponse.FromString(reply).answers
        assert answer.HasField("error")
        return
    call: Any = engine.api.channel.unary_unary(f"/kvgrpc.{rpc}")
    with pytest.raises(grpc.RpcError):
        call(body, timeout=60)


def busy_s(pid: int) -> float:
    """Returns the processor time of a process in seconds. Other processes do not affect it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_after_others(engine: Engine) -> int:
    """Returns the resident memory after another call, because gRPC keeps the last message until then."""
    engine.api.admin.GetStatus(admin_pb2.GetStatusRequest())
    return resident_bytes(engine.process.pid)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_leaves_little_behind_and_costs_little_time(start: Start, message: str) -> None:
    (engine,) = start(())
    rpc, make = MESSAGES[message]
    body = make(engine)
    fresh = resident_bytes(engine.process.pid)
    refused(engine, rpc, body)
    wait_until(lambda: resident_after_others(engine) - fresh < BUFFERS_BYTES_MAX)
    before, began_s = resident_bytes(engine.process.pid), busy_s(engine.process.pid)
    refused(engine, rpc, body)
    assert busy_s(engine.process.pid) - began_s < BUSY_S_MAX
    wait_until(lambda: resident_after_others(engine) - before < KEPT_BYTES_MAX)


def test_others_are_served_between_the_thousands_of_calls_of_a_small_message(start: Start) -> None:
    (engine,) = start(())
    body = peer_pb2.ConverseRequest(calls=[peer_pb2.PeerCall()] * 4_096).SerializeToString()
    call: Any = engine.api.channel.stream_stream(f"/kvgrpc.{CONVERSE}")
    other = Api(engine.address)
    before = resident_bytes(engine.process.pid)
    rows: list[bytes] = []
    conversation = threading.Thread(target=lambda: rows.extend(call(iter([body]), timeout=60)))
    conversation.start()
    served = 0
    while conversation.is_alive():
        other.admin.GetStatus(admin_pb2.GetStatusRequest())
        served += 1
    other.close()
    assert sum(len(peer_pb2.ConverseResponse.FromString(message).answers) for message in rows) == 4_096
    assert served > 5, "one at most, if the message is handled in one go"
    assert resident_bytes(engine.process.pid) - before < KEPT_BYTES_MAX
