"""Calls to other leads: the handshake, accesses, renewals, and the liveness stream of each pair.

Every call has a deadline; every failure comes back to the node as a typed event. An address that is not on the dial
list is never dialled.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvgrpc.core import actions, events
from kvgrpc.core.accesses import Verdict
from kvgrpc.core.compatibility import EngineDescription
from kvgrpc.core.endpoints import RankEndpoint
from kvgrpc.core.ids import peer_key
from kvgrpc.core.limits import Limits
from kvgrpc.errors import (
    Aborted,
    Exhausted,
    InternalError,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service import status, telemetry
from kvgrpc.service.runner import Runner
from kvgrpc.v1 import common_pb2, handshake_pb2, handshake_pb2_grpc, lease_pb2, lease_pb2_grpc
from kvgrpc.wire import description
from kvgrpc.wire.values import block_lists, core_reason

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

CALL_TIMEOUT_S = 5.0
"""For calls that the peer answers at once; above any pause of a healthy lead."""
RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between tries to bring a liveness stream back; the last one repeats until the peer is dead."""
HANG_UP_GRACE_S = 2.0
"""A channel that is given up lets calls under way finish: closings must not be lost."""


@dataclass(eq=False)
class _Channel:
    """The connection to one lead."""

    address: str
    channel: grpc.aio.Channel
    liveness: asyncio.Task[None] | None = None
    peer: str = ""
    caller: peer_pb2.Caller = field(default_factory=peer_pb2.Caller)


class PeerChannels:
    """The PeerPort of a lead."""

    def __init__(
        self, runner: Runner, limits: Limits, may_dial: Callable[[str], bool], channel_options: list[tuple[str, Any]]
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._may_dial = may_dial
        self._options = channel_options
        self._channels: dict[str, _Channel] = {}
        """By peer key."""
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the port

    def dial(self, action: actions.Dial) -> None:
        self._spawn(self._dial(action))

    def hang_up(self, peer: str) -> None:
        channel = self._channels.pop(peer, None)
        if channel is not None:
            self._spawn(self._close(channel))

    def open_access(self, action: actions.SendOpen) -> None:
        self._spawn(self._open(action))

    def settle_access(self, action: actions.SendSettle) -> None:
        self._spawn(self._settle(action))

    def close_access(self, action: actions.SendClose) -> None:
        # By the channel that is there now: a life that ends closes its accesses and hangs up in one step.
        self._spawn(self._close_access(action, self._channels.get(action.peer)))

    def renew_leases(self, action: actions.SendRenew) -> None:
        self._spawn(self._renew(action))

    async def stop(self) -> None:
        """Ends all streams and channels."""
        channels = list(self._channels.values())
        self._channels.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._close(channel, grace_s=0.1) for channel in channels), return_exceptions=True)

    # -- the handshake

    async def _dial(self, action: actions.Dial) -> None:
        address = action.address
        if not self._may_dial(address):
            error = PermissionDenied(
                Reason.DIAL_REFUSED, f"{address} is not on this server's dial list (setting dial_allow)"
            )
            self._runner.feed(events.DialFailed(address, error))
            return
        channel = _Channel(address, grpc.aio.insecure_channel(address, options=self._options))
        try:
            peer, endpoints = await self._handshake(channel, action)
            channel.peer = peer_key(peer.engine_id, peer.incarnation)
            await self._start_liveness(channel)
        except grpc.aio.AioRpcError as error:
            await channel.channel.close()
            self._runner.feed(events.DialFailed(address, _dial_error(address, error)))
            return
        except (KVGrpcError, TimeoutError) as error:
            await channel.channel.close()
            typed = error if isinstance(error, KVGrpcError) else _no_answer(address)
            self._runner.feed(events.DialFailed(address, typed))
            return
        old = self._channels.pop(channel.peer, None)
        if old is not None:
            self._spawn(self._close(old))
        self._channels[channel.peer] = channel
        self._runner.feed(events.PeerAnswered(address, peer, endpoints))

    async def _handshake(
        self, channel: _Channel, action: actions.Dial
    ) -> tuple[EngineDescription, tuple[RankEndpoint, ...]]:
        here = self._runner.node.state.pool
        channel.caller.CopyFrom(peer_pb2.Caller(engine_id=here.engine_id, incarnation=here.incarnation))
        request = handshake_pb2.HandshakeRequest(
            engine=description.engine_to_proto(here),
            endpoints=[description.endpoint_to_proto(endpoint) for endpoint in action.endpoints],
            expected_engine_id=action.expected_engine_id,
        )
        stub = handshake_pb2_grpc.HandshakeServiceStub(channel.channel)
        with telemetry.client_span("kvgrpc.v1.HandshakeService/Handshake", action.trace, channel.address) as metadata:
            reply = await stub.Handshake(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        try:
            peer = description.engine_from_proto(reply.engine, "engine")
        except KVGrpcError as error:
            raise PreconditionFailed(
                Reason.PEER_FAILED, f"{channel.address} describes itself badly: {error}"
            ) from error
        return peer, tuple(description.endpoint_from_proto(endpoint) for endpoint in reply.endpoints)

    # -- liveness

    async def _start_liveness(self, channel: _Channel) -> None:
        """Opens the stream and waits for the first beat, so that what follows finds us admitted."""
        first = asyncio.get_running_loop().create_future()
        channel.liveness = asyncio.create_task(self._keep_liveness(channel, first))
        try:
            await asyncio.wait_for(first, CALL_TIMEOUT_S)
        except BaseException:
            channel.liveness.cancel()
            raise

    async def _keep_liveness(self, channel: _Channel, first: "asyncio.Future[None]") -> None:
        for attempt in count():
            try:
                await self._beat(channel, first)
            except grpc.aio.AioRpcError as error:
                if not first.done():
                    first.set_exception(error)
                    return
            except TimeoutError:
                _log.debug("peer %s fell silent", channel.peer)
            self._runner.feed(events.PeerSilent(channel.peer))
            await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])

    async def _beat(self, channel: _Channel, first: "asyncio.Future[None]") -> None:
        """One stream: beats every fifth of the grace, and expects as many."""
        stub = peer_pb2_grpc.PeerServiceStub(channel.channel)
        interval_s = self._limits.peer_grace_s / 5
        stream = stub.KeepLiveness()
        try:
            while True:
                with contextlib.suppress(asyncio.InvalidStateError):  # the call is over: reading tells how it ended
                    await stream.write(peer_pb2.KeepLivenessRequest(caller=channel.caller))
                beat = await asyncio.wait_for(stream.read(), interval_s * 2.5)
                if beat is grpc.aio.EOF:
                    return
                if not first.done():
                    first.set_result(None)
                self._runner.feed(events.PeerAlive(channel.peer))
                await asyncio.sleep(interval_s)
        finally:
            stream.cancel()

    # -- accesses

    async def _open(self, action: actions.SendOpen) -> None:
        opening = action.opening
        row = peer_pb2.AccessOpening(
            access_id=opening.access_id,
            token=opening.token,
            transfer_id=opening.transfer_id,
            request_id=opening.request_id,
            data_paths=opening.data_paths,
        )
        if opening.claim is not None:
            claim = opening.claim
            row.content.CopyFrom(
                peer_pb2.ContentClaim(token_count=claim.tokens, digest=claim.digest, opaque_id=claim.opaque)
            )

        async def call(stub: "peer_pb2_grpc.PeerServiceAsyncStub", metadata: Any) -> peer_pb2.OpenedAccess:
            request = peer_pb2.OpenAccessRequest(caller=self._caller(action.peer), openings=[row])
            timeout_s = self._limits.open_wait_s + 2.0
            return _only((await stub.OpenAccess(request, timeout=timeout_s, metadata=metadata)).results)

        try:
            opened = await self._call(action.peer, "OpenAccess", action.trace, call)
            result: events.Opened | KVGrpcError = _opened(opened, self._limits.blocks_per_request)
            retryable = False
        except KVGrpcError as error:
            result, retryable = error, isinstance(error, Unavailable | Exhausted)
        self._runner.feed(events.AccessAnswered(opening.access_id, result, retryable))

    async def _settle(self, action: actions.SendSettle) -> None:
        settling = action.settling
        row = peer_pb2.AccessSettling(access_id=settling.access_id, last=settling.last, bytes=settling.nbytes)

        async def call(stub: "peer_pb2_grpc.PeerServiceAsyncStub", metadata: Any) -> peer_pb2.SettledAccess:
            request = peer_pb2.SettleAccessRequest(caller=self._caller(action.peer), settlings=[row])
            return _only((await stub.SettleAccess(request, timeout=CALL_TIMEOUT_S, metadata=metadata)).results)

        result: Verdict | KVGrpcError
        retryable = False
        try:
            settled = await self._call(action.peer, "SettleAccess", action.trace, call)
            valid = settled.verdict == peer_pb2.VERDICT_VALID
            result = Verdict(valid, None if valid else core_reason(settled.reason), settled.message)
        except KVGrpcError as error:
            result, retryable = error, isinstance(error, Unavailable)
        self._runner.feed(events.SettleAnswered(settling.access_id, result, retryable))

    async def _close_access(self, action: actions.SendClose, channel: _Channel | None) -> None:
        closing = action.closing
        outcome = peer_pb2.CLOSE_OUTCOME_DROPPED if closing.dropped else peer_pb2.CLOSE_OUTCOME_FAILED
        row = peer_pb2.AccessClosing(
            access_id=closing.access_id, outcome=outcome, quiesced=closing.quiesced, token=closing.token
        )

        async def call(stub: "peer_pb2_grpc.PeerServiceAsyncStub", metadata: Any) -> bool:
            engine_id = channel.caller.engine_id if channel is not None else ""
            caller = peer_pb2.Caller(engine_id=engine_id or self._caller(action.peer).engine_id)
            caller.incarnation = action.incarnation
            request = peer_pb2.CloseAccessRequest(caller=caller, closings=[row])
            await stub.CloseAccess(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            return True

        try:
            answered = await self._call(action.peer, "CloseAccess", action.trace, call, channel)
        except KVGrpcError as error:
            answered = error.reason is Reason.NO_HANDSHAKE
        self._runner.feed(events.CloseAnswered(closing.access_id, answered))

    async def _renew(self, action: actions.SendRenew) -> None:
        refs = [lease_pb2.LeaseRef(grant=common_pb2.Grant(token=token)) for _, token in action.rows]
        try:
            channel = self._channel(action.peer)
            stub = lease_pb2_grpc.LeaseServiceStub(channel.channel)
            reply = await stub.RenewLeases(lease_pb2.RenewLeasesRequest(leases=refs), timeout=CALL_TIMEOUT_S)
        except (grpc.aio.AioRpcError, KVGrpcError):
            return  # asked again at the next third of the TTL; liveness and settle notice what matters
        for (transfer_id, _), row in zip(action.rows, reply.leases, strict=False):
            error = None
            if row.reason:
                error = Aborted(core_reason(row.reason), "the source no longer holds the blocks")
            self._runner.feed(events.RenewAnswered(transfer_id, error))

    # -- channels

    async def _call(
        self,
        peer: str,
        method: str,
        trace: str,
        call: Callable[[Any, Any], Awaitable[_T]],
        channel: _Channel | None = None,
    ) -> _T:
        """One call of PeerService. Raises KVGrpcError only."""
        channel = channel or self._channel(peer)
        stub = peer_pb2_grpc.PeerServiceStub(channel.channel)
        try:
            with telemetry.client_span(f"kvgrpc.peer.v1.PeerService/{method}", trace, peer) as metadata:
                return await call(stub, metadata)
        except grpc.aio.AioRpcError as error:
            typed = status.from_rpc_error(error)
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                typed = Unavailable(Reason.PEER_UNREACHABLE, f"{peer} did not answer {method} in time")
            raise typed from error

    def _channel(self, peer: str) -> _Channel:
        """The channel to a peer; one that dialled us is dialled back at the address that it gave."""
        channel = self._channels.get(peer)
        if channel is not None:
            return channel
        known = self._runner.node.state.peers.get(peer)
        address = known.description.address if known else ""
        if not address or not self._may_dial(address):
            raise PermissionDenied(Reason.DIAL_REFUSED, f"peer {peer} has no address that this server may dial")
        channel = _Channel(address, grpc.aio.insecure_channel(address, options=self._options), peer=peer)
        self._channels[peer] = channel
        return channel

    def _caller(self, peer: str) -> peer_pb2.Caller:
        here = self._runner.node.state.description
        if here is None:
            raise Unavailable(Reason.NO_POOL, f"no engine is attached; {peer} cannot be asked")
        return peer_pb2.Caller(engine_id=here.engine_id, incarnation=here.incarnation)

    async def _close(self, channel: _Channel, grace_s: float = HANG_UP_GRACE_S) -> None:
        if channel.liveness is not None:
            channel.liveness.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await channel.liveness
        await channel.channel.close(grace=grace_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a call to a peer failed", exc_info=task.exception())


def _only(rows: Sequence[_T]) -> _T:
    """The row of a call with one row. Raises when the peer did not answer it."""
    if len(rows) != 1:
        raise InternalError(Reason.PEER_FAILED, f"the peer answered {len(rows)} rows for one")
    return rows[0]


def _opened(row: peer_pb2.OpenedAccess, limit: int) -> events.Opened:
    if row.HasField("failure"):
        raise PreconditionFailed(core_reason(row.failure.reason), row.failure.message)
    try:
        blocks = block_lists(row.blocks, limit)
    except KVGrpcError as error:
        raise PreconditionFailed(Reason.PEER_FAILED, f"the source's answer makes no sense: {error}") from error
    return events.Opened(
        blocks=blocks,
        token_count=row.token_count,
        offer_tokens=row.offer_tokens,
        remaining_s=row.remaining.seconds + row.remaining.nanos / 1e9,
        ttl_s=row.ttl.seconds + row.ttl.nanos / 1e9,
        memory_generation=row.memory_generation,
        transfer_id=row.transfer_id,
        lease_id=row.lease_id,
    )


def _dial_error(address: str, error: grpc.aio.AioRpcError) -> KVGrpcError:
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        typed = status.from_rpc_error(error)
        if typed.reason is Reason.PEER_UNREACHABLE:
            return Unavailable(Reason.PEER_UNREACHABLE, f"no kvgrpc server answers at {address}: {error.details()}")
        return typed
    return status.from_rpc_error(error)


def _no_answer(address: str) -> KVGrpcError:
    return Unavailable(Reason.PEER_UNREACHABLE, f"{address} did not answer within {CALL_TIMEOUT_S:g} s")
