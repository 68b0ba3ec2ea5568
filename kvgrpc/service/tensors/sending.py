"""Tensors of this engine: handed over, sent to their consumers, or kept until these fetch them."""

import asyncio
import logging

from kvgrpc.core.events import CancelScope
from kvgrpc.core.tensors.calls import Put
from kvgrpc.core.tensors.rows import Offer
from kvgrpc.core.tensors.values import TensorId
from kvgrpc.errors import Aborted, InvalidRequest, KVGrpcError, Reason
from kvgrpc.service.runner import copied
from kvgrpc.service.tensors.delivery import deliver
from kvgrpc.service.tensors.life import Life
from kvgrpc.service.tensors.remote import RemoteStores

_log = logging.getLogger(__name__)


class Sending:
    """What is kept for others in one life."""

    def __init__(self, life: Life, remote: RemoteStores) -> None:
        self._life = life
        self._remote = remote
        self._offers: dict[str, Offer] = {}
        """By transfer."""
        self._under_way: dict[TensorId, asyncio.Task[KVGrpcError | None]] = {}

    async def put(self, put: Put, until: float, trace: str) -> Offer:
        """PutTensor at the source. Raises what it, or the first consumer, refuses it with."""
        offer = self._offer(put, until, trace)
        sent = self._under_way.get(put.id)
        if sent is not None and not put.asynchronous:
            await asyncio.wait((sent,))
            if sent.cancelled():
                raise Aborted(Reason.INCARNATION_CHANGED, "the life of the engine whose tensor it was is over")
            if (error := sent.result()) is not None:
                raise copied(error)
        return offer

    def over(self, transfer_id: str) -> None:
        """That transfer is over. The node is busy."""
        offer = self._offers.pop(transfer_id, None)
        if offer is not None:
            self._life.table.offer_over(offer)

    def withdraw(self, offer: Offer) -> None:
        """It is kept no more."""
        self._offers.pop(offer.transfer_id, None)
        self._life.transfers.end(offer.transfer_id, "the tensor was taken back", CancelScope.BOTH)

    def _offer(self, put: Put, until: float, trace: str) -> Offer:
        """Hands it over and begins to send it, if that was not done before."""
        table, lead = self._life.table, self._life.lead
        pages = table.check_size(put.described)
        addresses = tuple(place.address for place in put.consumers)
        for i, address in enumerate(addresses):
            lead.check_dial(address, f"consumers[{i}].address")
        known = table.offers.get(put.id)
        if known is None:
            lead.node.state.check_open()
            held = len(self._life.transfers.pages_of(put.allocation_id))
            if held != pages:
                raise InvalidRequest(
                    Reason.BLOCK_COUNT_MISMATCH, f"the tensor takes {pages} pages, and the allocation has {held}"
                )
        try:
            offer = table.offer(Offer(put.id, put.described, pages, put.allocation_id, addresses, self._life.now))
            if known is None:
                self._hand_over(offer, put, until, trace)
        finally:
            self._life.perform()
        return offer

    def _hand_over(self, offer: Offer, put: Put, until: float, trace: str) -> None:
        life, limits = self._life, self._life.lead.config.limits
        ttl_s = put.ttl_s or limits.lease_ttl_s
        if put.consumers:
            ttl_s = min(max(ttl_s, until - life.now), limits.lease_cap_s)
        try:
            token, transfer_id = life.transfers.hand_over(offer, put, ttl_s, trace)
        except KVGrpcError:
            life.table.offer_over(offer)
            raise
        life.table.offered(offer, token, transfer_id)
        self._offers[transfer_id] = offer
        if put.consumers:
            self._under_way[put.id] = life.spawn(self._send(offer, put, until, trace))

    async def _send(self, offer: Offer, put: Put, until: float, trace: str) -> KVGrpcError | None:
        """To all consumers; why the first is without it, if one is. The hand-over ends then, and also where a consumer
        had the tensor already and never came for it.
        """
        life = self._life
        try:
            sends = [
                deliver(self._remote, put, offer.token, place, lambda: until - life.now, trace)
                for place in put.consumers
            ]
            errors = [error for error in await asyncio.gather(*sends) if error is not None]
            if errors:
                _log.info("tensor %s part %d was not put: %s", put.id.name, put.id.part, errors[0])
            life.transfers.end(offer.transfer_id, "it was not read by all of its consumers", CancelScope.BOTH)
            return errors[0].untraced() if errors else None
        finally:
            del self._under_way[put.id]
