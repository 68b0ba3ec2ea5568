"""Answers of the core as replies. Each function fills in an empty reply, all but its header, as of `now`, in seconds on
the core's clock, in the life `incarnation` of the engine.
"""

from kvgrpc.core import actions
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.compatibility import compare
from kvgrpc.v1 import admin_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire import answers, description
from kvgrpc.wire.endpoints import endpoint_to_proto
from kvgrpc.wire.values import duration, grant, pool_blocks

_WithTransfer = (
    handoff_pb2.FinishedBlocksResponse
    | handoff_pb2.PullBlocksResponse
    | handoff_pb2.ReserveBlocksResponse
    | handoff_pb2.RegisterPushResponse
)
_WithGrant = handoff_pb2.FinishedBlocksResponse | handoff_pb2.ReserveBlocksResponse | lease_pb2.GrantLeaseResponse


def put_finished(
    answer: actions.HandedOver | actions.GaveUp | actions.PushExpected,
    into: handoff_pb2.FinishedBlocksResponse,
    now: float,
    incarnation: int,
) -> None:
    """Fills in the reply to FinishedBlocks. A hand-over that was only expected has nothing to tell."""
    match answer:
        case actions.HandedOver():
            into.lease.CopyFrom(answers.lease(answer.lease, incarnation))
            _put_transfer(answer.transfer, into, now)
            _put_grant(answer.token, into)
        case actions.GaveUp():
            _put_transfer(answer.transfer, into, now)


def put_pulling(answer: actions.PullStarted, into: handoff_pb2.PullBlocksResponse, now: float, _: int) -> None:
    """Fills in the reply to PullBlocks."""
    _put_transfer(answer.transfer, into, now)


def put_reserved(answer: actions.BlocksReserved, into: handoff_pb2.ReserveBlocksResponse, now: float, _: int) -> None:
    """Fills in the reply to ReserveBlocks."""
    _put_transfer(answer.transfer, into, now)
    _put_grant(answer.token, into)


def put_registered(answer: actions.Registered, into: handoff_pb2.RegisterPushResponse, now: float, _: int) -> None:
    """Fills in the reply to RegisterPush."""
    _put_transfer(answer.transfer, into, now)


def put_cancelled(answer: actions.Cancelled, into: transfer_pb2.CancelTransferResponse, now: float, _: int) -> None:
    """Fills in the reply to CancelTransfer."""
    into.outcome = answers.OUTCOMES[answer.outcome]
    into.transfers.extend([answers.transfer(transfer, now) for transfer in answer.transfers])


def put_acknowledged(
    answer: actions.Acknowledged, into: transfer_pb2.AcknowledgeTransfersResponse, _: float, __: int
) -> None:
    """Fills in the reply to AcknowledgeTransfers."""
    into.acknowledged_count = answer.count


def put_granted(answer: actions.HandedOver, into: lease_pb2.GrantLeaseResponse, _: float, incarnation: int) -> None:
    """Fills in the reply to GrantLease."""
    into.lease.CopyFrom(answers.lease(answer.lease, incarnation))
    _put_grant(answer.token, into)


def put_renewed(
    answer: actions.Renewed, into: lease_pb2.RenewLeasesResponse | lease_pb2.KeepAliveResponse, _: float, __: int
) -> None:
    """Fills in the reply to RenewLeases, or to a message of KeepAlive."""
    into.leases.extend(answers.renewed(answer))


def put_released(answer: actions.Released, into: lease_pb2.ReleaseLeaseResponse, _: float, incarnation: int) -> None:
    """Fills in the reply to ReleaseLease."""
    into.lease.CopyFrom(answers.lease(answer.lease, incarnation))
    into.freed_blocks.CopyFrom(pool_blocks(answer.freed, incarnation))


def put_allocated(answer: actions.Allocated, into: pool_pb2.AllocateBlocksResponse, _: float, incarnation: int) -> None:
    """Fills in the reply to AllocateBlocks. With `validate_only` no allocation was made, and there are no blocks."""
    if answer.allocation_id:
        into.blocks.CopyFrom(pool_blocks(answer.blocks, incarnation, answer.allocation_id))
    if answer.remaining_s is not None:
        into.remaining.CopyFrom(duration(answer.remaining_s))


def put_freed(answer: actions.Freed, into: pool_pb2.FreeBlocksResponse, _: float, incarnation: int) -> None:
    """Fills in the reply to FreeBlocks."""
    into.freed_blocks.CopyFrom(pool_blocks(answer.freed, incarnation))


def put_reclaimed(answer: actions.Reclaimed, into: pool_pb2.ReclaimBlocksResponse, _: float, incarnation: int) -> None:
    """Fills in the reply to ReclaimBlocks."""
    into.reclaimed.CopyFrom(answers.reclaimed(answer, incarnation))


def put_introduced(answer: actions.Introduced, into: handshake_pb2.HandshakeResponse, _: float, __: int) -> None:
    """Fills in the reply to Handshake."""
    into.engine.CopyFrom(description.engine_to_proto(answer.engine))
    into.endpoints.extend([endpoint_to_proto(endpoint) for endpoint in answer.endpoints])
    into.protocol, into.proof = answer.protocol, answer.proof
    differences = compare(answer.engine, answer.peer)
    into.differences.extend([description.difference_to_proto(difference) for difference in differences])


def put_connected(answer: actions.PeerConnected, into: handshake_pb2.ConnectPeerResponse, _: float, __: int) -> None:
    """Fills in the reply to ConnectPeer."""
    if answer.peer is not None:
        into.peer.CopyFrom(description.peer_to_proto(answer.peer))


def put_drained(answer: actions.Drained, into: admin_pb2.DrainResponse, _: float, __: int) -> None:
    """Fills in the reply to Drain, all but the admission state."""
    into.transfer_count, into.lease_count = answer.transfers, answer.leases
    into.quarantined_block_count, into.oldest_transfer_id = answer.quarantined_blocks, answer.oldest_transfer_id


def put_quarantine_released(
    answer: actions.QuarantineReleased, into: admin_pb2.ReleaseQuarantineResponse, _: float, __: int
) -> None:
    """Fills in the reply to ReleaseQuarantine."""
    into.released_block_count, into.left_block_count = answer.released, answer.left
    into.memory_generation = answer.memory_generation


def _put_transfer(transfer: Transfer | None, into: _WithTransfer, now: float) -> None:
    if transfer is not None:
        into.transfer.CopyFrom(answers.transfer(transfer, now))


def _put_grant(token: bytes, into: _WithGrant) -> None:
    if token:
        into.grant.CopyFrom(grant(token))
