"""TransferService: follows and ends transfers."""

from collections.abc import AsyncIterator, Callable

from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.owners import Ground, Verb
from kvgrpc.errors import Aborted, Reason, invalid
from kvgrpc.service.callers import PRINCIPAL, payer
from kvgrpc.service.identity.gate import CALLER
from kvgrpc.service.lead import Lead
from kvgrpc.service.methods import ACKNOWLEDGE_TRANSFERS, CANCEL_TRANSFER, reply_to
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.service.rpc.waits import condition, timeout_s, wait_of
from kvgrpc.service.watchers import WAITED_MAX
from kvgrpc.v1 import transfer_pb2, transfer_pb2_grpc
from kvgrpc.wire import answers
from kvgrpc.wire.bounds import NAMES_MAX, check_count
from kvgrpc.wire.values import seconds


class TransferService(transfer_pb2_grpc.TransferServiceServicer):
    """Converts a request, asks the node, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def GetTransfer(
        self, request: transfer_pb2.GetTransferRequest, trace: str
    ) -> transfer_pb2.GetTransferResponse:
        lead = self._lead
        lead.runner.advance()
        found = lead.runner.node.state.transfers.get_for(PRINCIPAL.get(), Verb.SEE, request.transfer_id, Ground.NAME)
        return transfer_pb2.GetTransferResponse(
            header=lead.header(), transfer=answers.transfer(found, lead.runner.time())
        )

    @unary
    async def WaitTransfer(
        self, request: transfer_pb2.WaitTransferRequest, trace: str
    ) -> transfer_pb2.WaitTransferResponse:
        lead = self._lead
        wait = wait_of(request, lead)
        header = lead.header()  # before the wait: of the transfer's life, even if another begins meanwhile
        found, met = await wait.ended(lead, request.transfer_id, header)
        return transfer_pb2.WaitTransferResponse(
            header=header, transfer=answers.transfer(found, lead.runner.time()), condition_met=met
        )

    @unary
    async def WaitTransfers(
        self, request: transfer_pb2.WaitTransfersRequest, trace: str
    ) -> transfer_pb2.WaitTransfersResponse:
        lead = self._lead
        if not request.transfer_ids:
            raise invalid("transfer_ids", "is required: the transfers to wait for")
        check_count("transfer_ids", len(request.transfer_ids), WAITED_MAX)
        wanted = list(dict.fromkeys(request.transfer_ids))
        least = 1 if request.wait_for == transfer_pb2.WAIT_FOR_ANY else len(wanted)
        done = condition(request.until)
        header = lead.header()  # before the wait: of the transfers' life, even if another begins meanwhile
        found = await lead.watchers.wait_many(wanted, done, least, timeout_s(request, lead.config.limits.wait_s))
        met = {id_: transfer is None or done(transfer) for id_, transfer in found.items()}
        reply = transfer_pb2.WaitTransfersResponse(header=header, condition_met=sum(met.values()) >= least)
        now = lead.runner.time()
        for id_, transfer in found.items():
            row = reply.waited_transfers.add(transfer_id=id_, condition_met=met[id_])
            if transfer is not None:
                row.transfer.CopyFrom(answers.transfer(transfer, now))
                row.transfer.ClearField("paths")
                header.event_seq = max(header.event_seq, transfer.seq)
        reply.header.CopyFrom(header)
        return reply

    @unary
    async def ListTransfers(
        self, request: transfer_pb2.ListTransfersRequest, trace: str
    ) -> transfer_pb2.ListTransfersResponse:
        lead = self._lead
        lead.runner.advance()
        wanted = _filter(request.filter, lead.runner.time)
        state = lead.runner.node.state
        found = page(
            lead,
            request,
            filter(wanted, state.transfers),
            lambda transfer: (state.life.began - transfer.created, transfer.id),
            lambda transfer: answers.transfer(transfer, lead.runner.time()),
            ordered=True,
        )
        return transfer_pb2.ListTransfersResponse(
            header=found.header, transfers=found.rows, next_page_token=found.next_page_token
        )

    @streaming
    async def WatchTransfers(
        self, request: transfer_pb2.WatchTransfersRequest, trace: str
    ) -> AsyncIterator[transfer_pb2.WatchTransfersResponse]:
        lead = self._lead
        lead.runner.advance()
        state = lead.runner.node.state
        resumed = bool(request.after_event_seq or request.incarnation)
        backlog: list[Transfer] | None = []
        if resumed:
            if not request.incarnation:
                raise invalid("incarnation", "is required with after_event_seq: the life that the number is of")
            if request.incarnation != state.life.incarnation:
                raise Aborted(
                    Reason.INCARNATION_CHANGED, "that sequence number belongs to an earlier life of this engine"
                )
            if request.after_event_seq > state.transfers.seq:
                raise invalid("after_event_seq", f"has not been reached: the last change has {state.transfers.seq}")
            backlog = state.transfers.changes_after(request.after_event_seq)
        with lead.watchers.watch(_filter(request.filter, lead.runner.time), backlog or []) as watch:
            # Every message has this life's header, even after its end, and an event_seq that a watch can resume after.
            header = lead.header()
            if resumed and backlog is not None:
                header.event_seq = min(request.after_event_seq, header.event_seq)
            yield transfer_pb2.WatchTransfersResponse(header=header, history_lost=backlog is None)
            while True:
                header.event_seq, change = await watch.next()
                if lead.call_queue.busy:
                    await lead.call_queue.enter(payer())
                transfer = answers.transfer(change, lead.runner.time()) if change else None
                yield transfer_pb2.WatchTransfersResponse(header=header, transfer=transfer)

    @unary
    async def AcknowledgeTransfers(
        self, request: transfer_pb2.AcknowledgeTransfersRequest, trace: str
    ) -> transfer_pb2.AcknowledgeTransfersResponse:
        return await reply_to(ACKNOWLEDGE_TRANSFERS, self._lead, request, trace)

    @unary
    async def CancelTransfer(
        self, request: transfer_pb2.CancelTransferRequest, trace: str
    ) -> transfer_pb2.CancelTransferResponse:
        return await reply_to(CANCEL_TRANSFER, self._lead, request, trace)


def _filter(wanted: transfer_pb2.TransferFilter, now: Callable[[], float]) -> Callable[[Transfer], bool]:
    """Returns a check that a transfer matches all fields that are set."""
    check_count("filter.states", len(wanted.states), NAMES_MAX)
    check_count("filter.memory_dispositions", len(wanted.memory_dispositions), NAMES_MAX)
    check_count("filter.transfer_ids", len(wanted.transfer_ids), WAITED_MAX)
    min_age_s = seconds(wanted, "min_age") or 0.0
    tenant = CALLER.get().tenant
    if not tenant and not wanted.ListFields():
        return lambda _: True
    ids = frozenset(wanted.transfer_ids)
    states, memory = frozenset(wanted.states), frozenset(wanted.memory_dispositions)

    def matches(transfer: Transfer) -> bool:
        return (
            (not tenant or transfer.tenant == tenant)
            and (not wanted.request_id or transfer.request_id == wanted.request_id)
            and (not ids or transfer.id in ids)
            and (not wanted.pair_id or transfer.pair_id == wanted.pair_id)
            and (not wanted.lease_id or transfer.lease_id == wanted.lease_id)
            and (not wanted.direction or answers.DIRECTIONS[transfer.direction] == wanted.direction)
            and (not wanted.trace_id or answers.trace_id(transfer.trace) == wanted.trace_id)
            and (not wanted.peer_engine_id or transfer.peer_engine_id == wanted.peer_engine_id)
            and (not states or answers.STATES[transfer.state] in states)
            and (not memory or answers.DISPOSITIONS[transfer.memory] in memory)
            and now() - transfer.created >= min_age_s
        )

    return matches
