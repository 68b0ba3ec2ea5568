"""Tensors of this engine that are kept until their consumers fetch them.

Each is under a lease of its own. Several that one consumer wants are lent to it as a bundle: one more hand-over of
their pages, which stands for their leases.
"""

from collections.abc import Sequence

from kvgrpc.core.events import CancelScope
from kvgrpc.core.tensors.descriptions import Get, NamedTensor, Put
from kvgrpc.core.tensors.rows import TensorOffer
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Reason
from kvgrpc.service.tensors.life import Life


class KeptTensors:
    """The kept tensors of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._kept: dict[str, TensorOffer] = {}
        """Offers by transfer."""
        self._lent: dict[str, Sequence[TensorOffer]] = {}
        """Offers that are lent together, by the transfer of all of them."""
        self.ended: list[TensorOffer] = []
        """Offers that are over; the rest of their end waits until the node is not busy. Read-only outside."""

    def keep(self, offer: TensorOffer, put: Put, trace: str) -> None:
        """Hands the tensor over to whoever fetches it. Raises the refusal."""
        life = self._life
        ttl_s = put.ttl_s or life.lead.config.limits.lease_ttl_s
        try:
            token, transfer_id = life.transfers.hand_over((offer,), put, ttl_s, trace)
        except KVGrpcError:
            life.table.offer_over(offer)
            raise
        life.table.offered(offer, token, transfer_id)
        if not offer.may_go_together:
            life.transfers.free(offer.allocation_id)
        self._kept[transfer_id] = offer
        if (now := life.transfers.find(transfer_id)) is not None and now.over:  # the lease ended in the call, unheard
            self.over(transfer_id, succeeded=False)
            self.look()

    def lend(self, get: Get, trace: str) -> tuple[Sequence[TensorOffer], bytes]:
        """Returns those of the tensors that are kept here and may go together, and their grant. Raises DeadlineExceeded
        (DEADLINE) if there is none, and the refusal of their hand-over.
        """
        life = self._life
        offers = life.table.kept.together(get.wanted, get.most_pages, get.tenant)
        if not offers:
            text = "none of these tensors is kept here for one consumer"
            raise DeadlineExceeded(Reason.DEADLINE, text, metadata={"phase": "tensor"})
        if len(offers) == 1:
            return offers, offers[0].token
        first, *bundled = [NamedTensor(offer.id, offer.described) for offer in offers]
        put = Put(first.id, first.described, bundled=tuple(bundled), request_id=get.request_id, tenant=offers[0].tenant)
        token, transfer_id = life.transfers.hand_over(
            offers, put, life.lead.config.limits.lease_ttl_s, trace, stands_for=True
        )
        for offer in offers:
            offer.lent = transfer_id
        self._lent[transfer_id] = offers
        if (now := life.transfers.find(transfer_id)) is not None and now.over:  # a lease ended in the call, unheard
            self.over(transfer_id, succeeded=False)
        return offers, token

    def over(self, transfer_id: str, *, succeeded: bool) -> None:
        """Takes the end of a transfer. The node is busy."""
        for lent in self._lent.pop(transfer_id, ()):
            lent.lent = ""
        offer = self._kept.pop(transfer_id, None)
        if offer is None:
            return
        if succeeded:
            self._life.table.offer_sent(offer, self._life.time())
        else:
            self._life.table.offer_over(offer)
        self.ended.append(offer)

    def look(self) -> None:
        """Finishes what `over` left. The node is not busy."""
        while self.ended:
            self._let_go(self.ended.pop())

    def withdraw(self, offer: TensorOffer) -> None:
        """Takes a kept tensor back. Tensors lent with it may be fetched by themselves."""
        if self._kept.pop(offer.transfer_id, None) is not None:
            self._life.transfers.end(offer.transfer_id, "the tensor was taken back", CancelScope.BOTH)
            self._let_go(offer)

    def _let_go(self, offer: TensorOffer) -> None:
        if offer.lent:
            self._life.transfers.end(offer.lent, "one of its tensors is no longer kept", CancelScope.BOTH)
        self._life.transfers.free(offer.allocation_id)
