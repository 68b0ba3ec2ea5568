"""The methods that ask the node: one row for each, whatever carries the call.

A row says how a request becomes the core's event, and how the core's answer is written into the reply. A unary RPC and
a call of an engine's session use the same row. The carrier adds what only it has: an RPC writes the reply's header and
waits for the transfer, a session writes the call's id.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import Message

from kvgrpc.core import events
from kvgrpc.core.events import Call, Event
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import KVGrpcError
from kvgrpc.service.audit import AUDITED
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import CONNECTION
from kvgrpc.service.runner import wall_us
from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire import answers, description, requests
from kvgrpc.wire.endpoints import endpoints_from_proto
from kvgrpc.wire.proofs import new_proof, proof

_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Method(Generic[_Request, _Answer, _Reply]):
    """One method: its name, the type of its reply, and both conversions. `to_event` raises KVGrpcError. `put_reply` is
    of `kvgrpc.wire.answers`.
    """

    name: str
    reply: type[_Reply]
    to_event: Callable[[Lead, _Request, Call], Event]
    put_reply: Callable[[_Answer, _Reply, float, int], None]


async def ask(
    method: Method[_Request, _Answer, Any], lead: Lead, request: _Request, trace: str
) -> tuple[common_pb2.ResponseHeader, _Answer]:
    """Asks the node as the RPC's caller. Returns the answer with the header of that moment: before this task runs again
    there may be later changes, or another life. Raises KVGrpcError.
    """
    runner = lead.runner
    call = requests.make_call(
        runner.next_call_id(), PRINCIPAL.get(), trace, method.name, request, CONNECTION.get(), wall_us=wall_us()
    )
    try:
        event, header = method.to_event(lead, request, call), lead.header()
        reply = await runner.ask(call.id, event)
    except KVGrpcError as error:
        lead.audit.heard(method.name, request, call.principal, call.connection, error)
        raise
    except asyncio.CancelledError:  # the node goes on with what the caller has asked for
        lead.audit.heard(method.name, request, call.principal, call.connection)
        raise
    if method.name in AUDITED:
        lead.audit.heard(method.name, request, call.principal, call.connection)
    header.event_seq = reply.event_seq
    return header, cast("_Answer", reply.answer)  # the core answers each event with an answer of its own kind


async def reply_to(method: Method[_Request, Any, _Reply], lead: Lead, request: _Request, trace: str) -> _Reply:
    """Asks the node as `ask` does, and returns the reply. Raises KVGrpcError."""
    header, answer = await ask(method, lead, request, trace)
    return reply_of(method, lead, header, answer)


def reply_of(
    method: Method[Any, _Answer, _Reply], lead: Lead, header: common_pb2.ResponseHeader, answer: _Answer
) -> _Reply:
    """Returns the reply that has an answer, in the life that the header names."""
    made = method.reply(header=header)
    method.put_reply(answer, made, lead.runner.time(), header.incarnation)
    return made


def _plain(convert: Callable[[_Request, Call], Event]) -> Callable[[Lead, _Request, Call], Event]:
    return lambda _, request, call: convert(request, call)


def _counted(convert: Callable[[_Request, Call, int], Event]) -> Callable[[Lead, _Request, Call], Event]:
    """Returns a conversion of a request with at most `block_limit` blocks."""
    return lambda lead, request, call: convert(request, call, lead.block_limit)


def _of_content(convert: Callable[[_Request, Call, str, int], Event]) -> Callable[[Lead, _Request, Call], Event]:
    """Returns a conversion of a request that states a content of this engine's weights, and blocks for it."""
    return lambda lead, request, call: convert(request, call, lead.weights, lead.block_limit)


def _renewal(lead: Lead, request: lease_pb2.RenewLeasesRequest | lease_pb2.KeepAliveRequest, call: Call) -> Event:
    return requests.renew_leases(request, call, lead.renewal_limit)


def _handshake(lead: Lead, request: handshake_pb2.HandshakeRequest, call: Call) -> Event:
    lead.engine_ids.check(request.engine.engine_id)
    peer = description.engine_from_proto(request.engine, "engine")
    endpoints = endpoints_from_proto(request.endpoints)
    shows, proofs = proof("proof", request.proof), tuple(request.proofs)
    return events.HandshakeReceived(call, peer, endpoints, request.expected_engine_id, shows, new_proof(), proofs)


def _connect_peer(_: Lead, request: handshake_pb2.ConnectPeerRequest, call: Call) -> Event:
    return events.ConnectPeer(call, request.peer.address, request.peer.engine_id, request.validate_only)


FINISHED_BLOCKS = Method(
    "FinishedBlocks", handoff_pb2.FinishedBlocksResponse, _of_content(requests.finished_blocks), answers.put_finished
)
PULL_BLOCKS = Method(
    "PullBlocks", handoff_pb2.PullBlocksResponse, _of_content(requests.pull_blocks), answers.put_pulling
)
RESERVE_BLOCKS = Method(
    "ReserveBlocks", handoff_pb2.ReserveBlocksResponse, _of_content(requests.reserve_blocks), answers.put_reserved
)
REGISTER_PUSH = Method(
    "RegisterPush", handoff_pb2.RegisterPushResponse, _plain(requests.register_push), answers.put_registered
)
CANCEL_TRANSFER = Method(
    "CancelTransfer", transfer_pb2.CancelTransferResponse, _plain(requests.cancel_transfer), answers.put_cancelled
)
ACKNOWLEDGE_TRANSFERS = Method(
    "AcknowledgeTransfers",
    transfer_pb2.AcknowledgeTransfersResponse,
    _plain(requests.acknowledge),
    answers.put_acknowledged,
)
GRANT_LEASE = Method("GrantLease", lease_pb2.GrantLeaseResponse, _of_content(requests.grant_lease), answers.put_granted)
RENEW_LEASES = Method("RenewLeases", lease_pb2.RenewLeasesResponse, _renewal, answers.put_renewed)
KEEP_ALIVE = Method("RenewLeases", lease_pb2.KeepAliveResponse, _renewal, answers.put_renewed)
RELEASE_LEASE = Method(
    "ReleaseLease", lease_pb2.ReleaseLeaseResponse, _plain(requests.release_lease), answers.put_released
)
ALLOCATE_BLOCKS = Method(
    "AllocateBlocks", pool_pb2.AllocateBlocksResponse, _plain(requests.allocate_blocks), answers.put_allocated
)
FREE_BLOCKS = Method("FreeBlocks", pool_pb2.FreeBlocksResponse, _counted(requests.free_blocks), answers.put_freed)
RECLAIM_BLOCKS = Method(
    "ReclaimBlocks", pool_pb2.ReclaimBlocksResponse, _plain(requests.reclaim_blocks), answers.put_reclaimed
)
START_DRAIN = Method(
    "StartDrain", admin_pb2.StartDrainResponse, _plain(requests.start_drain), answers.put_drain_changed
)
CANCEL_DRAIN = Method(
    "CancelDrain", admin_pb2.CancelDrainResponse, _plain(requests.cancel_drain), answers.put_drain_changed
)
RELEASE_QUARANTINE = Method(
    "ReleaseQuarantine",
    admin_pb2.ReleaseQuarantineResponse,
    _plain(requests.release_quarantine),
    answers.put_quarantine_released,
)
HANDSHAKE = Method("Handshake", handshake_pb2.HandshakeResponse, _handshake, answers.put_introduced)
CONNECT_PEER = Method("ConnectPeer", handshake_pb2.ConnectPeerResponse, _connect_peer, answers.put_connected)
