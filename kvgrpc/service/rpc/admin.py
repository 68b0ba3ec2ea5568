"""AdminService: the state of the server, its peers, and the owners of pins."""

import logging
import time

from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.lacking_requests import LackingRequest
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.ledger import Ledger, LedgerShare
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.owners import tenant_of
from kvgrpc.errors import invalid, note
from kvgrpc.service import telemetry
from kvgrpc.service.admission import admission
from kvgrpc.service.audit import AuditRecord
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.identity.gate import CALLER
from kvgrpc.service.identity.tenants import sees, tenant_of_pin
from kvgrpc.service.lead import Lead
from kvgrpc.service.methods import CANCEL_DRAIN, RELEASE_QUARANTINE, START_DRAIN, ask, reply_to
from kvgrpc.service.places import CONNECTION
from kvgrpc.service.rpc import allocations, drains, pins, spans
from kvgrpc.service.rpc.method import unary
from kvgrpc.service.rpc.pages import PAGE_SIZE, PAGE_SIZE_MAX, page
from kvgrpc.v1 import admin_pb2, admin_pb2_grpc, pool_pb2
from kvgrpc.wire.description import peer_to_proto
from kvgrpc.wire.values import duration

LARGEST_CALLERS = 8
"""Maximum number of callers that GetStatus names."""
_log = logging.getLogger(__name__)
READERS_SHOWN_MAX = 16


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Reads the node's state, drains the server, and releases quarantined memory."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def GetStatus(self, request: admin_pb2.GetStatusRequest, trace: str) -> admin_pb2.GetStatusResponse:
        lead = self._lead
        lead.runner.advance()
        state, now = lead.runner.node.state, lead.runner.time()
        open_to, why = admission(lead)
        oldest = next((transfer for transfer in state.transfers.unfinished() if sees(transfer.tenant)), None)
        claims = (pair for pair in lead.runner.node.weak_claims.waiting() if sees(pair[0].tenant))
        waiting = sorted(claims, key=lambda pair: pair[1].since)
        return admin_pb2.GetStatusResponse(
            header=lead.header(),
            admission=open_to,
            admission_reason=why,
            uptime=duration(now - state.life.began),
            engine_attached=state.life.attached,
            counts=_counts(lead),
            oldest_transfer_id=oldest.id if oldest else "",
            oldest_transfer_age=duration(now - oldest.created) if oldest else None,
            progress_age=duration(lead.progress_age_s()),
            version=lead.version,
            kept=_kept(state.ledger),
            lacking_requests=[_lacking(row, now) for row in state.send.lacking.rows(now) if sees("")],
            waiting_readers=[
                _waiting(lead.runner.node, lease, access, now) for lease, access in waiting[:READERS_SHOWN_MAX]
            ],
            waiting_reader_count=len(waiting),
            publication=_publication(lead),
        )

    @unary
    async def ListPeers(self, request: admin_pb2.ListPeersRequest, trace: str) -> admin_pb2.ListPeersResponse:
        lead = self._lead
        lead.runner.advance()
        state = lead.runner.node.state
        newest_first = reversed(state.peers.lives.values())
        found = page(
            lead,
            request,
            (peer for peer in newest_first if sees(lead.engine_ids.tenant(peer.description.engine_id))),
            lambda peer: (state.life.began - peer.since, peer.key),
            lambda peer: peer_to_proto(peer, state.now, lead.runner.node.open_accesses(peer)),
            ordered=True,
        )
        return admin_pb2.ListPeersResponse(header=found.header, peers=found.rows, next_page_token=found.next_page_token)

    @unary
    async def ListPins(self, request: admin_pb2.ListPinsRequest, trace: str) -> admin_pb2.ListPinsResponse:
        lead = self._lead
        lead.runner.advance()
        state = lead.runner.node.state
        found_pins, held = iter(state.pool.pins), list[allocations.Row]()
        if request.HasField("block"):
            held = allocations.holding(state, request.block.group, request.block.block, "block.")
            found_pins = iter(state.pool.pins.of_block(request.block.group, request.block.block))
        held = [row for row in held if sees(tenant_of(row[1].owner))]
        found = page(
            lead,
            request,
            (pin for pin in found_pins if sees(tenant_of_pin(state, pin))),
            lambda pin: (pin.since - state.life.began, f"{pin.owner} {pin.kind.value}"),
            lambda pin: pins.message(lead.runner.node, pin, lead.runner.time()),
            ordered=True,
        )
        return admin_pb2.ListPinsResponse(
            header=found.header,
            pins=found.rows,
            next_page_token=found.next_page_token,
            allocations=[allocations.message(lead, row) for row in held],
        )

    @unary
    async def StartDrain(self, request: admin_pb2.StartDrainRequest, trace: str) -> admin_pb2.StartDrainResponse:
        await ask(START_DRAIN, self._lead, request, trace)
        return admin_pb2.StartDrainResponse(header=self._lead.header(), drain=drains.message(self._lead, PAGE_SIZE))

    @unary
    async def CancelDrain(self, request: admin_pb2.CancelDrainRequest, trace: str) -> admin_pb2.CancelDrainResponse:
        await ask(CANCEL_DRAIN, self._lead, request, trace)
        return admin_pb2.CancelDrainResponse(header=self._lead.header(), drain=drains.message(self._lead, PAGE_SIZE))

    @unary
    async def GetDrain(self, request: admin_pb2.GetDrainRequest, trace: str) -> admin_pb2.GetDrainResponse:
        self._lead.runner.advance()
        most = min(request.page_size or PAGE_SIZE, PAGE_SIZE_MAX)
        return admin_pb2.GetDrainResponse(header=self._lead.header(), drain=drains.message(self._lead, most))

    @unary
    async def ReleaseQuarantine(
        self, request: admin_pb2.ReleaseQuarantineRequest, trace: str
    ) -> admin_pb2.ReleaseQuarantineResponse:
        reply = await reply_to(RELEASE_QUARANTINE, self._lead, request, trace)
        if request.force:
            released, why = reply.released_block_count, note(request.message)
            _log.warning("%d blocks left quarantine at an operator's word: %s", released, why)
        return reply

    @unary
    async def ListAuditRecords(
        self, request: admin_pb2.ListAuditRecordsRequest, trace: str
    ) -> admin_pb2.ListAuditRecordsResponse:
        now = time.monotonic()
        found = page(
            self._lead,
            request,
            [record for record in self._lead.audit if sees(tenant_of(record.caller))],
            lambda record: (-float(record.number), ""),
            lambda record: _audited(record, now),
        )
        return admin_pb2.ListAuditRecordsResponse(
            header=found.header, records=found.rows, next_page_token=found.next_page_token
        )

    @unary
    async def ListSpans(self, request: admin_pb2.ListSpansRequest, trace: str) -> admin_pb2.ListSpansResponse:
        ring = telemetry.ring()
        found = page(
            self._lead,
            request,
            spans.asked_for(ring, self._lead.runner.node.state.transfers, request, CALLER.get().tenant),
            lambda row: (float(row.number), ""),
            spans.message,
        )
        return admin_pb2.ListSpansResponse(
            header=found.header,
            spans=found.rows,
            next_page_token=found.next_page_token,
            span_count_max=ring.spans_max if ring is not None else 0,
        )

    @unary
    async def ForgetEngine(self, request: admin_pb2.ForgetEngineRequest, trace: str) -> admin_pb2.ForgetEngineResponse:
        if not request.engine_id:
            raise invalid("engine_id", "is required")
        ids = self._lead.engine_ids
        identity = ids.forget(request.engine_id) if sees(ids.tenant(request.engine_id)) else ""
        self._lead.audit.heard("ForgetEngine", request, PRINCIPAL.get(), CONNECTION.get())
        return admin_pb2.ForgetEngineResponse(header=self._lead.header(), identity=identity)


def _audited(record: AuditRecord, now: float) -> admin_pb2.AuditRecord:
    return admin_pb2.AuditRecord(
        number=record.number,
        age=duration(now - record.at),
        caller=record.caller,
        connection=record.connection,
        method=record.method,
        target=record.target,
        outcome=record.outcome,
        message=record.message,
    )


def _kept(ledger: Ledger) -> admin_pb2.Kept:
    by_share, limits = ledger.by_share, ledger.limits
    return admin_pb2.Kept(
        total_bytes=ledger.total,
        caller_bytes=by_share[LedgerShare.CALLERS],
        caller_bytes_max=limits.kept_bytes,
        peer_bytes=by_share[LedgerShare.PEERS],
        engine_bytes=by_share[LedgerShare.ENGINE],
        engine_bytes_max=limits.engine_kept_bytes,
        one_caller_bytes_max=limits.kept_bytes_per_caller,
        bytes_by_kind={kind.value: nbytes for kind, nbytes in ledger.by_kind.items() if nbytes},
        largest_callers=[
            admin_pb2.KeptByCaller(caller=caller, kept_bytes=nbytes)
            for caller, nbytes in ledger.largest(LARGEST_CALLERS)
            if sees(tenant_of(caller))
        ],
    )


def _publication(lead: Lead) -> admin_pb2.Publication | None:
    entry = lead.publication
    if entry is None or not entry.used:
        return None
    return admin_pb2.Publication(
        registry=lead.config.fleet.registry, published=entry.published, failure=note(entry.failure)
    )


def _counts(lead: Lead) -> admin_pb2.Counts:
    node, state = lead.runner.node, lead.runner.node.state
    counts = state.transfers.counts
    group_of_space = {space: group for group, space in enumerate(state.pool.pins.spaces)}
    return admin_pb2.Counts(
        pending_transfer_count=counts[State.PENDING],
        active_transfer_count=counts[State.ACTIVE],
        succeeded_transfer_count=counts[State.SUCCEEDED],
        failed_transfer_count=counts[State.FAILED],
        cancelled_transfer_count=counts[State.CANCELLED],
        lease_count=len(state.send.leases),
        open_access_count=sum(map(node.open_accesses, state.peers.lives.values())),
        pinned_block_count=sum(int(state.pool.pins.pinned_mask(group).sum()) for group in group_of_space.values()),
        quarantined_block_count=sum(state.pool.pins.quarantined),
        received_bytes=state.moves.bytes_received,
        defect_count=lead.runner.defects,
        reclaimed_lease_count=state.send.soft_leases.reclaimed,
        reclaimed_in_vain_count=state.send.soft_leases.reclaimed_in_vain,
        reclaimed_claim_count=state.send.soft_leases.reclaimed_claims,
        denied_call_count=lead.gate.denied.total(),
    )


def _lacking(row: LackingRequest, now: float) -> admin_pb2.LackingRequest:
    return admin_pb2.LackingRequest(
        request_id=row.by.request_id,
        request_time_us=row.by.time_us,
        age=duration(now - row.since),
        group_block_counts=[
            pool_pb2.GroupBlockCount(group=group, block_count=count) for group, count in row.counts.items()
        ],
    )


def _waiting(node: Node, lease: Lease, access: Access, now: float) -> admin_pb2.WaitingReader:
    began = node.weak_claims.time_of(lease, access)
    return admin_pb2.WaitingReader(
        lease_id=lease.id,
        block_count=sum(map(len, lease.blocks)),
        engine_id=access.consumer,
        request_id=began.request_id,
        request_time_us=began.time_us,
        age=duration(now - access.since),
    )
