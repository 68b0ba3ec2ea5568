"""Tensors of this engine that are kept for others or on their way to them, past ones, and what is here by request."""

from collections.abc import Iterable, Sequence, Set

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.remembered import Remembered
from kvgrpc.core.tensors.descriptions import TensorId, WantedTensor
from kvgrpc.core.tensors.ended import taken
from kvgrpc.core.tensors.rows import TensorLimits, TensorOffer, seen
from kvgrpc.core.tensors.waits import RETRY_DELAY_S
from kvgrpc.errors import PreconditionFailed, full

RENEW_S = 1.0
"""Minimum time between two renewals of a request, in seconds."""


class TensorsByRequest:
    """Tensors and offers here, by transfer key."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[TensorId, None]] = {}
        self._renewed: dict[bytes, float] = {}
        """Time of each request's last renewal."""

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def add(self, id_: TensorId) -> None:
        self._of.setdefault(id_.key, {})[id_] = None

    def drop(self, id_: TensorId) -> None:
        """Removes a tensor or an offer."""
        of = self._of[id_.key]
        del of[id_]
        if not of:
            del self._of[id_.key]
            self._renewed.pop(id_.key, None)

    def of(self, key: bytes) -> Set[TensorId]:
        """Returns the ids here of a request, in the order of their arrival."""
        return self._of.get(key, {}).keys()

    def renewed(self, key: bytes, now: float) -> Set[TensorId]:
        """Returns the ids here of a request that somebody waits for, and counts them as renewed. Empty when it is too
        soon for another renewal.
        """
        before = self._renewed.get(key)
        if key not in self._of or (before is not None and now < before + RENEW_S):
            return frozenset()
        self._renewed[key] = now
        return self._of[key].keys()


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
            raise full(f"{len(self.rows)} tensors are kept here", self._most, RETRY_DELAY_S)

    def lasting(self, ids: Iterable[TensorId], tenant: str) -> tuple[TensorOffer, ...]:
        """Returns the offers that are kept until they are fetched, as callers of a tenant see them."""
        rows = [seen(self.rows.get(id_), tenant) for id_ in ids]
        return tuple(offer for offer in rows if offer is not None and offer.token and not offer.consumers)

    def together(self, wanted: Sequence[WantedTensor], most_pages: int, tenant: str = "") -> list[TensorOffer]:
        """Returns the offers that one consumer of a tenant may get under one grant: kept here for it alone, as
        expected, not on their way, of one tenant, and within `most_pages` in all.
        """
        found: dict[TensorId, TensorOffer] = {}
        for each in wanted:
            offer = seen(self.rows.get(each.id), tenant)
            if offer is None or not offer.may_go_together or offer.pages > most_pages or offer.id in found:
                continue
            if any(other.tenant != offer.tenant for other in found.values()):
                continue
            try:
                each.expected.check(offer.described)
            except PreconditionFailed:
                continue
            most_pages -= offer.pages
            found[offer.id] = offer
        return list(found.values())
