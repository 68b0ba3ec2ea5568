"""The connection to one other lead: its channel, its stream of calls, and the stream that tells that both live."""

import asyncio
import contextlib
import logging
from itertools import count
from typing import Any

import grpc.aio

from kvgrpc.core import events
from kvgrpc.core.limits import Limits
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service.peer_stream import PeerStream
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
        first = asyncio.get_running_loop().create_future()
        self._liveness = asyncio.create_task(self._keep_liveness(first))
        try:
            await asyncio.wait_for(first, FIRST_BEAT_S)
        except BaseException:
            self._liveness.cancel()
            raise

    async def close(self, grace_s: float) -> None:
        """Lets calls under way finish for `grace_s`, then ends all."""
        if self._liveness is not None:
            self._liveness.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._liveness
        await self.stream.close(grace_s)
        await self.channel.close(grace=grace_s)

    async def _keep_liveness(self, first: "asyncio.Future[None]") -> None:
        for attempt in count():
            try:
                await self._beat(first)
            except grpc.aio.AioRpcError as error:
                if not first.done():
                    first.set_exception(error)
                    return
            except TimeoutError:
                _log.debug("peer %s fell silent", self.peer)
            self._runner.feed(events.PeerSilent(self.peer))
            await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])

    async def _beat(self, first: "asyncio.Future[None]") -> None:
        """One stream: beats every fifth of the grace, and expects as many."""
        interval_s = self._limits.peer_grace_s / 5
        stream = self.stub.KeepLiveness()
        over = asyncio.ensure_future(stream.code())  # between two beats nobody reads
        try:
            while True:
                with contextlib.suppress(asyncio.InvalidStateError):  # the call is over: reading tells how it ended
                    await stream.write(peer_pb2.KeepLivenessRequest(caller=self.caller))
                beat = await asyncio.wait_for(stream.read(), interval_s * 2.5)
                if beat is grpc.aio.EOF:
                    return
                if not first.done():
                    first.set_result(None)
                self._runner.feed(events.PeerAlive(self.peer))
                await asyncio.wait((over,), timeout=interval_s)
        finally:
            stream.cancel()
            over.cancel()
