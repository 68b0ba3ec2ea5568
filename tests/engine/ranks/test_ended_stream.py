"""A stream between a rank and its lead that ends while the rank's side is about to write."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvgrpc.peer.v1 import rank_pb2, rank_pb2_grpc
from kvgrpc.rank_link.link import _send
from kvgrpc.session.v1 import session_pb2
from tests.service.engines import HOME


class Ending(rank_pb2_grpc.RankServiceServicer):
    """A lead that ends every stream in order."""

    async def ConnectRank(self, requests: Any, context: Any) -> AsyncIterator[rank_pb2.ConnectRankResponse]:  # noqa: N802
        return
        yield


async def no_frames() -> AsyncIterator[session_pb2.ClientFrame]:
    return
    yield


@pytest.mark.timeout(30)
async def test_a_write_to_a_stream_that_has_ended_is_no_defect() -> None:
    server = grpc.aio.server()
    rank_pb2_grpc.add_RankServiceServicer_to_server(Ending(), server)
    port = server.add_insecure_port(f"{HOME}:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"{HOME}:{port}") as channel:
            call = rank_pb2_grpc.RankServiceStub(channel).ConnectRank()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            receiving = asyncio.create_task(asyncio.sleep(0))
            await _send(call, rank_pb2.ConnectRankRequest(), no_frames(), receiving)
    finally:
        await server.stop(None)
