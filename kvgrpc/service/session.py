"""Sessions: the unix socket where an engine's scheduler and workers attach to their lead.

One engine at a time. The scheduler's connection is the engine's life: its end, like that of a worker, ends the
incarnation. Calls are fed to the node in the order in which they came; events leave in the order in which they
happened. What a connection sends cannot stop the server: a bad frame ends that connection only.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvgrpc.core import actions, events
from kvgrpc.core.descriptors import Runs
from kvgrpc.core.endpoints import RankEndpoint
from kvgrpc.core.state import ENGINE
from kvgrpc.errors import AlreadyExists, KVGrpcError, PermissionDenied, Reason
from kvgrpc.service.lead import Lead
from kvgrpc.service.ranks import Rank
from kvgrpc.service.session_calls import answer_to_proto, call_to_event
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire import session as wire
from kvgrpc.wire.description import limits_to_proto, pool_to_proto
from kvgrpc.wire.frames import FrameReader, encode
from kvgrpc.wire.values import reason

_log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
ATTACH_TIMEOUT_S = 5.0
UNREAD_BYTES_MAX = 256 * 1024 * 1024
"""Events that an engine may leave unread; one that is further behind is taken for dead."""


class Host(Protocol):
    """Who makes the memory and the ranks of an attached engine: the server."""

    async def begin_engine(
        self, request: session_pb2.AttachRequest, secret: bytes, worker: Callable[[int], Rank]
    ) -> None:
        """Starts a new incarnation for the engine. `worker` makes the rank of a worker with private memory."""
        ...

    async def end_engine(self) -> None:
        """The engine is gone."""
        ...

    def shared_memory(self, rank: int) -> tuple[int, int]:
        """(descriptor, bytes) of a rank's shared memory. Raises NotFound."""
        ...


class WorkerRank:
    """A rank whose mover runs in a worker: commands go out over the worker's connection, or wait for it."""

    def __init__(self) -> None:
        self._waiting: list[rank_pb2.RankCommand] = []
        self._writer: asyncio.StreamWriter | None = None

    def connected(self, writer: asyncio.StreamWriter) -> None:
        """The worker attached."""
        self._writer = writer
        for command in self._waiting:
            self._send(command)
        self._waiting.clear()

    def offer(self, key: str) -> None:
        self._send(wire.offer_command(key))

    def map_peer(self, peer: str, endpoint: RankEndpoint) -> None:
        self._send(wire.connect_command(peer, endpoint))

    def unmap_peer(self, peer: str) -> None:
        self._send(wire.disconnect_command(peer))

    def post(self, posting_id: str, peer: str, runs: Runs) -> None:
        self._send(wire.post_command(posting_id, peer, runs))

    def expect(self, access: str, open_: bool) -> None:
        self._send(wire.expect_command(access, open_))

    def _send(self, command: rank_pb2.RankCommand) -> None:
        if self._writer is None:
            self._waiting.append(command)
        else:
            batch = session_pb2.ServerFrame(commands=session_pb2.RankCommandBatch(commands=[command]))
            self._writer.write(encode(batch))


class Sessions:
    """The session socket of a lead, and the engine that is attached; an EnginePort."""

    def __init__(self, lead: Lead, host: Host, path: str) -> None:
        self._lead = lead
        self._host = host
        self._path = path
        self._server: asyncio.Server | None = None
        self._scheduler: asyncio.StreamWriter | None = None
        self.attaching = False
        self._ticket = b""
        self._workers: dict[int, WorkerRank] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._event_id = 0
        self._unsent: list[session_pb2.Event] = []
        self._unread: dict[int, str] = {}
        """Transfers whose end was told, by the event that told it, until the engine read on."""

    async def start(self) -> None:
        """Listens. The socket is the user's alone."""
        _remove(self._path)
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        _make_private(self._path)

    async def stop(self) -> None:
        """Ends all connections and removes the socket."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._connections):
            writer.close()
        await self._server.wait_closed()
        _remove(self._path)

    def tell(self, news: actions.EngineNews) -> None:
        """News for the engine: sent with all others of the same turn of the loop."""
        event = self._next_event(wire.news_to_proto(news, 0))
        if isinstance(news, actions.Received | actions.BlocksReturned):
            self._unread[event.event_id] = news.transfer_id

    def _next_event(self, event: session_pb2.Event) -> session_pb2.Event:
        self._event_id += 1
        event.event_id = self._event_id
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(event)
        return event

    def _flush(self) -> None:
        batch, self._unsent = self._unsent, []
        writer = self._scheduler
        if writer is None or writer.is_closing():
            return
        writer.write(encode(session_pb2.ServerFrame(events=session_pb2.EventBatch(events=batch))))
        if writer.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            _log.error("the engine does not read its events; it is taken for dead")
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        frames = FrameReader(session_pb2.ClientFrame)
        try:
            _check_user(writer)
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                first = await _first(reader, frames)
            if first is not None and first.HasField("attach"):
                await self._serve_scheduler(first.attach, reader, writer, frames)
            elif first is not None and first.HasField("attach_rank"):
                await self._serve_worker(first.attach_rank, reader, writer, frames)
        except KVGrpcError as error:
            refused = session_pb2.RefusedResponse(reason=reason(error.reason), message=error.message)
            with contextlib.suppress(OSError):
                writer.write(encode(session_pb2.ServerFrame(refused=refused)))
                await writer.drain()
        except (OSError, TimeoutError):
            _log.debug("a session connection broke")
        finally:
            self._connections.discard(writer)
            writer.close()

    # -- the scheduler

    async def _serve_scheduler(
        self,
        request: session_pb2.AttachRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: FrameReader[session_pb2.ClientFrame],
    ) -> None:
        if self._scheduler is not None or self.attaching:
            raise AlreadyExists(Reason.ENGINE_ATTACHED, "another engine is attached to this lead")
        self.attaching = True
        secret, self._ticket = secrets.token_bytes(32), secrets.token_bytes(32)
        try:
            self._workers = {}
            await self._host.begin_engine(request, secret, self._make_worker)
            self._scheduler = writer
        finally:
            self.attaching = False
        try:
            writer.write(encode(session_pb2.ServerFrame(attached=self._attached(secret))))
            while data := await reader.read(READ_BYTES):
                for frame in frames.feed(data):
                    self._take_calls(frame.calls)
        finally:
            await self._engine_gone()

    async def _engine_gone(self) -> None:
        """The scheduler's connection, or a worker's, ended: so did the engine."""
        if self._scheduler is None:
            return
        self._scheduler.close()
        self._scheduler = None
        self._ticket = b""
        self._unread.clear()
        self._unsent.clear()
        _log.info("the engine is gone")
        await self._host.end_engine()

    def _attached(self, secret: bytes) -> session_pb2.AttachResponse:
        lead = self._lead
        engine = lead.node.state.pool
        return session_pb2.AttachResponse(
            header=lead.header(),
            session_secret=secret,
            rank_ticket=self._ticket,
            pool=pool_to_proto(engine.pool, engine.pool_kind),
            limits=limits_to_proto(lead.config.limits),
            address=engine.address,
        )

    def _take_calls(self, batch: session_pb2.CallBatch) -> None:
        read = [id_ for id_ in self._unread if id_ <= batch.read_events]
        if read:
            ids = tuple(self._unread.pop(id_) for id_ in read)
            call = events.Call(self._lead.runner.next_call_id(), ENGINE)
            self._lead.runner.feed(events.AcknowledgeTransfers(call, ids))
        for row in batch.calls:
            self._take_call(row)

    def _take_call(self, call: session_pb2.Call) -> None:
        runner = self._lead.runner
        number = runner.next_call_id()

        def answered(answer: actions.Answer | KVGrpcError) -> None:
            if call.call_id or isinstance(answer, KVGrpcError):
                made = answer_to_proto(self._lead, call.call_id, answer)
                self._next_event(session_pb2.Event(answer=made))

        try:
            event = call_to_event(self._lead, call, number)
        except KVGrpcError as error:
            answered(error)
            return
        if isinstance(event, events.StepDone):
            runner.feed(event)
        else:
            runner.submit(number, event, answered)

    # -- workers

    def _make_worker(self, rank: int) -> Rank:
        return self._workers.setdefault(rank, WorkerRank())

    async def _serve_worker(
        self,
        request: session_pb2.AttachRankRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: FrameReader[session_pb2.ClientFrame],
    ) -> None:
        if not self._ticket or not secrets.compare_digest(request.ticket, self._ticket):
            raise PermissionDenied(Reason.NOT_OWNER, "this ticket belongs to no engine that is attached here")
        session = self._scheduler
        engine = self._lead.node.state.pool
        pool = pool_to_proto(engine.pool, engine.pool_kind)
        if request.private_memory:
            reply = session_pb2.AttachRankResponse(pool=pool)
            writer.write(encode(session_pb2.ServerFrame(rank_attached=reply)))
            worker = self._workers.get(request.rank)
            if worker is None:
                raise PermissionDenied(Reason.NOT_OWNER, f"the engine has no rank {request.rank} with private memory")
            worker.connected(writer)
        else:
            fd, nbytes = self._host.shared_memory(request.rank)
            reply = session_pb2.AttachRankResponse(pool=pool, shared_bytes=nbytes)
            _send_with_descriptor(writer, encode(session_pb2.ServerFrame(rank_attached=reply)), fd)
        try:
            while data := await reader.read(READ_BYTES):
                for frame in frames.feed(data):
                    self._take_reports(request.rank, frame.reports)
        finally:
            if self._scheduler is session:
                await self._engine_gone()

    def _take_reports(self, rank: int, batch: session_pb2.RankReportBatch) -> None:
        for report in batch.reports:
            event = wire.report_to_event(rank, report)
            if event is not None:
                self._lead.runner.feed(event)


async def _first(
    reader: asyncio.StreamReader, frames: FrameReader[session_pb2.ClientFrame]
) -> session_pb2.ClientFrame | None:
    """The first frame of a connection; None when it ended without one."""
    while data := await reader.read(READ_BYTES):
        for frame in frames.feed(data):
            return frame
    return None


def _check_user(writer: asyncio.StreamWriter) -> None:
    """Only this user's processes may attach. Raises PermissionDenied."""
    sock: socket.socket = writer.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise PermissionDenied(Reason.NOT_OWNER, "only processes of this server's user may attach")


def _send_with_descriptor(writer: asyncio.StreamWriter, frame: bytes, fd: int) -> None:
    """Sends a frame with a descriptor beside it; the connection has nothing else under way yet."""
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
        socket.send_fds(sock, [frame], [fd])


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _make_private(path: str) -> None:
    Path(path).chmod(0o600)
