"""The connection to one other lead: its channel, its stream of calls, and its liveness stream."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import grpc.aio

from kvgrpc.core import events
from kvgrpc.core.tables.peers import is_one_of
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service.peers.stream import PeerStream, failure_of, readable, wants_proof
from kvgrpc.service.runner import Runner

_log = logging.getLogger(__name__)

FIRST_BEAT_S = 5.0
"""Maximum wait for the first beat of a peer, in seconds; above any pause of a healthy lead."""
RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between tries to restore a liveness stream, in seconds; the last one repeats until the peer is dead."""

BEATS_PER_S = 150
"""Number of beats in a second, to all peers, from which on each peer gets them more rarely."""
BEAT_SLOTS = 25
"""Number of moments within the grace at which beats are sent. Beats of one moment cost half of what single ones do."""


def pause_to_beat(peers: int, grace_s: float, now: float) -> float:
    """Returns the time until the next beat to one of so many peers: a fifth of the grace, with many peers up to a third
    of it, rounded down to a moment at which others get theirs. A peer is silent for half of the grace at the earliest.
    """
    slot_s = grace_s / BEAT_SLOTS
    longest_s = min(max(grace_s / 5, peers / BEATS_PER_S), grace_s / 3)
    return max((now + longest_s) // slot_s * slot_s - now, slot_s)


class PeerChannel:
    """Everything that is open towards one lead. `peer`: its key, once known."""

    def __init__(
        self, address: str, connect: Callable[[str], grpc.aio.Channel], runner: Runner, limits: Limits, peer: str = ""
    ) -> None:
        """`connect` opens a channel to an address."""
        self.address = address
        self._connect = connect
        self.channel = connect(address)
        self.stub: Any = peer_pb2_grpc.PeerServiceStub(self.channel)
        self.peer = peer
        self.caller = peer_pb2.Caller()
        """The life of ours that this channel speaks for, with the proof it shows there."""
        self.stream = PeerStream(self.stub, peer or address, self.caller)
        self._beats_on: grpc.aio.Channel | None = None
        """The channel of the liveness stream; None while there is none."""
        self._moved = asyncio.Event()
        """Set when `_beats_on` changes."""
        self._runner = runner
        self._limits = limits
        self._liveness: asyncio.Task[None] | None = None

    def speak_for(self, engine_id: str, incarnation: int, shows: bytes, peer_takes: int) -> None:
        """Makes all calls over this channel speak for that life, which shows this proof. `peer_takes`: maximum size of
        a message that the peer takes, in bytes.
        """
        self.caller.CopyFrom(peer_pb2.Caller(engine_id=engine_id, incarnation=incarnation, proof=shows))
        self.stream.message_bytes = min(self._limits.message_bytes, peer_takes)

    async def start_liveness(self, asks: bytes) -> None:
        """Opens the liveness stream and waits for the first beat: then the peer admits our calls. `asks`: the proof
        that this handshake told the peer to show.

        Raises TimeoutError, PreconditionFailed (PEER_FAILED) for another proof, or the stream's error.
        """
        stream = self.stub.KeepLiveness()
        try:
            first = await self._exchange(stream, FIRST_BEAT_S)
            if first is None:
                raise TimeoutError
            if not is_one_of(first.proof, (asks,)):
                self._check_shown(first.proof)
        except BaseException:
            stream.cancel()
            raise
        self._beats_on = self.channel
        self._liveness = asyncio.create_task(self._keep_liveness(stream, first.proof))
        self._liveness.add_done_callback(lambda _: self._beat_on(None))

    def end_liveness(self) -> None:
        """Ends the liveness stream, so that the peer hears at once that this life is over. Calls go on."""
        if self._liveness is not None:
            self._liveness.cancel()

    async def renew(self, grace_s: float) -> None:
        """Goes over to a new channel, which TLS opens with the identity of now. The liveness stream follows after its
        next beat. Calls that wait are answered over the old channel for `grace_s` seconds.
        """
        stream, channel, message_bytes = self.stream, self.channel, self.stream.message_bytes
        self.channel = self._connect(self.address)
        self.stub = peer_pb2_grpc.PeerServiceStub(self.channel)
        self.stream = PeerStream(self.stub, self.peer or self.address, self.caller, message_bytes)
        await stream.close(grace_s)
        while self._beats_on is channel:
            self._moved.clear()
            await self._moved.wait()
        await channel.close(grace=grace_s)

    async def close(self, grace_s: float) -> None:
        """Lets calls in flight finish for `grace_s` seconds, then ends everything."""
        self.end_liveness()
        if self._liveness is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._liveness
        await self.stream.close(grace_s)
        await self.channel.close(grace=grace_s)

    async def _keep_liveness(self, stream: Any, shown: bytes) -> None:
        for attempt in count():
            try:
                await self._beat(stream, shown)
            except KVGrpcError as error:
                _log.warning("%s", error)
            except grpc.aio.AioRpcError as error:
                _log.debug("peer %s refuses the liveness stream: %s", self.peer, error.details())
                if wants_proof(failure_of(error, "KeepLiveness")):
                    self._runner.feed(events.ProofRefused(self.peer))
            except TimeoutError:
                _log.debug("peer %s fell silent", self.peer)
            if self._beats_on is self.channel:
                self._runner.feed(events.PeerSilent(self.peer))
                await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
            stream, shown = self.stub.KeepLiveness(), b""
            self._beat_on(self.channel)

    def _beat_on(self, channel: grpc.aio.Channel | None) -> None:
        self._beats_on = channel
        self._moved.set()

    async def _beat(self, stream: Any, shown: bytes) -> None:
        """Serves one stream until its end, or until the channel is another one: sends beats, and expects an answer to
        each within half of the grace. `shown`: the proof that the peer has shown on it.

        Raises PreconditionFailed (PEER_FAILED) for a peer whose proof is wrong.
        """
        grace_s, loop = self._limits.peer_grace_s, asyncio.get_running_loop()
        over = asyncio.ensure_future(stream.code())  # the stream is not read between two beats
        try:
            while self._beats_on is self.channel:
                answer = await self._exchange(stream, grace_s / 2)
                if answer is None:
                    return
                shown = shown or answer.proof
                self._check_shown(shown)
                self._runner.feed(events.PeerAlive(self.peer, shown))
                pause_s = pause_to_beat(len(self._runner.node.state.peers.lives), grace_s, loop.time())
                await asyncio.wait((over,), timeout=pause_s)
        finally:
            stream.cancel()
            over.cancel()

    def _check_shown(self, proof: bytes) -> None:
        known = self._runner.node.state.peers.lives.get(self.peer)
        if known is None or not known.proves(proof):
            why = f"who answers at {self.address} does not show that it is {self.peer}"
            raise PreconditionFailed(Reason.PEER_FAILED, why)

    async def _exchange(self, stream: Any, timeout_s: float) -> peer_pb2.KeepLivenessResponse | None:
        """Sends one beat and returns its answer; None: the stream is over. Raises TimeoutError, or the stream's error.

        Nothing else may hold the error of a call, not even a future: that would keep the connection beyond its channel.
        """
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over: the read below tells how it ended
            await stream.write(peer_pb2.KeepLivenessRequest(caller=self.caller))
        async with asyncio.timeout(timeout_s):
            answer = await stream.read()
        return None if answer is grpc.aio.EOF else readable(answer, self.address)
