"""LeaseService: time-bounded read pins."""

import os
import time
from collections.abc import AsyncIterator

from kvgrpc.core.send.findable import find_offers
from kvgrpc.core.state import NodeState
from kvgrpc.errors import KVGrpcError, invalid
from kvgrpc.service.call_records import OK
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.engine_watchers import INTERVAL_S
from kvgrpc.service.identity.tenants import searched, sees
from kvgrpc.service.lead import Lead
from kvgrpc.service.methods import GRANT_LEASE, KEEP_ALIVE, RELEASE_LEASE, RENEW_LEASES, reply_to
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.v1 import lease_pb2, lease_pb2_grpc
from kvgrpc.wire import answers, requests
from kvgrpc.wire.offers import found_to_proto, news_to_proto
from kvgrpc.wire.values import content

RENEWAL = "kvgrpc.v1.LeaseService/RenewLeases"
"""Name under which each message of KeepAlive is counted."""
KEY_BYTES = 16
"""Size of the transfer key of a grant that was found, in bytes."""


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
            ordered=True,
        )
        return lease_pb2.ListLeasesResponse(
            header=found.header, leases=found.rows, next_page_token=found.next_page_token
        )

    @unary
    async def FindOffers(self, request: lease_pb2.FindOffersRequest, trace: str) -> lease_pb2.FindOffersResponse:
        lead = self._lead
        lead.runner.advance()
        node, tenant = lead.runner.node, searched(request.tenant)
        pool = node.state.life.engine.pool
        found = find_offers(node.state, content(request.content, lead.weights), tenant, os.urandom(KEY_BYTES))
        return lease_pb2.FindOffersResponse(
            header=lead.header(),
            offers=[found_to_proto(offer, node.lease_times(offer.lease)) for offer in found],
            fingerprint=pool.fingerprint() if found else "",
        )

    @streaming
    async def WatchOffers(
        self, request: lease_pb2.WatchOffersRequest, trace: str
    ) -> AsyncIterator[lease_pb2.WatchOffersResponse]:
        lead = self._lead
        lead.runner.advance()
        tenant, told = searched(request.tenant), _resumed(request, lead.runner.node.state)
        with lead.engine_watchers.one() as watcher:
            in_any_case = True
            while True:
                state = lead.runner.node.state
                life, offers = state.life.incarnation, state.send.offers
                changes = offers.changes_after(tenant, told[1]) if told[0] == life else None
                news = changes or offers.all_of(tenant)
                if in_any_case or changes is None or news.offered or news.ended:
                    watcher.told()
                    for message in news_to_proto(lead.header(), news, snapshot=changes is None):
                        yield message
                told = life, news.seq
                in_any_case = await watcher.wait(INTERVAL_S)

    @streaming
    async def KeepAlive(
        self, request: AsyncIterator[lease_pb2.KeepAliveRequest], trace: str
    ) -> AsyncIterator[lease_pb2.KeepAliveResponse]:
        async for row in request:
            reply = await self._renewed(row, trace)
            reply.sequence = row.sequence
            yield reply
            del row, reply  # frees them now: the next message may come much later

    async def _renewed(self, row: lease_pb2.KeepAliveRequest, trace: str) -> lease_pb2.KeepAliveResponse:
        """Answers one message of a stream, and counts it as the call that it stands for."""
        began, code = time.perf_counter(), OK
        try:
            self._lead.gate.check_within(RENEWAL)
            return await reply_to(KEEP_ALIVE, self._lead, row, trace)
        except KVGrpcError as error:
            code = error.code
            raise
        finally:
            self._lead.calls.ended(RENEWAL, code, began)
            del row


def _resumed(request: lease_pb2.WatchOffersRequest, state: NodeState) -> tuple[int, int]:
    """Returns the life and the change after which a watch goes on; a life of 0 is none. Raises InvalidRequest."""
    if request.after_offer_seq and not request.incarnation:
        raise invalid("incarnation", "is required with after_offer_seq: the life that the number is of")
    last = state.send.offers.seq
    if request.incarnation == state.life.incarnation and request.after_offer_seq > last:
        raise invalid("after_offer_seq", f"has not been reached: the last change has {last}")
    return request.incarnation if request.after_offer_seq else 0, request.after_offer_seq
