"""Calls between leads that routers and engines make too: RegisterPush and RenewLeases."""

from collections.abc import Callable

import grpc.aio

from kvgrpc.core import actions, events
from kvgrpc.core.values.ids import peer_key
from kvgrpc.errors import Aborted, Exhausted, KVGrpcError, Unavailable
from kvgrpc.service import telemetry
from kvgrpc.service.peers.channel import PeerChannel
from kvgrpc.service.peers.stream import bounded, failure_of, readable
from kvgrpc.v1 import common_pb2, handoff_pb2, handoff_pb2_grpc, lease_pb2, lease_pb2_grpc
from kvgrpc.wire.values import core_reason, duration, grant


async def register_push(
    channel: Callable[[str], PeerChannel], action: actions.SendRegister, timeout_s: float
) -> events.RegisterAnswered:
    """Calls RegisterPush at the source; a router may make this call instead."""
    request = handoff_pb2.RegisterPushRequest(grant=grant(action.token), request_id=action.request_id)
    error: KVGrpcError | None = None
    life = action.peer
    trace, ended = telemetry.call_span("kvgrpc.v1.HandoffService/RegisterPush", action.trace, action.peer)
    try:
        stub = handoff_pb2_grpc.HandoffServiceStub(channel(action.peer).channel)
        reply = await stub.RegisterPush(request, timeout=timeout_s, metadata=telemetry.metadata(trace))
        header = bounded(readable(reply, action.peer).header, action.peer)
        life = peer_key(header.engine_id, header.incarnation)
    except Exception as failed:  # noqa: BLE001 - the transfer waits for an answer in any case
        error = failure_of(failed, "RegisterPush")
    ended(error)
    return events.RegisterAnswered(action.transfer_id, life, error, isinstance(error, Unavailable | Exhausted))


async def renew_leases(
    channel: Callable[[str], PeerChannel], action: actions.SendRenew, timeout_s: float
) -> list[events.RenewAnswered]:
    """Calls RenewLeases at the issuer. A lost answer is not retried: the next third of the TTL asks again, and liveness
    and settle notice what matters.
    """
    refs = [lease_pb2.LeaseRef(grant=common_pb2.Grant(token=token)) for _, token in action.rows]
    try:
        stub = lease_pb2_grpc.LeaseServiceStub(channel(action.peer).channel)
        request = lease_pb2.RenewLeasesRequest(leases=refs, for_access=True, reading_access_ids=action.reading)
        reply = bounded(await stub.RenewLeases(request, timeout=timeout_s), action.peer)
    except (grpc.aio.AioRpcError, KVGrpcError):
        return []
    gone = "the source no longer holds the blocks"
    return [
        events.RenewAnswered(transfer_id, Aborted(core_reason(row.reason), gone) if row.reason else None)
        for (transfer_id, _), row in zip(action.rows, reply.leases, strict=False)
    ]


async def renew_keys(
    channel: Callable[[str], PeerChannel], action: actions.SendRenewKeys, timeout_s: float
) -> list[events.KeysRenewed]:
    """Calls RenewLeases at a source, by transfer keys. Not retried: an engine that wants the leases asks again."""
    request = lease_pb2.RenewLeasesRequest(leases=[lease_pb2.LeaseRef(transfer_key=key) for key in action.keys])
    if action.ttl_s is not None:
        request.ttl.CopyFrom(duration(action.ttl_s))
    try:
        stub = lease_pb2_grpc.LeaseServiceStub(channel(action.peer).channel)
        reply = await stub.RenewLeases(request, timeout=timeout_s, metadata=telemetry.metadata(action.trace))
        rows = zip(action.keys, bounded(reply, action.peer).leases, strict=False)
    except (grpc.aio.AioRpcError, KVGrpcError):
        return []
    left = tuple((key, row.remaining.ToNanoseconds() / 1e9) for key, row in rows if not row.reason)
    return [events.KeysRenewed(action.peer, left)]
