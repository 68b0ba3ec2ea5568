"""Sessions: the unix socket where an engine's scheduler and workers attach to their lead.

One engine is attached at a time. The scheduler's connection is the engine's life: its end, or a worker's, ends the
incarnation. Calls are fed to the node in the order in which they came, and events leave in the order in which they
happened. No connection can stop the server: a bad frame ends that connection only.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from kvgrpc.config import NAMES_BYTES_MAX, Config
from kvgrpc.core import actions, events
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import AlreadyExists, KVGrpcError, PermissionDenied, Reason, Unavailable, invalid
from kvgrpc.service.identity.gate import check_local
from kvgrpc.service.lead import Lead
from kvgrpc.service.runner import RankPort
from kvgrpc.service.session.attached_engine import AttachedEngine
from kvgrpc.service.session.reattach import Return
from kvgrpc.service.session.session_calls import (
    begin_trace,
    call_to_event,
    hear_session,
    promised_lease,
    put_answer,
    refused_lease,
)
from kvgrpc.service.session.socket import Frames, SessionSocket, check_user, hung_up, read_frames
from kvgrpc.service.session.tensor_calls import takes_tensors
from kvgrpc.service.session.void_page import SLOTS
from kvgrpc.service.session.workers import Reports, SocketEnd, WorkerEnd, write, write_with_descriptor
from kvgrpc.service.tensors.staging_store import StagingStore
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire import session as wire
from kvgrpc.wire.description import pool_to_proto
from kvgrpc.wire.frames import encode
from kvgrpc.wire.limits import limits_to_proto
from kvgrpc.wire.paths import placed
from kvgrpc.wire.values import reason

_log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
FIRST_ENGINE_S = 60.0
"""Maximum wait for a first engine, in seconds, if the server exits with it: one that died at start never comes."""
STOP_TIMEOUT_S = 10.0
"""Maximum wait of `stop` for connections to end, in seconds."""
TURN_S = 0.02
"""Time to handle a frame's calls before others have their turn, in seconds; a step's calls take less."""
WORLD_SIZE_MAX = 4096
POOL_BLOCKS_MAX = 1 << 24
"""Maximum number of blocks of one group: attach makes the lead's tables for all blocks before any other check."""


class Host(Protocol):
    """Maker of the memory and the ranks of an attached engine: the server."""

    async def begin_engine(
        self,
        request: session_pb2.AttachRequest,
        secret: bytes,
        worker: Callable[[int], RankPort],
        memory: Mapping[int, int],
    ) -> None:
        """Starts a new incarnation for the engine. `worker` makes the rank that is commanded in a worker. `memory`:
        descriptors of the shared memory of an engine that comes back, by rank.
        """

    async def end_engine(self) -> None: ...

    def shared_memory(self, rank: int) -> tuple[int, int]:
        """Returns (descriptor, bytes) of a rank's shared memory. Raises NotFound."""


class SessionServer:
    """The session socket of a lead, and the attached engine; an EnginePort.

    `over` is set when an engine has ended, or none has come: for a server that exits with its engine.
    """

    def __init__(self, lead: Lead, staging: StagingStore, host: Host, path: str) -> None:
        self._lead = lead
        self._staging = staging
        self._host = host
        self._path = path
        self._socket: SessionSocket | None = None
        self._session: AttachedEngine | None = None
        self._attaching = False
        self._returning: Return | None = None
        """The engine that attaches, while its workers are still to come back."""
        self._life = asyncio.Lock()
        """Held while an engine's life begins or ends: memory is made and given back then."""
        self._stopping = False
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Connections by the task that serves them."""
        self._first: asyncio.TimerHandle | None = None
        self._losing: set[asyncio.Task[None]] = set()
        """Ends of lives in progress: the end of a connection does not cancel them."""
        self.over = asyncio.Event()

    async def start(self) -> None:
        """Listens. Raises InvalidRequest if the path cannot be used."""
        self._socket = SessionSocket(self._path, self._serve)
        self._first = asyncio.get_running_loop().call_later(FIRST_ENGINE_S, self.over.set)

    async def stop(self) -> None:
        """Ends all connections and removes the socket."""
        self._stopping = True
        if self._socket is None:
            return
        assert self._first is not None
        self._first.cancel()
        self._socket.close()
        for writer in self._connections.values():
            writer.close()
        if self._connections or self._losing:
            # An engine's end in progress gives its memory back.
            await asyncio.wait({*self._connections, *self._losing}, timeout=STOP_TIMEOUT_S)
        for writer in self._connections.values():
            writer.transport.abort()

    def tell(self, news: actions.EngineNews) -> None:
        """Sends news to the attached engine, if any."""
        if self._session is not None:
            ended = news.transfer_id if isinstance(news, actions.ReceivedNews | actions.BlocksReturnedNews) else ""
            if isinstance(news, actions.BlocksReturnedNews | actions.PartsReturnedNews):
                self._session.page.ended(news.lease_id)
            wire.put_news(news, self._session.next_event(ended))

    def lose(self) -> bool:
        """Ends the session after a defect ended the engine's life. Returns whether an engine was attached. To the
        engine this is its lead's death: it hears what was decided, and then nothing, not even that its session is over.
        """
        session, self._session, self._lead.ticket = self._session, None, b""
        if session is None:
            return False
        session.flush()
        session.close("")
        self._lose(session, "a defect ended the life of the engine")
        return True

    def voided(self) -> tuple[str, ...]:
        """Returns the leases whose blocks the engine took back, if the node does not know it yet."""
        return self._session.page.voided() if self._session is not None else ()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        frames = read_frames(reader)
        try:
            check_user(writer)
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                first = await anext(frames, None)
            if first is not None and (kind := first.WhichOneof("frame")) in ("attach", "attach_rank"):
                check_local(f"{first.DESCRIPTOR.full_name}/{kind}")
            if first is not None and first.HasField("attach"):
                await self._serve_scheduler(first.attach, frames, writer)
            elif first is not None and first.HasField("attach_rank"):
                await self.serve_worker(first.attach_rank, _reports(frames), SocketEnd(writer))
        except KVGrpcError as error:
            error.untraced()
            refused = session_pb2.RefusedResponse(code=error.code, reason=reason(error.reason), message=error.sentence)
            write(writer, encode(session_pb2.ServerFrame(refused=refused)))
        except (OSError, TimeoutError):
            _log.debug("a session connection broke")
        finally:
            writer.close()
            del self._connections[task]

    # -- the scheduler

    async def _serve_scheduler(
        self, request: session_pb2.AttachRequest, frames: Frames, writer: asyncio.StreamWriter
    ) -> None:
        if self._session is not None and hung_up(self._session.writer):
            await self._session.over.wait()
        if self._session is not None or self._attaching:
            raise AlreadyExists(Reason.ENGINE_ATTACHED, "another engine is attached to this lead")
        _check_attach(request, self._lead.config)
        returning = Return(request) if request.rank_ticket else None
        session = AttachedEngine(self._lead, writer, request)
        self._attaching, self._returning = True, returning
        try:
            if returning is not None:
                frames = await returning.wait(frames)
            async with self._life:
                memory = returning.memory if returning is not None else {}
                await self._host.begin_engine(request, session.secret, session.workers.make_rank, memory)
                self._session, self._lead.ticket = session, session.ticket
        finally:
            self._attaching, self._returning = False, None
            if returning is not None:
                returning.end()
            if self._session is not session:
                session.page.close()
                if returning is not None:
                    self.over.set()  # its one chance is over: the next is another engine
        assert self._first is not None
        self._first.cancel()
        why = "the engine is gone"
        try:
            if returning is not None and not returning.whole:
                why = "a worker is gone again, and with it its engine"
                raise Unavailable(Reason.ENGINE_LOST, why)
            attached = encode(session_pb2.ServerFrame(attached=self._attached(session)))
            write_with_descriptor(writer, attached, session.page.fd)
            async for frame in frames:
                await self._take_calls(session, frame.calls)
        finally:
            await self._end(session, why)

    async def _end(self, session: AttachedEngine, why: str) -> None:
        """Ends the engine, once, after its scheduler's or a worker's connection ended."""
        session.close("" if self._stopping else why)
        if self._session is session:
            self._session, self._lead.ticket = None, b""
            await asyncio.shield(self._lose(session, why))

    def _lose(self, session: AttachedEngine, why: str) -> asyncio.Task[None]:
        losing = asyncio.create_task(self._lost(session, why))
        self._losing.add(losing)
        losing.add_done_callback(self._losing.discard)
        return losing

    async def _lost(self, session: AttachedEngine, why: str) -> None:
        """Ends the engine's life at the host, too."""
        session.over.set()
        _log.info("%s", why)
        try:
            async with self._life:
                if not self._stopping:
                    await self._host.end_engine()
        except KVGrpcError:
            _log.exception("the server has no pool of its own any more")
        finally:
            self.over.set()

    def _attached(self, session: AttachedEngine) -> session_pb2.AttachResponse:
        lead = self._lead
        engine = lead.runner.node.state.life.engine
        return session_pb2.AttachResponse(
            header=lead.header(),
            session_secret=session.secret,
            rank_ticket=session.ticket,
            pool=pool_to_proto(engine.pool, engine.pool_kind),
            limits=limits_to_proto(lead.config.limits),
            address=engine.address,
            void_slots=SLOTS,
        )

    async def _take_calls(self, session: AttachedEngine, batch: session_pb2.CallBatch) -> None:
        """Takes all calls of one frame, and lets other work run in between."""
        ended = session.read(batch.read_events)
        if ended and self._session is session:
            call = events.Call(self._lead.runner.next_call_id(), ENGINE)
            self._lead.runner.feed(events.AcknowledgeTransfers(call, ended))
        began = time.monotonic()
        for row in batch.calls:
            if self._session is not session:
                return  # calls after its end are not for the next engine's life
            self._take_call(session, row)
            if time.monotonic() - began > TURN_S:
                await asyncio.sleep(0)
                began = time.monotonic()

    def _take_call(self, session: AttachedEngine, call: session_pb2.Call) -> None:
        runner = self._lead.runner
        if takes_tensors(self._staging, call, session.next_event):
            return
        number, began = runner.next_call_id(), time.perf_counter()
        ended = begin_trace(call)

        def answered(reply: actions.Reply | KVGrpcError) -> None:
            if isinstance(reply, KVGrpcError) and call.void_slot:
                session.page.refused(promised_lease(call.finished_blocks), self._lead.runner.node.state.send.leases)
            hear_session(self._lead, call, began, reply if isinstance(reply, KVGrpcError) else None, ended)
            if call.call_id or isinstance(reply, KVGrpcError):
                answer = reply if isinstance(reply, KVGrpcError) else reply.answer
                put_answer(self._lead, call, answer, session.next_event().answer)

        try:
            event = call_to_event(self._lead, call, number)
            if call.void_slot and isinstance(event, events.FinishedBlocks) and not event.validate_only:
                session.page.name(call.void_slot, event.lease_id)
            if isinstance(event, events.StepDone) and session.workers.reports_steps:
                raise invalid("step_done", "is reported by the worker of rank 0 alone then")
        except KVGrpcError as error:
            answered(error.untraced())
            lost = refused_lease(call, number)
            if lost is not None:
                runner.submit(number, lost, lambda _: None)
            return
        if isinstance(event, events.StepDone | events.Tick):
            runner.feed(event)
        else:
            runner.submit(number, event, answered)

    # -- workers

    async def serve_worker(
        self, request: session_pb2.AttachRankRequest, reports: AsyncIterator[Reports], worker: WorkerEnd
    ) -> None:
        """Serves a worker until it or its engine is gone. Raises a refusal, and errors of its reports, which end the
        engine.
        """
        returning = self._returning
        if returning is not None and returning.awaits(request.ticket):
            try:
                reports = await returning.take(request, reports, worker)
            except BaseException:
                begun = self._session
                if begun is not None and begun.ticket == request.ticket and not returning.whole:
                    await self._end(begun, _gone(request.rank))
                raise
        session = self._session
        known = session is not None and secrets.compare_digest(request.ticket, session.ticket)
        if session is None or not known or (request.returns and returning is None):
            raise PermissionDenied(Reason.NOT_OWNER, "this ticket belongs to no engine that is attached here")
        session.workers.check(request)
        engine, memory = self._lead.runner.node.state.life.engine, -1
        shown = pool_to_proto(engine.pool, engine.pool_kind)
        reply = session_pb2.AttachRankResponse(pool=shown, lead_address=engine.address)
        if not (request.private_memory or request.returns):
            memory, reply.shared_bytes = self._host.shared_memory(request.rank)
        worker.attached(reply, memory)
        session.workers.attached(request.rank, worker)
        why = _gone(request.rank)
        try:
            async for batch in reports:
                await self._take_reports(session, request.rank, batch)
        except KVGrpcError as error:
            why = f"the engine is over with the worker of rank {request.rank}: {error.message}"
            raise
        finally:
            await self._end(session, why)

    async def _take_reports(self, session: AttachedEngine, rank: int, batch: Reports) -> None:
        """Takes reports as `_take_calls` does calls. Raises InvalidRequest for a report this rank must not make."""
        began = time.monotonic()
        for report in batch:
            if self._session is not session:
                return
            try:
                event = wire.report_to_event(rank, report)
            except KVGrpcError as error:
                raise placed(error, session_pb2.RankReportBatch(reports=[report])) from None
            session.workers.reports_steps |= isinstance(event, events.StepDone)
            if event is not None:
                self._lead.runner.feed(session.workers.allowed(event))
            if time.monotonic() - began > TURN_S:
                await asyncio.sleep(0)
                began = time.monotonic()


def _gone(rank: int) -> str:
    return f"the worker of rank {rank} is gone, and with it its engine"


async def _reports(frames: Frames) -> AsyncIterator[Reports]:
    async for frame in frames:
        yield frame.reports.reports


def _check_attach(request: session_pb2.AttachRequest, config: Config) -> None:
    """Raises InvalidRequest for numbers that would exhaust this process's memory, an id that fits no grant, and an
    unknown kind of memory.
    """
    if request.memory not in session_pb2.PoolMemory.values():
        raise invalid("memory", f"is {request.memory}, which this lead does not know")
    if request.world_size > WORLD_SIZE_MAX:
        raise invalid("world_size", f"is at most {WORLD_SIZE_MAX}")
    if len(f"{request.engine_id}{config.advertise or config.listen}".encode()) > NAMES_BYTES_MAX:
        raise invalid("engine_id", f"has, with the address that peers dial, at most {NAMES_BYTES_MAX} bytes")
    if any(group.block_count > POOL_BLOCKS_MAX for group in request.pool.groups):
        raise invalid("pool.groups.block_count", f"is at most {POOL_BLOCKS_MAX}")
