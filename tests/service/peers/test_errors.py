"""What comes of calls to another lead that bring no answer."""

import asyncio

import grpc.aio
import pytest

from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from kvgrpc.service.peers.errors import failure_of
from kvgrpc.v1 import handshake_pb2, handshake_pb2_grpc


def test_a_call_on_a_connection_that_closed_meanwhile_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    async def call() -> KVGrpcError:
        channel = grpc.aio.insecure_channel("127.0.0.1:1")
        stub = handshake_pb2_grpc.HandshakeServiceStub(channel)
        await channel.close()
        try:
            await stub.GetEngine(handshake_pb2.GetEngineRequest())
        except Exception as error:  # noqa: BLE001 - whatever gRPC says
            return failure_of(error, "GetEngine")
        pytest.fail("it was answered")

    found = asyncio.run(call())
    assert (type(found), found.reason) == (Unavailable, Reason.PEER_UNREACHABLE)
    assert not caplog.records
