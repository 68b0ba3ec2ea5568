"""Tensors of this engine: handed over, sent to their consumers, or kept until these fetch them."""

import asyncio
import logging

from kvgrpc.core.events import CancelScope
from kvgrpc.core.tensors.calls import Put
from kvgrpc.core.tensors.rows import Offer
from kvgrpc.errors import DeadlineExceeded, InvalidRequest, KVGrpcError, Reason
from kvgrpc.service.runner import copied
from kvgrpc.service.tensors.delivery import deliver
from kvgrpc.service.tensors.life import Life, gone
from kvgrpc.service.tensors.remote import RemoteStores

_log = logging.getLogger(__name__)


class Sending:
    """What is kept for others in one life."""

    def __init__(self, life: Life, remote: RemoteStores) -> None:
        self._life = life
        self._remote = remote
        self._offers: dict[str, Offer] = {}
        """By transfer."""
        self._under_way: dict[Offer, asyncio.Task[None]] = {}

    async def put(self, put: Put, until: float, trace: str) -> Offer:
        """PutTensor at the source, for the first time or again. Raises what it, or the first consumer, refuses it with,
        and DeadlineExceeded (DEADLINE) where it is put again and the first put takes longer.
        """
        offer, again = self._offer(put, until, trace)
        if put.asynchronous:
            return offer
        if (sent := self._under_way.get(offer)) is not None:
            await asyncio.wait((sent,), timeout=until - self._life.now if again else None)
            if not sent.done():
                late = "the tensor is still on its way to its consumers"
                raise DeadlineExceeded(Reason.DEADLINE, late, metadata={"phase": "tensor"})
            if sent.cancelled():
                raise gone(self._life.lead)
            sent.result()
        if offer.refused is not None:
            raise copied(offer.refused)
        return offer

    def over(self, transfer_id: str, *, succeeded: bool) -> None:
        """That transfer is over. The node is busy."""
        offer = self._offers.pop(transfer_id, None)
        if offer is not None and (succeeded or offer.consumers):
            self._life.table.offer_sent(offer, self._life.now)
        elif offer is not None:
            self._life.table.offer_over(offer)

    def withdraw(self, offer: Offer) -> None:
        """It is kept no more."""
        self._offers.pop(offer.transfer_id, None)
        self._life.transfers.end(offer.transfer_id, "the tensor was taken back", CancelScope.BOTH)

    def _offer(self, put: Put, until: float, trace: str) -> tuple[Offer, bool]:
        """Hands it over and begins to send it, if that was not done before; whether it was."""
        table, lead = self._life.table, self._life.lead
        pages = table.check_size(put.described)
        for i, consumer in enumerate(put.consumers):
            lead.check_dial(consumer.address, f"consumers[{i}].address")
        asked = Offer(
            put.id, put.described, pages, put.allocation_id, put.consumers, self._life.now, put.consumer_count
        )
        known = table.find_offer(asked)
        if known is None:
            lead.node.state.check_open()
            held = len(self._life.transfers.pages_of(put.allocation_id))
            if held != pages:
                raise InvalidRequest(
                    Reason.BLOCK_COUNT_MISMATCH, f"the tensor takes {pages} pages, and the allocation has {held}"
                )
        try:
            offer = table.offer(asked)
            if known is None:
                self._hand_over(offer, put, until, trace)
        finally:
            self._life.perform()
        return offer, known is not None

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
            self._under_way[offer] = life.spawn(self._send(offer, put, until, trace))
        if (now := life.transfers.find(transfer_id)) is not None and now.over:  # its lease is, which was not heard
            self.over(transfer_id, succeeded=False)

    async def _send(self, offer: Offer, put: Put, until: float, trace: str) -> None:
        """To all consumers; the offer says why the first is without it, if one is. The hand-over ends then, and also
        where a consumer had the tensor already and never came for it.
        """
        life = self._life
        try:
            sends = [
                deliver(self._remote, put, offer.token, consumer, lambda: until - life.now, trace)
                for consumer in put.consumers
            ]
            errors = [error for error in await asyncio.gather(*sends) if error is not None]
            if errors:
                offer.refused = errors[0].untraced()
                _log.info("tensor %s part %d was not put: %s", put.id.name, put.id.part, errors[0])
            life.transfers.end(offer.transfer_id, "it was not read by all of its consumers", CancelScope.BOTH)
        finally:
            del self._under_way[offer]
