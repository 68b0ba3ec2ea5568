"""Calls of LeaseService about content: which engine holds the KV of a prompt's beginning."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Unpack

from grpc import aio

from kvgrpc.client import options as opt
from kvgrpc.client.caller import Caller
from kvgrpc.client.handoffs import HandoffCalls
from kvgrpc.client.values import Tokens, as_content
from kvgrpc.client.watch_engine import OfferEvent, watch_engine
from kvgrpc.v1 import lease_pb2
from kvgrpc.v1.lease_pb2_grpc import LeaseServiceStub


class OfferCalls(HandoffCalls):
    """A client's methods that find leases by their content."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        super().__init__(channel, caller)
        self._leases = LeaseServiceStub(channel)

    async def find_offers(
        self, content: Tokens, *, tenant: str = "", **options: Unpack[opt.CallOptions]
    ) -> lease_pb2.FindOffersResponse:
        """Returns the leases that hold the longest beginning of a prompt here, each with a grant: give one to `pull`
        with its `token_count` as `use_tokens`. No offers: nothing of the prompt is found. Only leases that were handed
        over as `findable` are.
        """
        request = lease_pb2.FindOffersRequest(content=as_content(content), tenant=tenant)
        return await self._call.read(self._leases.FindOffers, request, options)

    async def watch_offers(
        self, *, tenant: str = "", after: lease_pb2.WatchOffersResponse | None = None
    ) -> AsyncGenerator[OfferEvent, None]:
        """Yields what can be found at the engine: all of it first, then changes. The watch survives lost connections
        and restarts: a message with `snapshot` replaces what was told before. `EngineUnreachable` marks that the server
        cannot be reached. `after`: the last message of an earlier watch.
        """
        last = after or lease_pb2.WatchOffersResponse()

        def request() -> lease_pb2.WatchOffersRequest:
            life = last.header.incarnation
            return lease_pb2.WatchOffersRequest(tenant=tenant, after_offer_seq=last.offer_seq, incarnation=life)

        async with aclosing(watch_engine(self._call, self._leases.WatchOffers, request)) as events:
            async for event in events:
                last = event if isinstance(event, lease_pb2.WatchOffersResponse) else last
                yield event
