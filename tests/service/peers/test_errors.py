"""Failures of calls to another lead that bring no answer."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest

from kvgrpc.errors import KVGrpcError, NextStep, Reason, Unavailable
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service.grpc_status import next_step
from kvgrpc.service.peers.stream import dial_failure, failure_of
from kvgrpc.v1 import handshake_pb2, handshake_pb2_grpc, lease_pb2, lease_pb2_grpc


def test_a_call_on_a_connection_that_closed_meanwhile_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    async def call() -> KVGrpcError:
        channel = grpc.aio.insecure_channel("127.0.0.1:1")
        stub = handshake_pb2_grpc.HandshakeServiceStub(channel)
        await channel.close()
        try:
            await stub.GetEngine(handshake_pb2.GetEngineRequest())
        except Exception as error:  # noqa: BLE001 - gRPC may raise anything
            return failure_of(error, "GetEngine")
        pytest.fail("it was answered")

    found = asyncio.run(call())
    assert (type(found), found.reason) == (Unavailable, Reason.PEER_UNREACHABLE)
    assert not caplog.records


class Rude(peer_pb2_grpc.PeerServiceServicer, lease_pb2_grpc.LeaseServiceServicer):
    """A server that ends liveness streams without reading them, and answers no other call before it stops."""

    address = ""

    def __init__(self) -> None:
        self.stops = threading.Event()
        self.ended = threading.Semaphore(0)
        """Released once for each stream that the server ended, after the end was sent."""

    def KeepLiveness(self, _requests: Any, context: grpc.ServicerContext) -> NoReturn:  # noqa: N802 - as in the schema
        context.add_callback(self.ended.release)
        context.abort(grpc.StatusCode.UNAVAILABLE, "it stops")

    def RenewLeases(self, _request: Any, _context: Any) -> lease_pb2.RenewLeasesResponse:  # noqa: N802
        self.stops.wait()
        return lease_pb2.RenewLeasesResponse()


@pytest.fixture
def rude() -> Iterator[Rude]:
    """Yields such a server."""
    server = grpc.server(ThreadPoolExecutor(2))
    rude = Rude()  # type: ignore[abstract]  # it serves what its tests need
    peer_pb2_grpc.add_PeerServiceServicer_to_server(rude, server)
    lease_pb2_grpc.add_LeaseServiceServicer_to_server(rude, server)
    rude.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield rude
    rude.stops.set()
    server.stop(0).wait()


def test_a_stream_that_its_peer_ends_before_a_write_is_no_failure_of_the_peer(rude: Rude) -> None:
    async def write_late() -> grpc.aio.AioRpcError:
        async with grpc.aio.insecure_channel(rude.address) as channel:
            stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
            await channel.channel_ready()
            for _ in range(200):
                stream = stub.KeepLiveness()
                await asyncio.sleep(0)
                assert rude.ended.acquire(timeout=10.0)  # the end arrives while this loop is blocked
                try:
                    await stream.write(peer_pb2.KeepLivenessRequest())
                    await stream.read()
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.INTERNAL:
                        return error
        pytest.fail("no write came after the end")

    error = asyncio.run(write_late())
    for found in (failure_of(error, "KeepLiveness"), dial_failure(rude.address, error)):
        assert (type(found), found.reason) == (Unavailable, Reason.PEER_UNREACHABLE)
        assert next_step(found) is NextStep.RETRY_OTHER_CONSUMER
        assert "was cut off" in found.message
        assert "no kvgrpc server" not in found.message


def test_a_call_that_is_not_answered_in_time_may_be_made_again(rude: Rude) -> None:
    async def call() -> KVGrpcError:
        async with grpc.aio.insecure_channel(rude.address) as channel:
            stub: Any = lease_pb2_grpc.LeaseServiceStub(channel)
            try:
                await stub.RenewLeases(lease_pb2.RenewLeasesRequest(), timeout=0.05)
            except grpc.aio.AioRpcError as error:
                return failure_of(error, "RenewLeases")
        pytest.fail("it was answered")

    found = asyncio.run(call())
    assert (type(found), found.reason) == (Unavailable, Reason.PEER_UNREACHABLE)
    assert found.message == "RenewLeases was not answered in time"
