"""The connection to one other lead: its channel, its stream of calls, and the stream that tells that both live."""

import asyncio
import contextlib
import logging
from itertools import count
from typing import Any

import grpc.aio

from kvgrpc.core import events
from kvgrpc.core.values.limits import Limits
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service.peers.stream import PeerStream
from kvgrpc.service.runner import Runner

_log = logging.getLogger(__name__)

FIRST_BEAT_S = 5.0
"""Longest wait for the first beat of a peer; above any pause of a healthy lead."""
RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between tries to bring a liveness stream back; the last one repeats until the peer is dead."""


class PeerChannel:
    """Everything that is open towards one lead. `peer` is its key, once it is known."""

    def __init__(
        self, address: str, options: list[tuple[str, Any]], runner: Runner, limits: Limits, peer: str = ""
    ) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.stub: Any = peer_pb2_grpc.PeerServiceStub(self.channel)
        self.stream = PeerStream(self.stub, peer or address)
        self.peer = peer
        self.caller = peer_pb2.Caller()
        self._runner = runner
        self._limits = limits
        self._liveness: asyncio.Task[None] | None = None

    async def start_liveness(self) -> None:
        """Opens the liveness stream and waits for the first beat, so that what follows finds us admitted.

        Raises TimeoutError, or the stream's error.
        """
        stream = self.stub.KeepLiveness()
        try:
            if not await self._exchange(stream, FIRST_BEAT_S):
                raise TimeoutError
        except BaseException:
            stream.cancel()
            raise
        self._liveness = asyncio.create_task(self._keep_liveness(stream))

    def end_liveness(self) -> None:
        """The peer is to hear at once that this life is over; calls go on."""
        if self._liveness is not None:
            self._liveness.cancel()

    async def close(self, grace_s: float) -> None:
        """Lets calls under way finish for `grace_s`, then ends all."""
        self.end_liveness()
        if self._liveness is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._liveness
        await self.stream.close(grace_s)
        await self.channel.close(grace=grace_s)

    async def _keep_liveness(self, stream: Any) -> None:
        for attempt in count():
            try:
                await self._beat(stream)
            except grpc.aio.AioRpcError as error:
                _log.debug("peer %s refuses the liveness stream: %s", self.peer, error.details())
            except TimeoutError:
                _log.debug("peer %s fell silent", self.peer)
            self._runner.feed(events.PeerSilent(self.peer))
            await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
            stream = self.stub.KeepLiveness()

    async def _beat(self, stream: Any) -> None:
        """One stream: beats every fifth of the grace, and expects as many."""
        interval_s = self._limits.peer_grace_s / 5
        over = asyncio.ensure_future(stream.code())  # between two beats the stream is not read
        try:
            while await self._exchange(stream, interval_s * 2.5):
                self._runner.feed(events.PeerAlive(self.peer))
                await asyncio.wait((over,), timeout=interval_s)
        finally:
            stream.cancel()
            over.cancel()

    async def _exchange(self, stream: Any, timeout_s: float) -> bool:
        """One beat and its answer; whether the stream goes on. Raises TimeoutError, or the stream's error.

        An error of a call that anything else holds on to, a future for one, keeps the connection beyond its channel.
        """
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over: reading tells how it ended
            await stream.write(peer_pb2.KeepLivenessRequest(caller=self.caller))
        async with asyncio.timeout(timeout_s):
            return await stream.read() is not grpc.aio.EOF
