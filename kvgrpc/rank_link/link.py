"""Connections of a worker: each becomes a stream to the lead.

Each stream has a channel of its own, with the files of TLS and the token as they are then: a rank that comes back after
a renewal shows the new ones.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from kvgrpc.client.credentials import BearerToken, Credentials
from kvgrpc.client.tls_probe import TlsProbe
from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from kvgrpc.open_files import received_with_descriptor
from kvgrpc.peer.v1 import rank_pb2, rank_pb2_grpc
from kvgrpc.service.peers.stream import failure_of
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import FRAME_BYTES_MAX, FrameReader, encode
from kvgrpc.wire.values import reason

_log = logging.getLogger(__name__)

Frames = AsyncIterator[session_pb2.ClientFrame]
READ_BYTES = 256 * 1024
BEAT_S = 1.0
"""Maximum silence of this end, in seconds."""
ANSWER_S = 10.0
"""Maximum silence of the lead before it has told its grace, in seconds."""
REFUSAL_S = 0.05
"""Time after the opening of a stream in which the lead's refusal would arrive with it, in seconds."""
END_S = 2.0
"""Maximum time for the lead to end a stream, in seconds."""
OPTIONS = [
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    # A lead that comes back is reached within about a second; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


async def serve(control: socket.socket, address: str, credentials: Credentials) -> None:
    """Serves the connections that come over `control`, until it is closed."""
    loop = asyncio.get_running_loop()
    links: set[asyncio.Task[None]] = set()
    ended = asyncio.Event()
    control.setblocking(False)

    def take() -> None:
        data, descriptors = received_with_descriptor(control, 1)
        for descriptor in descriptors:
            link = Link(socket.socket(fileno=descriptor), address, credentials)
            task = loop.create_task(link.run())
            links.add(task)
            task.add_done_callback(links.discard)
        if not data:
            loop.remove_reader(control)
            ended.set()

    loop.add_reader(control, take)
    await ended.wait()
    if links:
        await asyncio.wait(links, timeout=2 * END_S)


class Link:
    """One connection of the worker, and its stream."""

    def __init__(self, worker: socket.socket, address: str, credentials: Credentials) -> None:
        self._worker = worker
        self._address = address
        self._credentials = credentials
        self._attached = False

    async def run(self) -> None:
        """Serves until the connection or the stream ends."""
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=self._worker)
        except OSError:
            _log.exception("a connection of the worker cannot be served")
            self._worker.close()
            return
        try:
            frames = _frames(reader)
            first = await anext(frames, None)
            if first is not None:
                await self._link(first.attach_rank, frames)
        except ConnectionError:
            _log.debug("the worker is gone")
        except Exception as error:  # noqa: BLE001 - the worker is told
            self._fail(await self._failure(error))
        finally:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
            self._writer.close()

    async def _link(self, request: session_pb2.AttachRankRequest, frames: Frames) -> None:
        """Serves over a channel of its own. Raises the error that ended the stream, and InvalidRequest for files that
        are not usable.
        """
        token = BearerToken(self._credentials).metadata()
        async with self._channel() as channel:
            await self._stream(rank_pb2_grpc.RankServiceStub(channel).ConnectRank(metadata=token), request, frames)

    def _channel(self) -> grpc.aio.Channel:
        paths = self._credentials.paths
        if paths is None:
            return grpc.aio.insecure_channel(self._address, options=OPTIONS)
        return grpc.aio.secure_channel(self._address, paths.channel_credentials(), options=OPTIONS)

    async def _stream(self, call: Any, request: session_pb2.AttachRankRequest, frames: Frames) -> None:
        introduction = rank_pb2.ConnectRankRequest(
            ticket=request.ticket,
            rank=request.rank,
            returns=request.returns,
            not_at_rest=request.not_at_rest,
            mirrored=request.mirrored,
        )
        receiving = asyncio.create_task(self._receive(call))
        sending = asyncio.create_task(_send(call, introduction, frames, receiving))
        try:
            await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not _is_workers_fault(sending):
                # The lead has the last word: it may still say why it reads no more.
                await asyncio.wait({receiving}, timeout=END_S)
            for task in (receiving, sending):
                if task.done():
                    task.result()
        finally:
            call.cancel()
            for task in (receiving, sending):
                task.cancel()
            await asyncio.gather(receiving, sending, return_exceptions=True)

    async def _receive(self, call: Any) -> None:
        """Hands on the lead's messages until their end. Raises the error that ended the stream."""
        grace_s = ANSWER_S
        while True:
            try:
                async with asyncio.timeout(grace_s):
                    message = await call.read()
            except TimeoutError:
                what = f"the lead at {self._address} said nothing for {grace_s:g} s: its host or the network is gone"
                raise Unavailable(Reason.PEER_UNREACHABLE, what) from None
            if message is grpc.aio.EOF:
                return
            if message.HasField("attached"):
                self._attached = True
                grace_s = message.grace.ToNanoseconds() / 1e9 or ANSWER_S
                self._hand_on(session_pb2.ServerFrame(rank_attached=message.attached))
            if message.commands:
                commands = session_pb2.RankCommandBatch(commands=message.commands)
                self._hand_on(session_pb2.ServerFrame(commands=commands))
            if message.HasField("over"):
                self._hand_on(session_pb2.ServerFrame(over=message.over))
            await self._writer.drain()

    def _hand_on(self, frame: session_pb2.ServerFrame) -> None:
        self._writer.write(encode(frame))

    async def _failure(self, error: Exception) -> KVGrpcError:
        """Returns the typed error of an error that ended the link, with what TLS prevented."""
        typed = failure_of(error, f"ConnectRank at {self._address}")
        if isinstance(error, grpc.aio.AioRpcError) and isinstance(typed, Unavailable):
            probe = TlsProbe(self._address, self._credentials)
            if why := await probe.why(error.details() or "", END_S):
                return Unavailable(typed.reason, f"the lead at {self._address} is not reached: {why}")
        return typed

    def _fail(self, error: KVGrpcError) -> None:
        """Tells the worker why it is not attached. Later the end of its connection says enough."""
        if self._attached:
            _log.warning("the stream of a rank to its lead has ended: %s", error)
            return
        refused = session_pb2.RefusedResponse(code=error.code, reason=reason(error.reason), message=error.message)
        self._hand_on(session_pb2.ServerFrame(refused=refused))


async def _opened(call: Any, receiving: asyncio.Task[None]) -> None:
    """Returns once the lead has opened the stream or ended it. A lead that refuses a stream does both at once, and
    grpc.aio would lose the refusal if a message were written then.
    """
    begun = asyncio.create_task(call.initial_metadata())
    try:
        await asyncio.wait({begun, receiving}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({receiving}, timeout=REFUSAL_S)
    finally:
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)


async def _send(
    call: Any, introduction: rank_pb2.ConnectRankRequest, frames: Frames, receiving: asyncio.Task[None]
) -> None:
    """Hands on the worker's messages, with beats between, until the worker ends its connection or the stream ends."""
    next_frame: asyncio.Future[session_pb2.ClientFrame | None] = asyncio.ensure_future(anext(frames, None))
    try:
        await _opened(call, receiving)
        message = introduction
        while True:
            await call.write(message)
            await asyncio.wait({next_frame}, timeout=BEAT_S)
            message = rank_pb2.ConnectRankRequest()
            if not next_frame.done():
                continue
            frame = next_frame.result()
            if frame is None:
                await call.done_writing()
                return
            message.reports.extend(frame.reports.reports)
            next_frame = asyncio.ensure_future(anext(frames, None))
    except asyncio.InvalidStateError:
        return  # the stream is over: what is received says how
    finally:
        next_frame.cancel()


def _is_workers_fault(sending: asyncio.Task[None]) -> bool:
    """Returns whether the worker sent bytes that are no frame; the lead does not know about them."""
    return sending.done() and not sending.cancelled() and isinstance(sending.exception(), KVGrpcError)


async def _frames(reader: asyncio.StreamReader) -> Frames:
    found = FrameReader(session_pb2.ClientFrame)
    while data := await reader.read(READ_BYTES):
        for frame in found.feed(data):
            yield frame
