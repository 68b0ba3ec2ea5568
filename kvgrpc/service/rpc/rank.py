"""RankService: attaches workers on other hosts to their engine's session, as the session socket does for local ones."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from kvgrpc.errors import DeadlineExceeded, InternalError, KVGrpcError, OutOfRange, Reason, Unimplemented, invalid
from kvgrpc.peer.v1 import rank_pb2 as stream_pb2, rank_pb2_grpc
from kvgrpc.service import grpc_status
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import check_request
from kvgrpc.service.session.session_server import ATTACH_TIMEOUT_S
from kvgrpc.service.session.workers import UNREAD_BYTES_MAX, Reports, WorkerEnd
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire.frames import FRAME_BYTES_MAX
from kvgrpc.wire.values import duration

_log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Maximum silence of this end, in seconds."""
GRACE_BEATS = 2
"""Minimum grace for the worker, in beats, however short the peer grace is."""
FRAME_ROUND_BYTES = 5
"""Maximum number of bytes by which the rank link's frame to its worker is longer than the message it came in."""
LAST_WORDS_S = 1.0
"""Maximum time to send the last messages to a worker, in seconds."""


class WorkerServer(Protocol):
    """The sessions of a server."""

    async def serve_worker(
        self, request: session_pb2.AttachRankRequest, reports: AsyncIterator[Reports], worker: WorkerEnd
    ) -> None: ...


class RankService(rank_pb2_grpc.RankServiceServicer):
    """Attaches ranks. `sessions` is None if no engine attaches to this server: then no rank can."""

    def __init__(self, lead: Lead, sessions: WorkerServer | None) -> None:
        self._lead = lead
        self._sessions = sessions

    async def ConnectRank(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        """Serves one stream, which writes each command when it is known."""
        try:
            if self._sessions is None:
                raise Unimplemented(Reason.FEATURE_UNAVAILABLE, "this server has no session socket: no engine attaches")
            with self._lead.standing.one():
                await _serve(self._lead, self._sessions, context)
        except KVGrpcError as error:
            await grpc_status.abort(context, error.untraced(), self._lead.header())
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("RankService/ConnectRank failed")
            defect = InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}")
            await grpc_status.abort(context, defect, self._lead.header())
        finally:
            del context  # the context keeps the error that ends its call, and the error keeps this frame


async def _serve(lead: Lead, sessions: WorkerServer, context: Any) -> None:
    await context.send_initial_metadata(())
    end = StreamEnd(lead, context)
    first = await end.read(ATTACH_TIMEOUT_S, "attach")
    if first is None:
        return
    if first.reports:
        raise invalid("reports", "come after the first message, which introduces the rank")
    request = session_pb2.AttachRankRequest(
        ticket=first.ticket,
        rank=first.rank,
        private_memory=True,
        returns=first.returns,
        not_at_rest=first.not_at_rest,
        mirrored=first.mirrored,
    )
    end.begin()
    try:
        await sessions.serve_worker(request, end.reports(), end)
    finally:
        await end.finish()


class StreamEnd:
    """A worker at the other end of a ConnectRank stream; a `WorkerEnd`."""

    def __init__(self, lead: Lead, context: Any) -> None:
        self._lead = lead
        self._context = context
        self._grace_s = max(lead.config.limits.peer_grace_s, GRACE_BEATS * BEAT_S)
        self._unsent: deque[tuple[stream_pb2.ConnectRankResponse, int]] = deque()
        """Messages to send, each with its size in bytes."""
        self._unsent_bytes = 0
        """Bytes of `_unsent` and of the message that is being written."""
        self._due = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._reading: asyncio.Timeout | None = None
        self._over = False

    def begin(self) -> None:
        """Starts the writer: from now on the worker hears this end at least every BEAT_S."""
        self._writer = asyncio.create_task(self._write())

    async def read(self, timeout_s: float, phase: str) -> stream_pb2.ConnectRankRequest | None:
        """Returns the worker's next message; None when either side ends the stream. Raises DeadlineExceeded (DEADLINE)
        for silence, and all that `check_request` raises.
        """
        if self._over:
            return None
        try:
            async with asyncio.timeout(timeout_s) as self._reading:
                message = await self._lead.standing.read(self._context.read)
        except TimeoutError:
            if self._over:
                return None
            what = f"the worker said nothing for {timeout_s:g} s: its host or the network to it is gone"
            raise DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": phase}) from None
        finally:
            self._reading = None
        if message is grpc.aio.EOF:
            return None
        check_request(message)
        assert isinstance(message, stream_pb2.ConnectRankRequest)
        return message

    async def reports(self) -> AsyncIterator[Reports]:
        """Yields all that the worker reports. Raises the same errors as `read`."""
        while (message := await self.read(self._grace_s, "rank")) is not None:
            reports = message.reports
            del message  # frees it now: the next message may come much later
            yield reports

    def attached(self, reply: session_pb2.AttachRankResponse, memory: int) -> None:
        assert memory < 0, "no descriptor leaves its host"
        grace = duration(self._grace_s)
        self._say(stream_pb2.ConnectRankResponse(header=self._lead.header(), attached=reply, grace=grace))

    def command(self, command: rank_pb2.RankCommand) -> None:
        made = stream_pb2.ConnectRankResponse()
        made.commands.add().CopyFrom(command)
        nbytes = made.ByteSize() + FRAME_ROUND_BYTES
        if nbytes > FRAME_BYTES_MAX:
            raise OutOfRange(Reason.LIMIT_EXCEEDED, f"a message of {nbytes} bytes; the limit is {FRAME_BYTES_MAX}")
        self._say(made, nbytes)

    def close(self, why: str) -> None:
        if why:
            self._say(stream_pb2.ConnectRankResponse(over=session_pb2.SessionOver(message=why)))
        self._end()

    async def memory(self) -> int:
        raise AssertionError("a worker on another host has memory of its own")

    async def finish(self) -> None:
        """Sends the remaining messages, for at most LAST_WORDS_S."""
        self._end()
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=LAST_WORDS_S)
            self._writer.cancel()

    def _end(self) -> None:
        self._over = True
        self._due.set()
        reading, self._reading = self._reading, None
        if reading is not None and not reading.expired():
            reading.reschedule(asyncio.get_running_loop().time())

    def _say(self, message: stream_pb2.ConnectRankResponse, nbytes: int = 0) -> None:
        if self._over:
            return
        self._unsent.append((message, nbytes))
        self._unsent_bytes += nbytes
        self._due.set()
        if self._unsent_bytes > UNREAD_BYTES_MAX:
            _log.error("a rank's stream is not read; its worker is declared dead")
            self._unsent.clear()
            self._end()

    async def _write(self) -> None:
        """Writes all messages: gRPC takes them one at a time, so nothing else may write."""
        try:
            while self._unsent or not self._over:
                if not self._unsent and not await self._await_due() and not self._over:
                    await self._context.write(stream_pb2.ConnectRankResponse())
                while self._unsent:
                    message, nbytes = self._unsent.popleft()
                    await self._context.write(message)
                    self._unsent_bytes -= nbytes
        except grpc.aio.BaseError:
            _log.debug("a rank's stream broke", exc_info=True)
            self._end()

    async def _await_due(self) -> bool:
        """Returns whether there is something to write, or the end, before a beat is due."""
        self._due.clear()
        try:
            async with asyncio.timeout(BEAT_S):
                return await self._due.wait()
        except TimeoutError:
            return False
