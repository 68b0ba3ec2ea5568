"""TensorService: named tensors."""

from dataclasses import asdict

from kvgrpc.errors import too_many
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.identity.tenants import sees
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import STANDING_BYTES_MAX, unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.service.tensors import messages
from kvgrpc.service.tensors.staging_store import StagingStore
from kvgrpc.v1 import tensor_pb2, tensor_pb2_grpc
from kvgrpc.wire import tensors as wire


class TensorService(tensor_pb2_grpc.TensorServiceServicer):
    """Converts a request, asks the store, and converts its answer."""

    def __init__(self, lead: Lead, staging: StagingStore) -> None:
        self._lead, self._staging = lead, staging

    @unary
    async def PutTensor(self, request: tensor_pb2.PutTensorRequest, trace: str) -> tensor_pb2.PutTensorResponse:
        return await messages.put(self._staging, request, trace, PRINCIPAL.get())

    @unary
    async def GetTensor(self, request: tensor_pb2.GetTensorRequest, trace: str) -> tensor_pb2.GetTensorResponse:
        return await messages.get(self._staging, request, trace, PRINCIPAL.get())

    @unary
    async def ReleaseTensors(
        self, request: tensor_pb2.ReleaseTensorsRequest, trace: str
    ) -> tensor_pb2.ReleaseTensorsResponse:
        if request.HasField("source") and request.ByteSize() > STANDING_BYTES_MAX:
            raise too_many(
                f"the request has {request.ByteSize()} bytes, and is kept while `source` is told: name fewer tensors, "
                "or none for all of the request",
                STANDING_BYTES_MAX,
            )
        return await messages.release(self._staging, request, trace, PRINCIPAL.get())

    @unary
    async def ListTensors(self, request: tensor_pb2.ListTensorsRequest, trace: str) -> tensor_pb2.ListTensorsResponse:
        lead = self._lead
        now = lead.runner.time()
        rows = [
            row
            for row in self._staging.store.rows()
            if request.transfer_key in (b"", row.id.key)
            and sees(row.tenant)
            and (not request.states or wire.state_of(row) in request.states)
        ]
        listed = page(
            lead,
            request,
            rows,
            lambda row: (row.made, f"{row.number}"),
            lambda row: wire.row(row, now, lead.runner.node.state.transfers),
        )
        return tensor_pb2.ListTensorsResponse(
            header=listed.header, tensors=listed.rows, next_page_token=listed.next_page_token
        )

    @unary
    async def GetStagingStatus(
        self, request: tensor_pb2.GetStagingStatusRequest, trace: str
    ) -> tensor_pb2.GetStagingStatusResponse:
        status = self._staging.store.status()
        return tensor_pb2.GetStagingStatusResponse(header=self._lead.header(), **asdict(status))
