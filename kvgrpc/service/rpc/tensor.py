"""TensorService: named tensors."""

from kvgrpc.core.tensors.rows import Offer, Tensor
from kvgrpc.errors import OutOfRange, Reason
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import STANDING_BYTES_MAX, unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.service.tensors import answers
from kvgrpc.v1 import tensor_pb2, tensor_pb2_grpc
from kvgrpc.wire import tensors as wire


class TensorService(tensor_pb2_grpc.TensorServiceServicer):
    """Converts a request, asks the store, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def PutTensor(self, request: tensor_pb2.PutTensorRequest, trace: str) -> tensor_pb2.PutTensorResponse:
        return await answers.put(self._lead, request, trace, PRINCIPAL.get())

    @unary
    async def GetTensor(self, request: tensor_pb2.GetTensorRequest, trace: str) -> tensor_pb2.GetTensorResponse:
        return await answers.get(self._lead, request, trace, PRINCIPAL.get())

    @unary
    async def ReleaseTensors(
        self, request: tensor_pb2.ReleaseTensorsRequest, trace: str
    ) -> tensor_pb2.ReleaseTensorsResponse:
        if request.HasField("source") and request.ByteSize() > STANDING_BYTES_MAX:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED,
                f"the request has {request.ByteSize()} bytes, and is kept while `source` is told: name fewer tensors, "
                "or none for all of the request",
                metadata={"limit": f"{STANDING_BYTES_MAX}"},
            )
        return await answers.release(self._lead, request, trace, PRINCIPAL.get())

    @unary
    async def ListTensors(self, request: tensor_pb2.ListTensorsRequest, trace: str) -> tensor_pb2.ListTensorsResponse:
        lead = self._lead
        table, now = lead.tensors.store.table, lead.runner.now
        every: list[Tensor | Offer] = [*table.tensors.values(), *table.offers.values()]
        rows = [
            row
            for row in every
            if request.transfer_key in (b"", row.id.key)
            and (not request.states or wire.state_of(row) in request.states)
        ]
        listed = page(
            lead,
            request,
            rows,
            lambda row: (row.made, f"{row.number}"),
            lambda row: wire.row(row, now, lead.node.state.transfers),
        )
        return tensor_pb2.ListTensorsResponse(
            header=listed.header, tensors=listed.rows, next_page_token=listed.next_page_token
        )

    @unary
    async def GetStagingStatus(
        self, request: tensor_pb2.GetStagingStatusRequest, trace: str
    ) -> tensor_pb2.GetStagingStatusResponse:
        lead = self._lead
        table, state = lead.tensors.store.table, lead.node.state
        return tensor_pb2.GetStagingStatusResponse(
            header=lead.header(),
            page_bytes=table.page_bytes,
            page_count=table.store_pages,
            used_page_count=table.store_pages - state.allocator.free_count(0),
            spill_page_count=table.limits.spill_pages,
            used_spill_page_count=table.spill_pages.used,
            tensor_count=len(table.tensors),
            offered_count=len(table.offers),
            waiting_count=len(table.waits),
            reserved_page_count=lead.tensors.store.pages.line.reserved,
            queued_count=len(lead.tensors.store.pages.line),
        )
