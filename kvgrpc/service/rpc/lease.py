"""LeaseService: time-bounded read pins."""

from collections.abc import AsyncIterator

from kvgrpc.core import actions
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvgrpc.wire import answers, requests
from kvgrpc.wire.values import grant, pool_blocks


class LeaseService(lease_pb2_grpc.LeaseServiceServicer):
    """Converts a request, asks the node, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def GrantLease(self, request: lease_pb2.GrantLeaseRequest, trace: str) -> lease_pb2.GrantLeaseResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.HandedOver,
            "GrantLease",
            request,
            trace,
            lambda call: requests.grant_lease(request, call, lead.weights, lead.block_limit),
        )
        return lease_pb2.GrantLeaseResponse(
            header=header,
            lease=answers.lease(answer.lease, header.incarnation),
            grant=grant(answer.token) if answer.token else None,
        )

    @unary
    async def RenewLeases(self, request: lease_pb2.RenewLeasesRequest, trace: str) -> lease_pb2.RenewLeasesResponse:
        header, rows = await self._renew(request, trace)
        return lease_pb2.RenewLeasesResponse(header=header, leases=rows)

    @unary
    async def ReleaseLease(self, request: lease_pb2.ReleaseLeaseRequest, trace: str) -> lease_pb2.ReleaseLeaseResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.Released, "ReleaseLease", request, trace, lambda call: requests.release_lease(request, call)
        )
        return lease_pb2.ReleaseLeaseResponse(
            header=header,
            lease=answers.lease(answer.lease, header.incarnation),
            freed_blocks=pool_blocks(answer.freed, header.incarnation),
        )

    @unary
    async def GetLease(self, request: lease_pb2.GetLeaseRequest, trace: str) -> lease_pb2.GetLeaseResponse:
        lead = self._lead
        lead.runner.advance()
        found = lead.node.lease(lead.node.find_lease(requests.lease_ref(request.lease)))
        return lease_pb2.GetLeaseResponse(header=lead.header(), lease=answers.lease(found, lead.node.state.incarnation))

    @unary
    async def ListLeases(self, request: lease_pb2.ListLeasesRequest, trace: str) -> lease_pb2.ListLeasesResponse:
        lead = self._lead
        lead.runner.advance()
        wanted, state = request.request_id, lead.node.state
        found = page(
            lead,
            request,
            (lease for lease in state.leases if not wanted or lease.request_id == wanted),
            lambda lease: (lease.granted - state.began, lease.id),
            lambda lease: answers.lease(lead.node.lease(lease), state.incarnation),
        )
        return lease_pb2.ListLeasesResponse(
            header=found.header, leases=found.rows, next_page_token=found.next_page_token
        )

    @streaming
    async def KeepAlive(
        self, request: AsyncIterator[lease_pb2.KeepAliveRequest], trace: str
    ) -> AsyncIterator[lease_pb2.KeepAliveResponse]:
        async for row in request:
            header, rows = await self._renew(row, trace)
            yield lease_pb2.KeepAliveResponse(header=header, leases=rows, sequence=row.sequence)
            del row, rows  # frees them now: the next message may come much later

    async def _renew(
        self, request: lease_pb2.RenewLeasesRequest | lease_pb2.KeepAliveRequest, trace: str
    ) -> tuple[common_pb2.ResponseHeader, list[lease_pb2.RenewedLease]]:
        lead = self._lead
        header, answer = await lead.ask(
            actions.Renewed,
            "RenewLeases",
            request,
            trace,
            lambda call: requests.renew_leases(request, call, lead.renewal_limit),
        )
        return header, answers.renewed(answer)
