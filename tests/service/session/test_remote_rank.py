"""A lead's end of a ConnectRank stream. Commands may be as long as over the session socket, and longer ones fail."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from kvgrpc.config import Config
from kvgrpc.core import events
from kvgrpc.core.actions import AwaitEnd, ComputeChecksums
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.errors import InternalError, OutOfRange, Reason
from kvgrpc.peer.v1 import rank_pb2, rank_pb2_grpc
from kvgrpc.server import Server
from kvgrpc.service.grpc_status import from_rpc_error
from kvgrpc.service.rpc import rank as rank_module
from kvgrpc.service.rpc.rank import RankService, StreamEnd
from kvgrpc.service.session.workers import WorkerRank
from kvgrpc.session.v1 import rank_pb2 as session_rank_pb2, session_pb2
from kvgrpc.wire.bounds import FRAME_ROWS_MAX
from kvgrpc.wire.frames import FRAME_BYTES_MAX, FrameReader, encode
from tests.engine.session_client import ATTACH
from tests.engine.support import QUIET_S, WAIT_S
from tests.service.engines import HOME

TICKET = b"t" * 32
LONG, TOO_LONG = 1_000_000, 8_000_000
"""Numbers of pieces of a command: one longer than other messages, and one longer than any command may be."""


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Server, str]]:
    """Yields a server without an engine, and its session socket."""
    path = str(folder / "session.sock")
    server = Server(Config(listen=f"{HOME}:0", session_socket=path, pool=None))
    await server.start()
    try:
        yield server, path
    finally:
        await server.stop()


@asynccontextmanager
async def attach(path: str, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """Attaches the scheduler of an engine of one rank that brings its own memory."""
    reader, writer = await asyncio.open_unix_connection(path)
    request = session_pb2.ClientFrame()
    request.CopyFrom(ATTACH)
    request.attach.MergeFrom(session_pb2.AttachRequest(memory=session_pb2.POOL_MEMORY_PRIVATE, **fields))
    writer.write(encode(request))
    try:
        yield reader
    finally:
        writer.close()


async def next_frame(reader: asyncio.StreamReader) -> session_pb2.ServerFrame:
    (frame,) = FrameReader(session_pb2.ServerFrame).feed(await reader.read(1 << 16))
    return frame


@asynccontextmanager
async def connected(server: Server, ticket: bytes, *, returns: bool = False) -> AsyncIterator[Any]:
    """Yields the stream of the engine's rank."""
    options = [("grpc.max_receive_message_length", FRAME_BYTES_MAX)]
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        stream: Any = rank_pb2_grpc.RankServiceStub(channel).ConnectRank()
        await stream.write(rank_pb2.ConnectRankRequest(ticket=ticket, returns=returns))
        try:
            yield stream
        finally:
            stream.cancel()


@asynccontextmanager
async def remote_rank(folder: Path) -> AsyncIterator[tuple[Server, Any]]:
    """Yields a server, and the stream of its engine's only rank."""
    async with serving(folder) as (server, path), attach(path) as scheduler:
        ticket = (await next_frame(scheduler)).attached.rank_ticket
        async with connected(server, ticket) as stream:
            assert (await hear(stream)).HasField("attached")
            yield server, stream


async def until(done: Callable[[], bool]) -> None:
    """Waits until the condition holds. Fails after `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        while not done():  # noqa: ASYNC110 - a server's internal state has no event
            await asyncio.sleep(0.001)


def end_of(server: Server) -> StreamEnd:
    """Returns the lead's end of the stream."""
    (end,) = server._sessions._session.workers.ends  # type: ignore[union-attr]
    assert isinstance(end, StreamEnd)
    return end


async def hear(stream: Any) -> rank_pb2.ConnectRankResponse:
    """Returns the next message that is not empty."""
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
        rank.perform(ComputeChecksums(0, "long", pieces(LONG)))
        message = await hear(stream)
        assert message.ByteSize() > server.config.limits.message_bytes
        (command,) = message.commands
        assert (command.sum.name, len(command.sum.offsets)) == ("long", LONG)


async def test_a_command_that_no_worker_would_read_fails_and_the_next_one_goes(tmp_path: Path) -> None:
    async with remote_rank(tmp_path) as (server, stream):
        heard: list[events.Event] = []
        rank = WorkerRank(0, (), heard.append)
        rank.connected(end_of(server))
        rank.perform(ComputeChecksums(0, "too long", pieces(TOO_LONG)))
        (event,) = heard
        assert isinstance(event, events.ChecksumsComputed)
        assert "does not fit into a frame" in event.message
        rank.perform(AwaitEnd(0, "peer"))
        assert [command.await_end.peer for command in (await hear(stream)).commands] == ["peer"]


async def test_the_longest_command_fits_into_the_frame_that_its_worker_gets(tmp_path: Path) -> None:
    async with remote_rank(tmp_path) as (server, stream):
        end = end_of(server)
        longest = FRAME_BYTES_MAX - 2 * 5  # the headers of both messages around it
        command = session_rank_pb2.RankCommand(await_end=session_rank_pb2.AwaitEndCommand(peer="p"))
        command.await_end.peer = "p" * (longest - (command.ByteSize() - 1 + 2 * 3))  # lengths then take 3 bytes more
        assert command.ByteSize() == longest
        end.command(command)
        commands = session_pb2.RankCommandBatch(commands=(await hear(stream)).commands)
        assert len(encode(session_pb2.ServerFrame(commands=commands))) == FRAME_BYTES_MAX + 4
        command.await_end.peer += "p"
        with pytest.raises(OutOfRange):
            end.command(command)


async def test_a_rank_that_does_not_read_is_declared_dead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with remote_rank(tmp_path) as (server, stream):
        over = server._sessions.over  # type: ignore[union-attr]
        rank = server._ranks.ranks[0]
        for _ in range(2):  # 320 MB, over the limit of 268 MB: bytes count until they are written
            for _ in range(20):
                rank.perform(ComputeChecksums(0, "long", pieces(LONG)))
            await hear(stream)
        async with asyncio.timeout(WAIT_S):
            await over.wait()
    assert "a rank's stream is not read" in caplog.text


async def test_others_have_their_turn_between_the_reports_of_a_message(tmp_path: Path) -> None:
    async with remote_rank(tmp_path) as (server, stream):
        steps = server._node.state.pool.steps
        reports = [
            session_rank_pb2.RankReport(step=session_rank_pb2.StepReport(step=i)) for i in range(1, FRAME_ROWS_MAX + 1)
        ]
        await stream.write(rank_pb2.ConnectRankRequest(reports=reports))
        seen = set()
        while steps.done() < FRAME_ROWS_MAX:
            await asyncio.sleep(0)
            seen.add(steps.done())
    assert len(seen) > 3, "of a message that is handled in one go, nothing or everything is seen"


async def test_a_stream_that_ends_in_the_moment_of_its_silence_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_module, "BEAT_S", 10.0)
    async with remote_rank(tmp_path) as (server, stream):
        end = end_of(server)
        await until(lambda: end._reading is not None)
        reading, loop = end._reading, asyncio.get_running_loop()
        assert reading is not None
        reading.reschedule(loop.time() + 0.01)
        loop.call_at(loop.time() + 0.02, end.close, "the engine is gone")
        time.sleep(0.05)  # noqa: ASYNC251 - both timers are due when the loop goes on
        assert (await hear(stream)).over.message == "the engine is gone"
        assert await stream.read() is grpc.aio.EOF
    assert not caplog.records


async def test_a_caller_that_cancels_does_not_interrupt_the_end_of_its_engine(tmp_path: Path) -> None:
    async with remote_rank(tmp_path) as (server, stream):
        sessions = server._sessions
        assert sessions is not None
        async with server._lives:
            await stream.done_writing()
            await until(lambda: sessions._session is None)
            stream.cancel()
            await until(lambda: not server._lead.standing._streams)
            assert server._node.state.life.description is not None
        await until(lambda: server._node.state.life.description is None)


async def test_a_server_that_stops_waits_for_the_end_of_its_engine(tmp_path: Path) -> None:
    async with remote_rank(tmp_path) as (server, stream):
        sessions = server._sessions
        assert sessions is not None
        async with sessions._life:
            await stream.done_writing()
            await until(lambda: sessions._session is None)
            stream.cancel()
            await until(lambda: not server._lead.standing._streams and not sessions._connections)
            stopping = asyncio.create_task(sessions.stop())
            await asyncio.wait([stopping], timeout=QUIET_S)
            assert not stopping.done()
        await stopping
        assert sessions.over.is_set()


async def test_an_engine_whose_rank_leaves_while_its_life_begins_anew_is_over(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, path), attach(path, rank_ticket=TICKET) as scheduler:
        sessions = server._sessions
        assert sessions is not None
        async with server._lives:
            await until(lambda: sessions._returning is not None)
            returning = sessions._returning
            assert returning is not None
            async with connected(server, TICKET, returns=True):
                await until(lambda: returning._begins)
                assert returning.whole
            await until(lambda: not returning.whole)
        assert (await next_frame(scheduler)).over.message == "a worker is gone again, and with it its engine"
        await until(lambda: server._node.state.life.description is None)


class Broken:
    """Sessions with a defect."""

    async def serve_worker(self, *_: object) -> None:
        raise ZeroDivisionError("planted")


async def test_a_defect_ends_a_stream_as_it_ends_a_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as (server, _):
        broken = grpc.aio.server()
        rank_pb2_grpc.add_RankServiceServicer_to_server(RankService(server._lead, Broken()), broken)
        port = broken.add_insecure_port(f"{HOME}:0")
        await broken.start()
        async with grpc.aio.insecure_channel(f"{HOME}:{port}") as channel:
            stream: Any = rank_pb2_grpc.RankServiceStub(channel).ConnectRank()
            await stream.write(rank_pb2.ConnectRankRequest(ticket=TICKET))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await hear(stream)
        await broken.stop(None)
    refusal = from_rpc_error(caught.value)
    assert (type(refusal), refusal.reason) == (InternalError, Reason.INTERNAL)
    assert "a defect of kvgrpc" in refusal.message
    assert "ConnectRank failed" in caplog.text
