"""A lead's end of a ConnectRank stream: commands as long as over the session socket, and none that no worker reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from kvgrpc.config import Config
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.peer.v1 import rank_pb2, rank_pb2_grpc
from kvgrpc.server import Server
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import FRAME_BYTES_MAX, FrameReader, encode
from tests.engine.session_client import ATTACH
from tests.service.engines import HOME

LONG, TOO_LONG = 1_000_000, 8_000_000
"""Pieces of a command: of one that is longer than other messages, and of one that is longer than any may be."""


@asynccontextmanager
async def remote_rank(folder: Path) -> AsyncIterator[tuple[Server, Any]]:
    """A server, and the stream of the one rank of its engine."""
    path = str(folder / "session.sock")
    server = Server(Config(listen=f"{HOME}:0", session_socket=path, pool=None))
    await server.start()
    try:
        reader, writer = await asyncio.open_unix_connection(path)
        request = session_pb2.ClientFrame()
        request.CopyFrom(ATTACH)
        request.attach.memory = session_pb2.POOL_MEMORY_PRIVATE
        writer.write(encode(request))
        (frame,) = FrameReader(session_pb2.ServerFrame).feed(await reader.read(1 << 16))
        options = [("grpc.max_receive_message_length", FRAME_BYTES_MAX)]
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            stream: Any = rank_pb2_grpc.RankServiceStub(channel).ConnectRank()
            await stream.write(rank_pb2.ConnectRankRequest(ticket=frame.attached.rank_ticket))
            assert (await hear(stream)).HasField("attached")
            yield server, stream
            stream.cancel()
        writer.close()
    finally:
        await server.stop()


async def hear(stream: Any) -> rank_pb2.ConnectRankResponse:
    """The next message that says something."""
    while not (message := await stream.read()).ByteSize():
        await stream.write(rank_pb2.ConnectRankRequest())
    assert isinstance(message, rank_pb2.ConnectRankResponse)
    return message


def pieces(count: int) -> Pieces:
    ones = np.ones(count, np.int64)
    return Pieces(np.arange(count) * 1_000_000, ones, ones)


async def test_a_command_is_as_long_as_over_the_socket(tmp_path: Path) -> None:
    async with remote_rank(tmp_path) as (server, stream):
        rank = server._ranks.ranks[0]
        rank.sum("long", pieces(LONG))
        message = await hear(stream)
        assert message.ByteSize() > server.config.limits.message_bytes
        (command,) = message.commands
        assert (command.sum.name, len(command.sum.offsets)) == ("long", LONG)


async def test_a_command_that_no_worker_would_read_fails_and_the_next_one_goes(tmp_path: Path) -> None:
    async with remote_rank(tmp_path) as (server, stream):
        rank = server._ranks.ranks[0]
        heard: list[str] = []
        rank._report = lambda event: heard.append(event.message)  # type: ignore[attr-defined]
        rank.sum("too long", pieces(TOO_LONG))
        assert "does not fit into a frame" in heard[0]
        rank.await_end("peer")
        assert [command.await_end.peer for command in (await hear(stream)).commands] == ["peer"]


async def test_a_rank_that_does_not_read_is_declared_dead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with remote_rank(tmp_path) as (server, _):
        over = server._sessions.over  # type: ignore[union-attr]
        rank = server._ranks.ranks[0]
        for _ in range(40):
            rank.sum("long", pieces(LONG))
        async with asyncio.timeout(20):
            await over.wait()
    assert "a rank's stream is not read" in caplog.text
