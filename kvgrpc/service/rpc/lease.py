"""LeaseService: time-bounded read pins."""

from collections.abc import AsyncIterator

from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.identity.tenants import sees
from kvgrpc.service.lead import Lead
from kvgrpc.service.methods import GRANT_LEASE, KEEP_ALIVE, RELEASE_LEASE, RENEW_LEASES, reply_to
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.v1 import lease_pb2, lease_pb2_grpc
from kvgrpc.wire import answers, requests


class LeaseService(lease_pb2_grpc.LeaseServiceServicer):
    """Converts a request, asks the node, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def GrantLease(self, request: lease_pb2.GrantLeaseRequest, trace: str) -> lease_pb2.GrantLeaseResponse:
        return await reply_to(GRANT_LEASE, self._lead, request, trace)

    @unary
    async def RenewLeases(self, request: lease_pb2.RenewLeasesRequest, trace: str) -> lease_pb2.RenewLeasesResponse:
        return await reply_to(RENEW_LEASES, self._lead, request, trace)

    @unary
    async def ReleaseLease(self, request: lease_pb2.ReleaseLeaseRequest, trace: str) -> lease_pb2.ReleaseLeaseResponse:
        return await reply_to(RELEASE_LEASE, self._lead, request, trace)

    @unary
    async def GetLease(self, request: lease_pb2.GetLeaseRequest, trace: str) -> lease_pb2.GetLeaseResponse:
        lead = self._lead
        lead.runner.advance()
        found = lead.runner.node.find_lease(requests.lease_ref(request.lease), PRINCIPAL.get())
        shown = answers.lease(found, lead.runner.node.lease_times(found), lead.runner.node.state.life.incarnation)
        return lease_pb2.GetLeaseResponse(header=lead.header(), lease=shown)

    @unary
    async def ListLeases(self, request: lease_pb2.ListLeasesRequest, trace: str) -> lease_pb2.ListLeasesResponse:
        lead = self._lead
        lead.runner.advance()
        wanted, state = request.request_id, lead.runner.node.state
        found = page(
            lead,
            request,
            (lease for lease in state.send.leases if sees(lease.tenant) and (not wanted or lease.request_id == wanted)),
            lambda lease: (lease.granted - state.life.began, lease.id),
            lambda lease: answers.lease(lease, lead.runner.node.lease_times(lease), state.life.incarnation),
        )
        return lease_pb2.ListLeasesResponse(
            header=found.header, leases=found.rows, next_page_token=found.next_page_token
        )

    @streaming
    async def KeepAlive(
        self, request: AsyncIterator[lease_pb2.KeepAliveRequest], trace: str
    ) -> AsyncIterator[lease_pb2.KeepAliveResponse]:
        async for row in request:
            reply = await reply_to(KEEP_ALIVE, self._lead, row, trace)
            reply.sequence = row.sequence
            yield reply
            del row, reply  # frees them now: the next message may come much later
