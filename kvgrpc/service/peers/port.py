"""Calls to other leads: the handshake, accesses, renewals, and the liveness stream of each pair.

Every call has a deadline. Every failure comes back to the node as a typed event. An address that is not on the dial
list is never dialled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvgrpc.core import actions, events
from kvgrpc.core.peers.proofs import reached
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.sends import SendAnswer, SendAsk, Values
from kvgrpc.errors import (
    DeadlineExceeded,
    Exhausted,
    InternalError,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.service import telemetry
from kvgrpc.service.peers import public
from kvgrpc.service.peers.channel import PeerChannel
from kvgrpc.service.peers.stream import bounded, dial_failure, failure_of, wants_proof
from kvgrpc.service.runner import Runner
from kvgrpc.v1 import handshake_pb2, handshake_pb2_grpc
from kvgrpc.wire import accesses, description, sends
from kvgrpc.wire.accesses import CALLS
from kvgrpc.wire.endpoints import endpoint_to_proto, endpoints_from_proto
from kvgrpc.wire.proofs import new_proof, proof

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

POST_SEND_TIMEOUT_S = 20.0
"""Timeout of PostSend, in seconds; above the peer lead's timeout for its rank, which may first load a library."""
CALL_TIMEOUT_S = 5.0
"""Timeout of calls that the peer's lead answers by itself, in seconds; above any pause of a healthy lead."""
HANG_UP_GRACE_S = 2.0
"""Time a closed channel gives its calls in flight, in seconds: closings must not be lost."""
STOP_GRACE_S = 0.1
"""The same time when this server stops, in seconds: its peers notice its end anyway."""


@dataclass(frozen=True)
class _PeerCall:
    """One call on a stream. `kind`: its field of PeerCall."""

    kind: str
    peer: str
    trace: str
    timeout_s: float = CALL_TIMEOUT_S


class PeerChannels:
    """The PeerPort of a lead."""

    def __init__(
        self, runner: Runner, limits: Limits, may_dial: Callable[[str], bool],
        connect: Callable[[str], grpc.aio.Channel], why: Callable[[str, str], Awaitable[str]],
    ) -> None:  # fmt: skip
        """`connect` opens a channel to an address. `why` says what TLS prevents at an address, by gRPC's details."""
        self._runner = runner
        self._limits = limits
        self._may_dial = may_dial
        self._connect = connect
        self._why = why
        self._channels: dict[str, PeerChannel] = {}
        """Channels by peer key."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._hanging_up: set[asyncio.Task[None]] = set()

    # -- the port

    def dial(self, action: actions.Dial) -> None:
        self._spawn(self._dial(action, self._runner.node.state.life.incarnation))

    def hang_up(self, peer: str) -> None:
        if (channel := self._channels.pop(peer, None)) is not None:
            self._hanging_up.add(self._spawn(channel.close(HANG_UP_GRACE_S)))

    def end_life(self, kept: Collection[str]) -> None:
        """Ends liveness: this life is over, and peers learn it. `kept` peers are hung up by `close_last`."""
        for peer, channel in list(self._channels.items()):
            channel.end_liveness()
            if peer not in kept:
                self.hang_up(peer)

    async def close_last(self, kept: Collection[str], sends: Iterable[actions.SendClose]) -> None:
        """Closes accesses of the life that is over, hangs up, and waits for the peers' answers for HANG_UP_GRACE_S."""
        before = set(self._hanging_up)
        for send in sends:
            self.close_access(send)
        for peer in kept:
            self.hang_up(peer)
        if ends := self._hanging_up - before:
            await asyncio.wait(ends, timeout=HANG_UP_GRACE_S)

    def renew_leases(self, action: actions.SendRenew) -> None:
        self._spawn(self._renew(public.renew_leases(self._channel, action, CALL_TIMEOUT_S)))

    def renew_keys(self, action: actions.SendRenewKeys) -> None:
        self._spawn(self._renew(public.renew_keys(self._channel, action, CALL_TIMEOUT_S)))

    def renew(self) -> None:
        """Moves every peer to a new channel, after a change of TLS. Calls that wait are answered over the old one."""
        for channel in self._channels.values():
            self._spawn(channel.renew(HANG_UP_GRACE_S))

    async def stop(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        for task in self._tasks - self._hanging_up:
            task.cancel()
        if self._hanging_up:  # closings that were sent just now
            await asyncio.wait(self._hanging_up, timeout=STOP_GRACE_S)
        for task in self._hanging_up:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close(STOP_GRACE_S) for channel in channels), return_exceptions=True)

    # -- the handshake

    async def _dial(self, action: actions.Dial, life: int) -> None:
        """Dials a peer. `life`: our life that wants to know the peer; its end ends the wait for the handshake."""
        address, to = action.address, action.to or action.address
        if not self._may_dial(to):
            error = PermissionDenied(
                Reason.DIAL_REFUSED, f"{to} is not on this server's dial list (setting dial_allow)"
            )
            self._runner.feed(events.DialFailed(address, error))
            return
        channel = PeerChannel(to, self._connect, self._runner, self._limits)
        try:
            answered = await self._handshake(channel, action)
            channel.peer = peer_key(answered.peer.engine_id, answered.peer.incarnation)
            self._check_place(channel.peer, to, answered)
            await channel.start_liveness(answered.asks)
        except Exception as error:  # noqa: BLE001 - the node waits for the end of its dial in any case
            await channel.channel.close()
            failure = dial_failure(address, error)
            if isinstance(error, grpc.aio.AioRpcError) and (why := await self._why(to, error.details() or "")):
                failure = Unavailable(failure.reason, f"{to} is not met: {why}")
            if self._runner.node.state.life.incarnation == life:
                self._runner.feed(events.DialFailed(address, failure))
            return
        if self._runner.node.state.life.incarnation != life:
            await channel.close(0)
            return
        old = self._channels.pop(channel.peer, None)
        if old is not None:
            self._spawn(old.close(HANG_UP_GRACE_S))
        self._channels[channel.peer] = channel
        self._runner.feed(answered)

    def _check_place(self, key: str, at: str, answered: events.PeerAnswered) -> None:
        """Raises PreconditionFailed (PEER_FAILED) for a peer that answers as a life known at another address."""
        if (known := self._runner.node.state.peers.lives.get(key)) is not None:
            reached(known, answered, at)

    async def _handshake(self, channel: PeerChannel, action: actions.Dial) -> events.PeerAnswered:
        here, asks = self._runner.node.state.life.engine, action.asks or new_proof()
        request = handshake_pb2.HandshakeRequest(
            engine=description.engine_to_proto(here),
            endpoints=[endpoint_to_proto(endpoint) for endpoint in action.endpoints],
            expected_engine_id=action.expected_engine_id,
            proof=asks,
            proofs=action.proofs,
        )
        stub = handshake_pb2_grpc.HandshakeServiceStub(channel.channel)
        trace, ended = telemetry.call_span("kvgrpc.v1.HandshakeService/Handshake", action.trace, channel.address)
        try:
            reply = bounded(
                # The peer's ranks take part, so this call may last as long as a handshake may.
                await stub.Handshake(
                    request, timeout=self._limits.connect_timeout_s, metadata=telemetry.metadata(trace)
                ),
                channel.address,
            )
        except (grpc.aio.AioRpcError, KVGrpcError) as error:
            ended(error)
            raise
        ended(None)
        try:
            peer = description.engine_from_proto(reply.engine, "engine")
            endpoints = endpoints_from_proto(reply.endpoints)
            shows = proof("proof", reply.proof)
        except KVGrpcError as error:
            raise PreconditionFailed(
                Reason.PEER_FAILED, f"{channel.address} describes itself badly: {error}"
            ) from error
        channel.speak_for(here.engine_id, here.incarnation, shows, peer.message_bytes)
        return events.PeerAnswered(action.address, peer, endpoints, shows, asks)

    # -- accesses

    def open_access(self, action: actions.SendOpen) -> None:
        limit = self._limits.blocks_per_request
        call = _PeerCall("open_access", action.peer, action.trace, self._limits.open_wait_s + 2.0)

        def answered(result: events.Opened | KVGrpcError) -> None:
            retryable = isinstance(result, Unavailable | Exhausted)
            self._runner.feed(events.AccessAnswered(action.opening.access_id, result, retryable))

        self._ask(call, accesses.open_request(action.opening), lambda reply: accesses.opened(reply, limit), answered)

    def settle_access(self, action: actions.SendSettle) -> None:
        call = _PeerCall("settle_access", action.peer, action.trace)

        def answered(result: Verdict | KVGrpcError) -> None:
            retryable = isinstance(result, Unavailable) or wants_proof(result)
            self._runner.feed(events.SettleAnswered(action.settling.access_id, result, retryable))

        self._ask(call, accesses.settle_request(action.settling), accesses.verdict, answered)

    def close_access(self, action: actions.SendClose) -> None:
        call = _PeerCall("close_access", action.peer, action.trace)

        def answered(result: bool | KVGrpcError) -> None:
            known = not isinstance(result, KVGrpcError) or result.reason is Reason.NO_HANDSHAKE
            self._runner.feed(events.CloseAnswered(action.closing.access_id, known, action.closing.quiesced))

        self._ask(call, accesses.close_request(action.closing), lambda _: True, answered, action.incarnation)

    def parts_ready(self, action: actions.SendParts) -> None:
        call = _PeerCall("parts_ready", action.peer, action.trace)

        def answered(result: KVGrpcError | None) -> None:
            retryable = isinstance(result, Unavailable | Exhausted) or wants_proof(result)
            self._runner.feed(events.PartsAnswered(action.access_id, result, retryable))

        self._ask(call, accesses.parts_request(action.access_id, action.parts), lambda _: None, answered)

    def checksum_blocks(self, action: actions.SendChecksums) -> None:
        call = _PeerCall("checksum_blocks", action.peer, action.trace, self._limits.transfer_timeout_s)

        def answered(result: tuple[bytes, ...] | KVGrpcError) -> None:
            retryable = isinstance(result, Unavailable | Exhausted) or wants_proof(result)
            self._runner.feed(events.ChecksumsAnswered(action.name, action.number, result, retryable))

        self._ask(call, accesses.checksum_request(action.access_id, action.blocks), accesses.checksums, answered)

    def post_send(self, action: actions.SendPostSend) -> None:
        call, ask = _PeerCall("post_send", action.peer, action.trace, POST_SEND_TIMEOUT_S), action.ask

        def answered(result: Values | KVGrpcError) -> None:
            answer = send_answer(ask, result)
            self._runner.feed(events.PostSendAnswered(action.rank, action.peer, answer, action.incarnation))

        self._ask(call, sends.post_send_request(action.access_id, ask), sends.send_under_way, answered)

    def register_push(self, action: actions.SendRegister) -> None:
        self._spawn(self._register(action))

    async def _register(self, action: actions.SendRegister) -> None:
        self._runner.feed(await public.register_push(self._channel, action, CALL_TIMEOUT_S))

    def _ask(
        self,
        call: "_PeerCall",
        request: Any,
        convert: Callable[[Any], _T],
        then: Callable[[_T | KVGrpcError], None],
        life: int = 0,
    ) -> None:
        """Makes a call over the stream to the peer. `then` gets the result. `life`: our life that must speak, unless 0.

        The channel is looked up at once: the next action may be to hang up.
        """
        try:
            channel = self._channel(call.peer)
            if life not in (0, channel.caller.incarnation):
                raise PreconditionFailed(Reason.NOT_PROVED, "no stream of that life is left")
        except KVGrpcError as error:
            then(error)
            return
        name = CALLS[call.kind]
        trace, ended = telemetry.call_span(f"kvgrpc.peer.v1.PeerService/{name}", call.trace, call.peer)

        def answered(reply: Any | KVGrpcError) -> None:
            result: _T | KVGrpcError
            try:
                result = reply if isinstance(reply, KVGrpcError) else convert(bounded(reply, call.peer))
            except Exception as error:  # noqa: BLE001 - the node waits for an answer in any case
                result = failure_of(error, name)
            ended(result if isinstance(result, KVGrpcError) else None)
            if wants_proof(result):
                self._runner.feed(events.ProofRefused(call.peer))
            then(result)

        row = peer_pb2.PeerCall(traceparent=trace)
        getattr(row, call.kind).CopyFrom(request)
        channel.stream.call(row, call.timeout_s, answered)

    async def _renew(self, asked: Awaitable[Sequence[events.Event]]) -> None:
        for answered in await asked:
            self._runner.feed(answered)

    # -- channels

    def _channel(self, peer: str) -> PeerChannel:
        """Returns the channel to a peer. A peer that dialled us is dialled back at the address it gave."""
        channel = self._channels.get(peer)
        if channel is not None:
            return channel
        known = self._runner.node.state.peers.lives.get(peer)
        address = known.description.address if known else ""
        if known is None or not address or not self._may_dial(address):
            raise PermissionDenied(Reason.DIAL_REFUSED, f"peer {peer} has no address that this server may dial")
        here = self._runner.node.state.life.engine
        channel = PeerChannel(address, self._connect, self._runner, self._limits, peer)
        channel.speak_for(here.engine_id, here.incarnation, known.shows[0], known.description.message_bytes)
        self._channels[peer] = channel
        return channel

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._hanging_up.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a call to a peer failed", exc_info=task.exception())


def send_answer(ask: SendAsk, result: Values | KVGrpcError) -> SendAnswer:
    """Returns what a rank hears of its ask. Only a meeting may fail for good: a group that was made is made again."""
    answer = SendAnswer(ask.source_rank, ask.epoch, ask.sequence)
    if not isinstance(result, KVGrpcError):
        return replace(answer, values=result)
    known = not isinstance(result, Unavailable | DeadlineExceeded | InternalError)
    permanent = known and result.reason is Reason.NO_DATA_PATH and ask.meets
    regroup = known and not permanent and result.reason in (Reason.DATA_PATH_FAILED, Reason.NO_DATA_PATH)
    return replace(answer, error=result.sentence, known=known, regroup=regroup, permanent=permanent)
