"""Conversion of the core's answers, transfers, leases and pins to messages."""

import re

from google.protobuf.message import Message

from kvgrpc.core.actions import (
    Acknowledged,
    Allocated,
    BlocksReserved,
    Cancelled,
    DrainChanged,
    Freed,
    GaveUp,
    HandedOver,
    Introduced,
    PeerConnected,
    PullStarted,
    PushExpected,
    QuarantineReleased,
    Reclaimed,
    Registered,
    Released,
    Renewed,
)
from kvgrpc.core.tables import transfers
from kvgrpc.core.tables.leases import Lease, LeaseState, LeaseTimes
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Direction, Disposition, Phase, State, Transfer, TransferPath
from kvgrpc.core.values.compatibility import compare
from kvgrpc.errors import Reason
from kvgrpc.v1 import admin_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire import description
from kvgrpc.wire.bounds import TEXT_BYTES_MAX
from kvgrpc.wire.description import PATHS_SHOWN_MAX, rejected_to_proto
from kvgrpc.wire.endpoints import endpoint_to_proto
from kvgrpc.wire.enums import numbers
from kvgrpc.wire.values import PHASES, data_path, duration, failure, grant, layer_ranges, pool_blocks, reason

DIRECTIONS = numbers(transfer_pb2.Direction, Direction)
STATES = numbers(transfer_pb2.TransferState, State)
DISPOSITIONS = numbers(transfer_pb2.MemoryDisposition, Disposition)
LEASE_STATES = numbers(lease_pb2.LeaseState, LeaseState)
PIN_KINDS = numbers(admin_pb2.PinKind, PinKind)
WAITS = numbers(transfer_pb2.WaitingFor, transfers.WAITS)
OUTCOMES = numbers(
    transfer_pb2.CancelOutcome, ("cancelled_before_access", "cancelled_in_flight", "already_ended", "tombstoned")
)


_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id(traceparent: str) -> str:
    """Returns the trace id in a W3C traceparent; empty if it is malformed or longer than TEXT_BYTES_MAX."""
    found = _TRACEPARENT.fullmatch(traceparent) if 0 < len(traceparent) <= TEXT_BYTES_MAX else None
    return found[1] if found else ""


def readable_trace(traceparent: str) -> str:
    """Returns a caller's traceparent, or an empty text if it is malformed."""
    return traceparent if trace_id(traceparent) else ""


def transfer(value: Transfer, now: float) -> transfer_pb2.Transfer:
    """Returns the message of a transfer as of its last event. Ages are counted to `now`."""
    end = value.ended if value.ended is not None else now
    made = transfer_pb2.Transfer(
        transfer_id=value.id,
        direction=DIRECTIONS[value.direction],
        state=STATES[value.state],
        memory=DISPOSITIONS[value.memory],
        request_id=value.request_id,
        trace_id=trace_id(value.trace),
        pair_id=value.pair_id,
        lease_id=value.lease_id,
        waiting_for=WAITS[value.waiting_for],
        use_tokens=value.use_tokens,
        block_count=value.blocks,
        total_bytes=value.nbytes,
        moved_bytes=value.nbytes_done,
        phases=[_phase(phase, value.created, end) for phase in value.phases],
        paths=[_path(path) for path in value.paths[:PATHS_SHOWN_MAX]],
        layers_done=layer_ranges(value.layers_done),
        part_epoch=value.part_epoch,
        failure=failure(value.failure) if value.failure else None,
        age=duration(now - value.created),
        done_consumer_count=value.consumers_done,
        consumer_count=value.consumers,
        priority=value.priority,
        event_seq=value.seq,
        tenant=value.tenant,
    )
    if value.peer_engine_id:
        made.peer.CopyFrom(
            transfer_pb2.TransferPeer(
                engine_id=value.peer_engine_id,
                incarnation=value.peer_incarnation,
                address=value.peer_address,
                transfer_id=value.peer_transfer_id,
            )
        )
    return made


def lease(value: Lease, times: LeaseTimes, incarnation: int) -> lease_pb2.Lease:
    """Returns the message of a lease in that life of its engine."""
    return lease_pb2.Lease(
        lease_id=value.id,
        state=LEASE_STATES[value.state],
        request_id=value.request_id,
        transfer_id=value.transfer_id,
        ttl=duration(value.last_ttl_s),
        remaining=duration(times.remaining_s),
        cap_remaining=duration(times.cap_remaining_s),
        age=duration(times.age_s),
        blocks=pool_blocks(value.blocks, incarnation),
        token_count=value.content.tokens,
        consumer_count=value.consumers,
        done_consumer_count=value.done,
        open_access_count=len(value.accesses),
        renewal_count=value.renewals,
        trace_id=trace_id(value.trace),
        labels=dict(value.labels),
        soft_in=None if times.soft_in_s is None else duration(times.soft_in_s),
        tenant=value.tenant,
        findable=value.findable,
    )


def reclaimed(value: Reclaimed, incarnation: int) -> pool_pb2.Reclaimed:
    """Returns the message of what was reclaimed from leases, in that life of their engine."""
    return pool_pb2.Reclaimed(
        enough=value.enough,
        leases=[
            pool_pb2.ReclaimedLease(lease_id=row.lease_id, transfer_id=row.transfer_id, request_id=row.request_id)
            for row in value.leases
        ],
        lease_count=value.lease_count,
        freed_blocks=pool_blocks(value.freed, incarnation),
        later_leases=[
            pool_pb2.SoftLater(
                soft_in=duration(row.in_s),
                group_block_counts=[
                    pool_pb2.GroupBlockCount(group=group, block_count=count)
                    for group, count in enumerate(row.block_counts)
                    if count
                ],
            )
            for row in value.later
        ],
        claimed_lease_count=value.claimed,
    )


def renewed(value: Renewed) -> list[lease_pb2.RenewedLease]:
    """Returns the rows of a renewal. Rows with equal content share one message: most leases have the same time left."""
    made: dict[tuple[float, Reason | None, LeaseState | None], lease_pb2.RenewedLease] = {}
    return [made.get(row) or made.setdefault(row, _renewed(*row)) for row in value.rows]


def _renewed(left_s: float, why: Reason | None, state: LeaseState | None) -> lease_pb2.RenewedLease:
    shown = lease_pb2.LEASE_STATE_UNSPECIFIED if state is None else LEASE_STATES[state]
    return lease_pb2.RenewedLease(remaining=duration(left_s), reason=reason(why), state=shown)


def _phase(value: Phase, created: float, end: float) -> transfer_pb2.PhaseTiming:
    stop = value.end if value.end is not None else end
    return transfer_pb2.PhaseTiming(
        phase=PHASES[value.name], start=duration(value.start - created), duration=duration(stop - value.start)
    )


def _path(value: TransferPath) -> transfer_pb2.TransferPath:
    return transfer_pb2.TransferPath(
        rank=value.path.rank,
        peer_rank=value.path.peer_rank,
        data_path=data_path(value.path.data_path),
        why=value.path.why,
        moved_bytes=value.nbytes,
        descriptor_count=value.descriptors,
        rejected_paths=rejected_to_proto(value.path) if value.path.rejected else (),
    )


# ---- replies: each function fills in an empty reply, all but its header, as of `now`, in seconds on the core's clock,
# ---- in the life `incarnation` of the engine

_WithTransfer = (
    handoff_pb2.FinishedBlocksResponse
    | handoff_pb2.PullBlocksResponse
    | handoff_pb2.ReserveBlocksResponse
    | handoff_pb2.RegisterPushResponse
)
_WithGrant = handoff_pb2.FinishedBlocksResponse | handoff_pb2.ReserveBlocksResponse | lease_pb2.GrantLeaseResponse


def put_finished(
    answer: HandedOver | GaveUp | PushExpected, into: handoff_pb2.FinishedBlocksResponse, now: float, incarnation: int
) -> None:
    """Fills in the reply to FinishedBlocks. A hand-over that was only expected has nothing to tell."""
    match answer:
        case HandedOver():
            into.lease.CopyFrom(lease(answer.lease, answer.times, incarnation))
            _put_transfer(answer.transfer, into, now)
            _put_grant(answer.token, into)
        case GaveUp():
            _put_transfer(answer.transfer, into, now)


def put_pulling(answer: PullStarted, into: handoff_pb2.PullBlocksResponse, now: float, _incarnation: int) -> None:
    _put_transfer(answer.transfer, into, now)


def put_reserved(
    answer: BlocksReserved, into: handoff_pb2.ReserveBlocksResponse, now: float, _incarnation: int
) -> None:
    _put_transfer(answer.transfer, into, now)
    _put_grant(answer.token, into)


def put_registered(answer: Registered, into: handoff_pb2.RegisterPushResponse, now: float, _incarnation: int) -> None:
    _put_transfer(answer.transfer, into, now)


def put_cancelled(answer: Cancelled, into: transfer_pb2.CancelTransferResponse, now: float, _incarnation: int) -> None:
    into.outcome = OUTCOMES[answer.outcome]
    into.transfers.extend([transfer(one, now) for one in answer.transfers])


def put_acknowledged(
    answer: Acknowledged, into: transfer_pb2.AcknowledgeTransfersResponse, _now: float, _incarnation: int
) -> None:
    into.acknowledged_count = answer.count


def put_granted(answer: HandedOver, into: lease_pb2.GrantLeaseResponse, _now: float, incarnation: int) -> None:
    into.lease.CopyFrom(lease(answer.lease, answer.times, incarnation))
    _put_grant(answer.token, into)


def put_renewed(
    answer: Renewed, into: lease_pb2.RenewLeasesResponse | lease_pb2.KeepAliveResponse, _now: float, _incarnation: int
) -> None:
    """Fills in the reply to RenewLeases, or to a message of KeepAlive."""
    into.leases.extend(renewed(answer))


def put_released(answer: Released, into: lease_pb2.ReleaseLeaseResponse, _now: float, incarnation: int) -> None:
    into.lease.CopyFrom(lease(answer.lease, answer.times, incarnation))
    into.freed_blocks.CopyFrom(pool_blocks(answer.freed, incarnation))


def put_allocated(answer: Allocated, into: pool_pb2.AllocateBlocksResponse, _now: float, incarnation: int) -> None:
    """Fills in the reply to AllocateBlocks. With `validate_only` no allocation was made, and there are no blocks."""
    if answer.allocation_id:
        into.blocks.CopyFrom(pool_blocks(answer.blocks, incarnation, answer.allocation_id))
    if answer.remaining_s is not None:
        into.remaining.CopyFrom(duration(answer.remaining_s))


def put_freed(answer: Freed, into: pool_pb2.FreeBlocksResponse, _now: float, incarnation: int) -> None:
    into.freed_blocks.CopyFrom(pool_blocks(answer.freed, incarnation))


def put_reclaimed(answer: Reclaimed, into: pool_pb2.ReclaimBlocksResponse, _now: float, incarnation: int) -> None:
    into.reclaimed.CopyFrom(reclaimed(answer, incarnation))


def put_introduced(answer: Introduced, into: handshake_pb2.HandshakeResponse, _now: float, _incarnation: int) -> None:
    into.engine.CopyFrom(description.engine_to_proto(answer.engine))
    into.endpoints.extend([endpoint_to_proto(endpoint) for endpoint in answer.endpoints])
    into.protocol, into.proof = answer.protocol, answer.proof
    differences = compare(answer.engine, answer.peer)
    into.differences.extend([description.difference_to_proto(difference) for difference in differences])


def put_connected(_answer: PeerConnected, _into: Message, _now: float, _incarnation: int) -> None:
    """Fills in nothing: the RPC shows the peer as it is in the moment of its reply."""


def put_drain_changed(_answer: DrainChanged, _into: Message, _now: float, _incarnation: int) -> None:
    """Fills in nothing: the RPC shows the drain as it is in the moment of its reply."""


def put_quarantine_released(
    answer: QuarantineReleased, into: admin_pb2.ReleaseQuarantineResponse, _now: float, _incarnation: int
) -> None:
    into.released_block_count, into.left_block_count = answer.released, answer.left
    into.memory_generation = answer.memory_generation


def _put_transfer(value: Transfer | None, into: _WithTransfer, now: float) -> None:
    if value is not None:
        into.transfer.CopyFrom(transfer(value, now))


def _put_grant(token: bytes, into: _WithGrant) -> None:
    if token:
        into.grant.CopyFrom(grant(token))
