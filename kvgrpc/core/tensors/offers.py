"""Tensors of this engine that are kept for others or on their way to them, and past ones."""

from collections.abc import Iterable, Sequence

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.remembered import Remembered
from kvgrpc.core.tensors.calls import WantedTensor
from kvgrpc.core.tensors.descriptions import TensorId
from kvgrpc.core.tensors.refusals import full, taken
from kvgrpc.core.tensors.rows import TensorLimits, TensorOffer
from kvgrpc.errors import PreconditionFailed


class TensorOffers:
    """Offers by tensor id."""

    def __init__(self, limits: TensorLimits, ledger: Ledger) -> None:
        self._most = limits.tensors
        self.rows: dict[TensorId, TensorOffer] = {}
        self.sent = Remembered[TensorId, TensorOffer](
            limits.tombstones, limits.tombstone_s, ledger, RowKind.TENSOR_ENDED
        )
        """Past offers. A repeated put gets the same answer as the first one."""

    def find(self, asked: TensorOffer) -> TensorOffer | None:
        """Returns the offer that the same put made before, also if it is over. Raises AlreadyExists (TRANSFER_EXISTS)
        while another offer has the name.
        """
        known, over = self.rows.get(asked.id), self.sent.get(asked.id)
        if over is not None and over.is_same(asked):
            return over
        if known is not None and not known.is_same(asked):
            why = "is kept here already, as another one or for others: it is put anew once it is released or fetched"
            raise taken(asked.id, why)
        return known

    def check_room(self) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) when there is no room for one more."""
        if len(self.rows) >= self._most:
            raise full(f"{len(self.rows)} tensors are kept here", self._most)

    def lasting(self, ids: Iterable[TensorId]) -> tuple[TensorOffer, ...]:
        """Returns the offers that are kept until they are fetched."""
        rows = [self.rows[id_] for id_ in ids if id_ in self.rows]
        return tuple(offer for offer in rows if offer.token and not offer.consumers)

    def together(self, wanted: Sequence[WantedTensor], most_pages: int) -> list[TensorOffer]:
        """Returns the offers that one consumer may get under one grant: kept here for it alone, as expected, not on
        their way, and within `most_pages` in all.
        """
        found: dict[TensorId, TensorOffer] = {}
        for each in wanted:
            offer = self.rows.get(each.id)
            if offer is None or not offer.may_go_together or offer.pages > most_pages or offer.id in found:
                continue
            try:
                each.expected.check(offer.described)
            except PreconditionFailed:
                continue
            most_pages -= offer.pages
            found[offer.id] = offer
        return list(found.values())
