"""Conversion of requests of the public API to the core's events.

A request has passed `fields.check`, which bounds rows, texts and numbers. Limits of this server are checked here.
"""

import hashlib
import os
from collections.abc import Sequence

from google.protobuf.message import Message

from kvgrpc.core import events
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.request_times import RequestTime
from kvgrpc.errors import invalid, note
from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire.bounds import GROUPS_MAX, IDS_MAX, NAMES_MAX, check_count, text
from kvgrpc.wire.enums import numbers
from kvgrpc.wire.values import claims_of, content, layer_range, lists_of, on_abort, seconds, timeout_s

CONSUMERS_MAX = 1024
_SCOPES = {int(number): scope for scope, number in numbers(transfer_pb2.CancelScope, events.CancelScope).items()}
LABELS_MAX = 16
LABEL_BYTES_MAX = 64
GIVEN_LATER = frozenset(
    {"idempotency_key", "transfer_id", "destination", "transfer_key", "after_step", "validate_only", "wait"}
)
"""Fields that a pull by transfer id may have."""


def make_call(  # noqa: PLR0913 - the fields of a call
    call_id: int,
    principal: str,
    trace: str,
    method: str,
    request: Message,
    connection: str = "",
    *,
    proof: bytes = b"",
    wall_us: int = 0,
) -> events.Call:
    """Returns the call of a request. With an idempotency key, the call has the key and a digest of the rest."""
    life = _life(request)
    key = getattr(request, "idempotency_key", "")
    if not key:
        return events.Call(
            call_id, principal, trace, incarnation=life, connection=connection, proof=proof, wall_us=wall_us
        )
    body = hashlib.sha256(_effect(request).SerializeToString(deterministic=True)).digest()
    return events.Call(call_id, principal, trace, key, method, body, life, connection, proof=proof, wall_us=wall_us)


def _effect(request: Message) -> Message:
    """Returns a request without its `wait`, which says how long the caller waits and not what the request does."""
    if "wait" not in request.DESCRIPTOR.fields_by_name or not request.HasField("wait"):
        return request
    found = type(request)()
    found.CopyFrom(request)
    found.ClearField("wait")
    return found


def finished_blocks(
    request: handoff_pb2.FinishedBlocksRequest, call: events.Call, weights: str, limit: int
) -> events.FinishedBlocks:
    """Converts FinishedBlocks: a whole prompt for readers, or one part of a push."""
    job = request.WhichOneof("job")
    if job is None:
        raise invalid("job", "is required: for_readers, part, failure or expected")
    if job == "expected":
        return events.FinishedBlocks(
            call, request.transfer_key, (), None, validate_only=request.validate_only, expected=True
        )
    if job == "failure":
        return events.FinishedBlocks(
            call=call,
            key=request.transfer_key,
            blocks=(),
            content=None,
            validate_only=request.validate_only,
            waits_for=events.WaitsFor.REGISTRATION,
            failure=note(request.failure.message) or "the source cannot deliver",
        )
    part = request.part if job == "part" else None
    said = part or request.for_readers
    return events.FinishedBlocks(
        call=call,
        key=request.transfer_key,
        blocks=lists_of(f"{job}.blocks", said.blocks, limit),
        content=content(said.content, weights),
        ttl_s=seconds(said, "ttl"),
        consumers=consumers(said.consumer_count),
        on_abort=on_abort(said.on_abort),
        request_id=request.request_id,
        priority=said.priority,
        after_step=said.after_step,
        lease_id=said.lease_id,
        validate_only=request.validate_only,
        waits_for=events.WaitsFor.REGISTRATION if part is not None else events.WaitsFor.READERS,
        last=part is None or part.last,
        layers=None if part is None else layer_range(part),
        part_epoch=0 if part is None else part.part_epoch,
        allocation_id=said.blocks.allocation_id,
        firm_ttl_s=seconds(said, "firm_ttl"),
        request_time_us=0 if part is not None else request.for_readers.request_time_us,
        tenant="" if part is not None else request.for_readers.tenant,
        bound_to="" if part is not None else request.for_readers.bound_to,
        findable=part is None and request.for_readers.findable,
        takes_registrations=part is None and request.for_readers.takes_registrations,
    )


def register_push(request: handoff_pb2.RegisterPushRequest, call: events.Call) -> events.RegisterPush:
    if not request.HasField("grant"):
        raise invalid("grant", "is required: the WRITE grant of ReserveBlocks")
    return events.RegisterPush(
        call=call,
        token=request.grant.token,
        request_id=request.request_id,
        access_id=os.urandom(ACCESS_ID_BYTES),
        reverse_access_id=os.urandom(ACCESS_ID_BYTES),
        validate_only=request.validate_only,
    )


def reserve_blocks(
    request: handoff_pb2.ReserveBlocksRequest, call: events.Call, weights: str, limit: int
) -> events.ReserveBlocks:
    source = None
    if request.HasField("source"):
        if not request.source.address:
            raise invalid("source.address", "is required where a source is named")
        source = push_source(request.source)
    return events.ReserveBlocks(
        call=call,
        key=request.transfer_key,
        blocks=lists_of("blocks", request.blocks, limit),
        content=content(request.content, weights, also_at=request.use_tokens),
        have_tokens=request.have_tokens,
        use_tokens=request.use_tokens,
        source=source,
        request_id=request.request_id,
        priority=request.priority,
        after_step=request.after_step,
        registration_timeout_s=timeout_s(request, "registration_timeout"),
        validate_only=request.validate_only,
        allocation_id=request.blocks.allocation_id,
        allow_prefix=request.allow_prefix,
    )


def grant_lease(
    request: lease_pb2.GrantLeaseRequest, call: events.Call, weights: str, limit: int
) -> events.FinishedBlocks:
    """Converts GrantLease to a hand-over without a transfer."""
    if len(request.labels) > LABELS_MAX:
        raise invalid("labels", f"at most {LABELS_MAX} labels of at most {LABEL_BYTES_MAX} bytes each side")
    labels = tuple(sorted(request.labels.items()))
    for pair in labels:
        for side in pair:
            text("labels", side, LABEL_BYTES_MAX)
    return events.FinishedBlocks(
        call=call,
        key=request.transfer_key or os.urandom(16),
        blocks=lists_of("blocks", request.blocks, limit),
        content=content(request.content, weights),
        ttl_s=seconds(request, "ttl"),
        consumers=consumers(request.consumer_count),
        on_abort=on_abort(request.on_abort),
        request_id=request.request_id,
        validate_only=request.validate_only,
        transfer=False,
        labels=labels,
        allocation_id=request.blocks.allocation_id,
        firm_ttl_s=seconds(request, "firm_ttl"),
        request_time_us=request.request_time_us,
        tenant=request.tenant,
        bound_to=request.bound_to,
        findable=request.findable,
    )


def pull_blocks(
    request: handoff_pb2.PullBlocksRequest, call: events.Call, weights: str, limit: int
) -> events.PullBlocks | events.GiveDestination:
    """Converts PullBlocks with a grant, or by transfer id."""
    destination = None
    if request.HasField("destination"):
        lists = lists_of("destination.blocks", request.destination.blocks, limit)
        blocks = request.destination.blocks
        destination = events.Destination(lists, request.destination.have_tokens, blocks.allocation_id)
    if request.WhichOneof("pull") == "transfer_id":
        return _give_destination(request, call, destination)
    if not request.HasField("grant"):
        raise invalid("grant", "name a grant, or the transfer_id of an earlier pull")
    offer = claims_of(request.grant).token_count
    return events.PullBlocks(
        call=call,
        token=request.grant.token,
        content=content(request.content, weights, also_at=request.use_tokens or offer),
        access_id=os.urandom(ACCESS_ID_BYTES),
        use_tokens=request.use_tokens,
        destination=destination,
        key=request.transfer_key,
        request_id=request.request_id,
        priority=request.priority,
        after_step=request.after_step,
        queue_timeout_s=timeout_s(request, "queue_timeout"),
        transfer_timeout_s=timeout_s(request, "transfer_timeout"),
        validate_only=request.validate_only,
        request_time_us=request.request_time_us,
        allow_prefix=request.allow_prefix,
    )


def _give_destination(
    request: handoff_pb2.PullBlocksRequest, call: events.Call, destination: events.Destination | None
) -> events.GiveDestination:
    if destination is None:
        raise invalid("destination", "is what a pull by transfer id gives")
    for field, _ in request.ListFields():
        if field.name not in GIVEN_LATER:
            raise invalid(field.name, "is settled since the pull was made with its grant: leave it out")
    return events.GiveDestination(
        call, request.transfer_id, destination, request.after_step, request.validate_only, request.transfer_key
    )


def lease_ref(value: lease_pb2.LeaseRef, *, keys: bool = False) -> events.LeaseRef:
    """Returns a reference to a lease by id or grant or, with `keys`, by transfer key."""
    lease_id = value.lease_id
    if keys and value.transfer_key:
        return events.LeaseRef(key=value.transfer_key)
    if lease_id:
        return events.LeaseRef(lease_id)
    if not value.HasField("grant"):
        raise invalid("leases" if keys else "lease", f"name a lease_id{', a transfer_key' if keys else ''} or a grant")
    return events.LeaseRef("", value.grant.token)


def renew_leases(
    request: lease_pb2.RenewLeasesRequest | lease_pb2.KeepAliveRequest, call: events.Call, limit: int
) -> events.RenewLeases:
    """Converts RenewLeases and KeepAlive, of at most `limit` leases."""
    check_count("leases", len(request.leases), limit)
    refs = tuple(lease_ref(ref, keys=True) for ref in request.leases)
    ttl_s = seconds(request, "ttl")
    if isinstance(request, lease_pb2.KeepAliveRequest):
        return events.RenewLeases(call, refs, ttl_s)
    reading = tuple(request.reading_access_ids) if request.for_access else ()
    check_count("reading_access_ids", len(reading), limit)
    source = push_source(request.source) if request.HasField("source") else None
    if source is not None and not source.address:
        raise invalid("source.address", "is required where a source is named")
    only = request.validate_only
    return events.RenewLeases(
        call, refs, ttl_s, for_access=request.for_access, validate_only=only, reading=reading, source=source
    )


def release_lease(request: lease_pb2.ReleaseLeaseRequest, call: events.Call) -> events.ReleaseLease:
    return events.ReleaseLease(call, lease_ref(request.lease), request.validate_only)


def cancel_transfer(request: transfer_pb2.CancelTransferRequest, call: events.Call) -> events.CancelTransfer:
    check_count("free_allocation_ids", len(request.free_allocation_ids), NAMES_MAX)
    return events.CancelTransfer(
        call,
        request.transfer_id,
        request.transfer_key,
        note(request.message),
        _SCOPES.get(request.scope, events.CancelScope.BOTH),
        tuple(request.free_allocation_ids),
        request.validate_only,
    )


def release_quarantine(request: admin_pb2.ReleaseQuarantineRequest, call: events.Call) -> events.ReleaseQuarantine:
    check_count("transfer_ids", len(request.transfer_ids), IDS_MAX)
    return events.ReleaseQuarantine(
        call, request.force, tuple(request.transfer_ids), note(request.message), request.validate_only
    )


def start_drain(request: admin_pb2.StartDrainRequest, call: events.Call) -> events.StartDrain:
    return events.StartDrain(call, note(request.reason), request.validate_only)


def cancel_drain(request: admin_pb2.CancelDrainRequest, call: events.Call) -> events.CancelDrain:
    return events.CancelDrain(call, request.validate_only)


def acknowledge(request: transfer_pb2.AcknowledgeTransfersRequest, call: events.Call) -> events.AcknowledgeTransfers:
    check_count("transfer_ids", len(request.transfer_ids), IDS_MAX)
    return events.AcknowledgeTransfers(call, tuple(request.transfer_ids), request.validate_only)


def allocate_blocks(request: pool_pb2.AllocateBlocksRequest, call: events.Call) -> events.AllocateBlocks:
    counts = block_counts(request.group_block_counts)
    ttl_s = seconds(request, "ttl")
    return events.AllocateBlocks(
        call,
        counts,
        ttl_s,
        request.allocation_id,
        request.no_expiry,
        request.reclaim,
        request.validate_only,
        _by(request),
        request.request_id,
        request.label,
    )


def reclaim_blocks(request: pool_pb2.ReclaimBlocksRequest, call: events.Call) -> events.ReclaimBlocks:
    counts = block_counts(request.group_block_counts)
    return events.ReclaimBlocks(call, counts, request.validate_only, _by(request))


def _by(request: pool_pb2.AllocateBlocksRequest | pool_pb2.ReclaimBlocksRequest) -> RequestTime | None:
    """Returns the time and id of the request for which blocks are needed; None if it states no time."""
    request_id = request.request_id
    return RequestTime(request.request_time_us, request_id) if request.request_time_us else None


def block_counts(rows: Sequence[pool_pb2.GroupBlockCount]) -> tuple[tuple[int, int], ...]:
    """Returns the number of blocks per group."""
    check_count("group_block_counts", len(rows), GROUPS_MAX)
    return tuple((row.group, row.block_count) for row in rows)


def free_blocks(request: pool_pb2.FreeBlocksRequest, call: events.Call, limit: int) -> events.FreeBlocks:
    freed = request.WhichOneof("freed")
    if freed is None:
        raise invalid("freed", "is required: blocks, or the allocation_id of all of them")
    if freed == "allocation_id":
        return events.FreeBlocks(call, allocation_id=request.allocation_id, validate_only=request.validate_only)
    lists = lists_of("blocks", request.blocks, limit)
    if not lists:  # for the core, no lists mean the whole allocation
        raise invalid(
            "blocks.groups", "is required: which; `allocation_id` in place of `blocks` frees all that is left"
        )
    return events.FreeBlocks(call, lists, request.blocks.allocation_id, request.validate_only)


def _life(request: Message) -> int:
    """Returns the incarnation whose blocks a request names, or for which it is meant; 0 if it states none."""
    match request:
        case handoff_pb2.PullBlocksRequest():
            return request.destination.blocks.incarnation
        case handoff_pb2.FinishedBlocksRequest():
            job = request.WhichOneof("job")
            return getattr(request, job).blocks.incarnation if job in ("part", "for_readers") else 0
        case handoff_pb2.ReserveBlocksRequest() | lease_pb2.GrantLeaseRequest() | pool_pb2.FreeBlocksRequest():
            return request.blocks.incarnation
    life: int = getattr(request, "incarnation", 0)
    return life


def consumers(value: int) -> int:
    """Returns the number of consumers; 1 if it is not stated. Raises InvalidRequest for too many."""
    if value > CONSUMERS_MAX:
        raise invalid("consumer_count", f"at most {CONSUMERS_MAX}")
    return value or 1


def push_source(value: common_pb2.PeerAddress) -> events.PushSource:
    return events.PushSource(value.address, value.engine_id)
