"""Bytes on the port that are no gRPC: the server ignores them and goes on serving."""

import secrets
from contextlib import ExitStack

import grpc
import pytest

from kvgrpc.v1 import lease_pb2
from tests.service.api import read_refusal
from tests.service.engines import Engine, unchanged
from tests.service.http2 import EMPTY_SETTINGS, PREFACE, connected, frame, send
from tests.service.values import content, prompt

GARBAGE = {
    "nothing": b"",
    "one byte": b"x",
    "random": secrets.token_bytes(100_000),
    "zeros": bytes(100_000),
    "http 1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http 1 without end": b"GET /" + b"a" * 1_000_000,
    "tls": bytes.fromhex("160301020001") + secrets.token_bytes(511),
    "half a preface": PREFACE[:10],
    "preface only": PREFACE,
    "preface and random": PREFACE + secrets.token_bytes(100_000),
    "settings of a wrong length": PREFACE + frame(4, 0, 0, b"x" * 5),
    "a frame of 16 MiB that does not come": PREFACE + EMPTY_SETTINGS + frame(0, 0, 1, b"", length=0xFFFFFF),
    "data on a stream that was never opened": PREFACE + EMPTY_SETTINGS + frame(0, 1, 1, b"x" * 100),
    "headers that are no headers": PREFACE + EMPTY_SETTINGS + frame(1, 5, 1, secrets.token_bytes(200)),
    "endless continuation": PREFACE + EMPTY_SETTINGS + frame(1, 1, 1, b"") + frame(9, 0, 1, b"") * 1000,
    "a flood of pings": PREFACE + EMPTY_SETTINGS + frame(6, 0, 0, b"12345678") * 5000,
    "a flood of settings": PREFACE + EMPTY_SETTINGS * 5000,
    "a flood of resets": PREFACE + EMPTY_SETTINGS + b"".join(frame(3, 0, i, bytes(4)) for i in range(1, 2000, 2)),
    "unknown frames": PREFACE + EMPTY_SETTINGS + b"".join(frame(kind, 255, 7, b"?") for kind in range(10, 250)),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_bytes_that_are_no_grpc_change_nothing(source: Engine, kind: str) -> None:
    with unchanged(source), connected(source) as connection:
        send(connection, GARBAGE[kind])


def test_half_open_connections_keep_no_client_out(source: Engine) -> None:
    with ExitStack() as stack, unchanged(source):
        for i in range(50):
            connection = stack.enter_context(connected(source))
            connection.sendall((PREFACE + EMPTY_SETTINGS)[: i % 34])
        source.check_alive()


METHODS = [
    "/kvgrpc.v1.HandoffService/FinishedBlocks",
    "/kvgrpc.v1.HandoffService/PullBlocks",
    "/kvgrpc.v1.PoolService/AllocateBlocks",
    "/kvgrpc.v1.HandshakeService/Handshake",
]
BODIES = {
    "random": b"\xff" + secrets.token_bytes(1000),
    "a truncated field": b"\x0a\xff",
    "no UTF-8": b"\x0a\x02\xff\xfe",
    "deep nesting": b"\x22\x80\x01" * 200,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("body", BODIES)
def test_a_message_that_is_none_fails_its_own_call_only(source: Engine, method: str, body: str) -> None:
    call = source.api.channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
    with unchanged(source), pytest.raises(grpc.RpcError) as caught:
        call(BODIES[body])
    refusal = read_refusal(method, caught.value)
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")


@pytest.mark.parametrize("method", ["/kvgrpc.v1.HandoffService/NoSuchCall", "/no.such.Service/Call", "/", "/x"])
def test_a_method_that_does_not_exist_is_unimplemented(source: Engine, method: str) -> None:
    call = source.api.channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
    with unchanged(source), pytest.raises(grpc.RpcError) as caught:
        call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("rpc", ["KeepLiveness", "Converse"])
def test_a_stream_of_garbage_ends_only_itself(source: Engine, rpc: str) -> None:
    stream = source.api.channel.stream_stream(
        f"/kvgrpc.peer.v1.PeerService/{rpc}", request_serializer=bytes, response_deserializer=bytes
    )
    with unchanged(source), pytest.raises(grpc.RpcError) as caught:
        list(stream(iter([BODIES["random"]] * 3), timeout=10))
    assert read_refusal(rpc, caught.value).reason == "INVALID_FIELD"


CONTEXTS = {
    "empty": "",
    "a letter": "x",
    "no hex": "00-" + "z" * 32 + "-" + "y" * 16 + "-01",
    "zeros": "00-" + "0" * 32 + "-" + "0" * 16 + "-00",
    "dashes": "-" * 500,
    "capitals": "00-" + "AB" * 16 + "-" + "CD" * 8 + "-01",
    "too short": "00-" + "ab" * 15 + "-" + "cd" * 8 + "-01",
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_a_trace_context_that_is_none_is_passed_over(source: Engine, kind: str) -> None:
    tokens = prompt(16)
    request = lease_pb2.GrantLeaseRequest(blocks=source.blocks(source.allocate(1)), content=content(tokens))
    reply = source.api.leases.GrantLease(request, metadata=(("traceparent", CONTEXTS[kind]),))
    assert reply.lease.trace_id == ""
