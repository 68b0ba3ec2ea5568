"""TransferService: following and ending transfers."""

from collections.abc import AsyncIterator, Callable

from kvgrpc.core import actions
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.errors import Aborted, Reason
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.v1 import transfer_pb2, transfer_pb2_grpc
from kvgrpc.wire import answers, requests
from kvgrpc.wire.bounds import NAMES_MAX, check_count
from kvgrpc.wire.values import layer_range, seconds

WAIT_S_MAX = 60.0


class TransferService(transfer_pb2_grpc.TransferServiceServicer):
    """Convert, ask the node, convert."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def GetTransfer(
        self, request: transfer_pb2.GetTransferRequest, trace: str
    ) -> transfer_pb2.GetTransferResponse:
        lead = self._lead
        lead.runner.advance()
        found = lead.node.state.transfers.get(request.transfer_id)
        return transfer_pb2.GetTransferResponse(header=lead.header(), transfer=answers.transfer(found, lead.runner.now))

    @unary
    async def WaitTransfer(
        self, request: transfer_pb2.WaitTransferRequest, trace: str
    ) -> transfer_pb2.WaitTransferResponse:
        lead = self._lead
        layers = layer_range(request)
        asked_s = seconds(request, "timeout")
        timeout_s = WAIT_S_MAX if asked_s is None else min(max(asked_s, 0.0), WAIT_S_MAX)
        returned = request.until == transfer_pb2.WAIT_CONDITION_RETURNED

        def done(transfer: Transfer) -> bool:
            if layers is not None and transfer.has_layers(*layers):
                return True
            return transfer.settled if returned else transfer.over

        header = lead.header()  # of the life that the transfer is of, whatever comes meanwhile
        found = await lead.watchers.wait(request.transfer_id, done, timeout_s)
        header.event_seq = max(header.event_seq, found.seq)
        return transfer_pb2.WaitTransferResponse(header=header, transfer=answers.transfer(found, lead.runner.now))

    @unary
    async def ListTransfers(
        self, request: transfer_pb2.ListTransfersRequest, trace: str
    ) -> transfer_pb2.ListTransfersResponse:
        lead = self._lead
        lead.runner.advance()
        wanted = _filter(request.filter, lambda: lead.runner.now)
        state = lead.node.state
        found = page(
            lead,
            request,
            filter(wanted, state.transfers),
            lambda transfer: (state.began - transfer.created, transfer.id),
            lambda transfer: answers.transfer(transfer, lead.runner.now),
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
        state = lead.node.state
        resumed = bool(request.after_event_seq or request.incarnation)
        backlog: list[Transfer] | None = []
        if resumed:
            if request.incarnation != state.incarnation:
                raise Aborted(
                    Reason.INCARNATION_CHANGED, "that sequence number belongs to an earlier life of this engine"
                )
            backlog = state.transfers.changes_after(request.after_event_seq)
        with lead.watchers.watch(_filter(request.filter, lambda: lead.runner.now), backlog or []) as watch:
            # What is told is of this life, also after its end; and every number is one to resume after.
            header = lead.header()
            if resumed and backlog is not None:
                header.event_seq = min(request.after_event_seq, header.event_seq)
            yield transfer_pb2.WatchTransfersResponse(header=header, history_lost=backlog is None)
            while True:
                header.event_seq, change = await watch.next()
                transfer = answers.transfer(change, lead.runner.now) if change else None
                yield transfer_pb2.WatchTransfersResponse(header=header, transfer=transfer)

    @unary
    async def AcknowledgeTransfers(
        self, request: transfer_pb2.AcknowledgeTransfersRequest, trace: str
    ) -> transfer_pb2.AcknowledgeTransfersResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.Acknowledged,
            "AcknowledgeTransfers",
            request,
            trace,
            lambda call: requests.acknowledge(request, call),
        )
        return transfer_pb2.AcknowledgeTransfersResponse(header=header, acknowledged=answer.count)

    @unary
    async def CancelTransfer(
        self, request: transfer_pb2.CancelTransferRequest, trace: str
    ) -> transfer_pb2.CancelTransferResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.Cancelled,
            "CancelTransfer",
            request,
            trace,
            lambda call: requests.cancel_transfer(request, call),
        )
        return transfer_pb2.CancelTransferResponse(
            header=header,
            outcome=answers.OUTCOMES[answer.outcome],
            transfers=[answers.transfer(transfer, lead.runner.now) for transfer in answer.transfers],
        )


def _filter(wanted: transfer_pb2.TransferFilter, now: Callable[[], float]) -> Callable[[Transfer], bool]:
    """All fields that are set must match."""
    check_count("filter.states", len(wanted.states), NAMES_MAX)
    check_count("filter.memory", len(wanted.memory), NAMES_MAX)
    min_age_s = seconds(wanted, "min_age") or 0.0
    states, memory = frozenset(wanted.states), frozenset(wanted.memory)

    def matches(transfer: Transfer) -> bool:
        return (
            (not wanted.request_id or transfer.request_id == wanted.request_id)
            and (not wanted.trace_id or answers.trace_id(transfer.trace) == wanted.trace_id)
            and (not wanted.peer_engine_id or transfer.peer_engine_id == wanted.peer_engine_id)
            and (not states or answers.STATES[transfer.state] in states)
            and (not memory or answers.DISPOSITIONS[transfer.memory] in memory)
            and now() - transfer.created >= min_age_s
        )

    return matches
