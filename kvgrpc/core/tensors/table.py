"""The tensors of one life of an engine, as its lead sees them: what may come, what goes to whom, what ends.

Rules:
* A tensor has one description. What is put, expected and stored under one name agrees, or is refused before bytes move.
* What the engine holds is freed by its release, or by its end: never by a deadline, a cancel or a put, nor by another
  caller that knows the request's key. What a caller by RPC holds also ends when the caller does not ask again in time.
* What nobody has asked for is freed when its time is over, and is what makes room by being spilled, oldest first.
* Of a request of which somebody waits for something, all that is here lasts anew.
* What has ended is remembered: what comes late for it is refused, and stored nowhere.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tensors.bundles import check_bundle
from kvgrpc.core.tensors.ended import Ended, too_late
from kvgrpc.core.tensors.offers import Offers
from kvgrpc.core.tensors.own_ends import OwnEnds
from kvgrpc.core.tensors.refusals import full, taken
from kvgrpc.core.tensors.requests import Requests
from kvgrpc.core.tensors.rows import (
    TENSOR_BYTES,
    Answer,
    BringBack,
    Drop,
    Effect,
    Fetch,
    Offer,
    Purpose,
    Renew,
    Stage,
    Tensor,
    TensorLimits,
    Wait,
    Withdraw,
)
from kvgrpc.core.tensors.spill import Idle, SpillPages
from kvgrpc.core.tensors.store import pages_for
from kvgrpc.core.tensors.values import Description, Named, TensorId
from kvgrpc.core.tensors.waits import Waits
from kvgrpc.core.values.owners import ANONYMOUS, ENGINE_SIDE
from kvgrpc.errors import KVGrpcError, OutOfRange, Reason

_GIVEN = (Purpose.GIVEN,)
_IN_STORE = (Purpose.STORED, Purpose.GIVEN)


class TensorTable:
    """All of it. What is to be done stands in `effects`, in order, for the shell to take."""

    def __init__(self, limits: TensorLimits, store_pages: int, page_bytes: int, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self.limits = limits
        self.store_pages = store_pages
        self.page_bytes = page_bytes
        self.effects: list[Effect] = []
        self.waits = Waits(limits.waits, self._ledger)
        self.ended = Ended(limits.tombstones, limits.tombstone_s, self._ledger, "ended")
        self.tensors: dict[TensorId, Tensor] = {}
        self.kept = Offers(limits, self._ledger)
        self.offers = self.kept.rows
        self.spill_pages = SpillPages(limits.spill_pages)
        self._requests = Requests()
        self._idle = Idle()
        self._own_ends = OwnEnds(limits.held_s)
        self._numbers = count()

    # -- what comes from elsewhere

    def arrive(self, tensors: Sequence[Named], peer: str, ttl_s: float, now: float, payer: str = "") -> list[Tensor]:
        """A tensor, or a bundle, is to come here; nothing where the very same tensor is here, or on its way.

        Raises what refuses it, before anything changes: PreconditionFailed for what comes too late (TRANSFER_ENDED,
        CANCELLED), and for another one than is expected (CONTENT_MISMATCH); AlreadyExists (TRANSFER_EXISTS) where
        another one has the name, or one of a bundle is here; OutOfRange (LIMIT_EXCEEDED) for a tensor that is larger
        than the store, and a bundle that takes more than half of it; Exhausted (LIMIT_EXCEEDED); InvalidRequest for a
        bundle that names a tensor twice.
        """
        bundled = len(tensors) > 1
        if bundled:
            check_bundle(tensors, sum(self.check_size(row.described) for row in tensors), self.store_pages)
        known = [tensor.id for tensor in tensors if self._is_here(tensor, told=not bundled)]
        if known and bundled:
            raise taken(known[0], "is here, or on its way")
        if known:
            return []
        if len(self.tensors) + len(tensors) > self.limits.tensors:
            raise full(f"{len(self.tensors)} tensors are here", self.limits.tensors)
        self._ledger.check(payer, TENSOR_BYTES * len(tensors))
        return [self._arrives(tensor, peer, ttl_s, now, payer) for tensor in tensors]

    def check_size(self, described: Description) -> int:
        """Pages that it takes. Raises OutOfRange (LIMIT_EXCEEDED) for more than the store has."""
        pages = pages_for(described.nbytes, self.page_bytes)
        if pages > self.store_pages:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED,
                f"the tensor takes {pages} pages; the store has {self.store_pages}: put it in several parts",
                metadata={"limit": str(self.store_pages)},
            )
        return pages

    def stored(self, tensor: Tensor, now: float) -> None:
        """All of it is in its pages: for the first time, or again."""
        tensor.move_to(Stage.STORED, now)
        waits = self.waits.of(tensor.id, _IN_STORE)
        if given := [wait for wait in waits if wait.purpose is Purpose.GIVEN]:
            for wait in given:
                self._hold(tensor, wait.caller, now)
        else:
            self._idle.add(tensor)
            self._own_ends.stored(tensor, now)
        for wait in waits:
            self._answer(wait, tensor)

    def failed(self, tensors: Sequence[Tensor], error: KVGrpcError, *, fetched: bool) -> None:
        """They do not come, this time: whoever put them hears it, and if they were `fetched` whoever asked their
        source. Who waits for a put goes on, and who has a source asks that.
        """
        for tensor in tensors:
            if tensor.gone:
                continue
            if tensor.stage is Stage.ARRIVING:
                self._drop(tensor)
            for wait in self.waits.of(tensor.id, _IN_STORE):
                if wait.purpose is Purpose.STORED or (fetched and wait.fetches):
                    self._answer(wait, error)
                elif wait.fetches:
                    self.effects.append(Fetch(wait.number))

    def not_fetched(self, number: int, error: KVGrpcError) -> None:
        """The source that this call asked does not give it: the call hears it, unless it comes from elsewhere."""
        wait = self.waits.find(number)
        if wait is not None and wait.id not in self.tensors:
            self._answer(wait, error)

    # -- who asks

    def ask(self, wait: Wait, now: float) -> None:
        """A call waits for a tensor, or has it at once. Raises what refuses it, as an Answer would: also Exhausted
        (QUEUE_FULL).
        """
        self._check_alive(wait.id)
        offer, tensor = self.offers.get(wait.id), self.tensors.get(wait.id)
        if wait.purpose is Purpose.OFFERED and offer is not None:
            wait.expected.check(offer.described)
            if offer.token:
                self.effects.append(Answer(wait.number, offer))
                return
        elif tensor is None and offer is not None:
            raise taken(wait.id, "is this engine's own: it is kept for others")
        if wait.purpose is Purpose.OFFERED or tensor is None:
            self._waits(wait, now)
            return
        wait.expected.check(tensor.described)
        if wait.purpose is Purpose.STORED and tensor.stage is not Stage.ARRIVING:
            self.effects.append(Answer(wait.number, tensor))
        elif tensor.stage in (Stage.STORED, Stage.HELD):
            self._not_idle(tensor)
            self._hold(tensor, wait.caller, now)
            self.effects.append(Answer(wait.number, tensor))
        else:
            self.waits.add(wait)
            self._not_idle(tensor)
            if tensor.stage is Stage.SPILLED:
                tensor.move_to(Stage.RETURNING, now)
                self.effects.append(BringBack(tensor))

    def not_taken(self, tensor: Tensor, now: float) -> None:
        """A caller that was given the tensor is gone. Where no other one was, the tensor is stored as before, for who
        asks next; a tensor that the engine has stays the engine's.
        """
        tensor.given -= 1
        if not tensor.gone and not tensor.given and tensor.holder not in ENGINE_SIDE:
            tensor.holder = ""
            self._not_idle(tensor)
            self.stored(tensor, now)

    def check_held(self, tensor: Tensor) -> None:
        """Raises PreconditionFailed for one that was given and has ended before its caller took it."""
        if tensor.gone:
            raise self.ended.error(tensor.id) or too_late(tensor.id, tensor.id, Reason.TRANSFER_ENDED)

    # -- what is kept for others

    def offer(self, offer: Offer) -> Offer:
        """A tensor of this engine is kept for others, or is already, or was. Raises PreconditionFailed (TRANSFER_ENDED,
        CANCELLED, CONTENT_MISMATCH), AlreadyExists (TRANSFER_EXISTS), Exhausted (LIMIT_EXCEEDED).
        """
        id_ = offer.id
        self._check_alive(id_)
        known = self.kept.find(offer)
        if known is not None:
            return known
        if id_ in self.tensors:
            raise taken(id_, "came from another engine")
        self._check_expected(id_, Purpose.OFFERED, offer.described)
        self.kept.check_room()
        self._ledger.enter(RowKind.TENSOR, id_, offer.payer, offer.kept_bytes)
        offer.number = next(self._numbers)
        self.offers[id_] = offer
        self._requests.add(id_)
        return offer

    def offered(self, offer: Offer, token: bytes, transfer_id: str) -> None:
        """Its hand-over stands."""
        offer.token, offer.transfer_id = token, transfer_id
        for wait in self.waits.of(offer.id, (Purpose.OFFERED,)):
            self._answer(wait, offer)

    def offer_over(self, offer: Offer) -> None:
        """It is kept no more: it is lost, or was taken back."""
        if self.offers.get(offer.id) is offer:
            del self.offers[offer.id]
            self._forget(offer.id)

    def offer_sent(self, offer: Offer, now: float) -> None:
        """It is kept no more, and how it was put is remembered."""
        self.offer_over(offer)
        self.kept.sent.add(offer.id, offer, now, offer.kept_bytes)

    # -- ends

    def release(
        self, key: bytes, names: Iterable[TensorId], reason: Reason, now: float, caller: str = ANONYMOUS
    ) -> list[TensorId]:
        """Tensors of a request are wanted no more, or, without names, all of them, and those to come; but not what the
        engine holds and has not released (`Tensor.outlasts`). The ones that were here.
        """
        wanted = list(dict.fromkeys(names))
        for name in wanted or (key,):
            self.ended.add(name, reason, now)
        here = self._requests.of(key)
        found = []
        for id_ in wanted or list(here):
            tensor = self.tensors.get(id_)
            if id_ in here and (tensor is None or not tensor.outlasts(reason, caller)):
                found.append(id_)
                self._end(id_)
        for id_ in wanted or self.waits.ids(key):
            error = too_late(id_, id_ if wanted else key, reason)
            for wait in self.waits.of(id_, tuple(Purpose)):
                self._answer(wait, error)
        return found

    def has_request(self, key: bytes) -> bool:
        """Whether something of it is here, or waited for."""
        return key in self._requests or bool(self.waits.ids(key))

    def due(self, now: float) -> None:
        """What is due ends: waits, what nobody has asked for, what is remembered."""
        self.effects += [Answer(wait.number, error) for wait, error in self.waits.due(now)]
        self.ended.expire(now)
        self.kept.sent.expire(now)
        for tensor in self._own_ends.due(now):
            self._drop(tensor)

    def next_deadline(self) -> float | None:
        """When `due` has something to do."""
        parts = (self.waits, self.ended, self.kept.sent, self._own_ends)
        return min((time for part in parts if (time := part.next_deadline()) is not None), default=None)

    # -- room

    def spill(self, pages: int, now: float) -> list[Tensor]:
        """What to copy out of the store so that so many more pages are free; nothing where that does not do."""
        chosen = self._idle.choose(pages, self.spill_pages.free)
        for tensor in chosen:
            self._idle.discard(tensor)
            tensor.move_to(Stage.SPILLING, now)
            tensor.copying = True
            tensor.slots = self.spill_pages.take(tensor.pages)
        return chosen

    def spilled(self, tensor: Tensor, now: float, *, copied: bool = True) -> str:
        """It is outside of the store: the allocation that is free now. One that was asked for meanwhile, or could not
        be copied, stays in its pages, and the allocation is none.
        """
        if tensor.gone or not copied or self.waits.of(tensor.id, _GIVEN):
            return self.returned(tensor, now)
        tensor.copying = False
        tensor.move_to(Stage.SPILLED, now)
        self._own_ends.stored(tensor, now)
        freed, tensor.allocation_id = tensor.allocation_id, ""
        return freed

    def returning(self, tensor: Tensor, allocation_id: str) -> None:
        """It has pages in the store, and is being copied into them."""
        tensor.allocation_id, tensor.copying = allocation_id, True

    def returned(self, tensor: Tensor, now: float) -> str:
        """It is in the store: the allocation that is free then, of one that was dropped meanwhile."""
        tensor.copying = False
        self._free(tensor)
        if tensor.gone:
            return tensor.allocation_id
        self.stored(tensor, now)
        return ""

    def stays_out(self, tensor: Tensor, error: KVGrpcError, now: float) -> str:
        """There was no room for it in the store, or it could not be copied: who still waits for it is refused, and may
        ask again. The allocation that is free then.
        """
        tensor.copying = False
        freed, tensor.allocation_id = tensor.allocation_id, ""
        if tensor.gone:
            self._free(tensor)
            return freed
        tensor.move_to(Stage.SPILLED, now)
        self._own_ends.stored(tensor, now)
        for wait in self.waits.of(tensor.id, _GIVEN):
            self._answer(wait, error)
        return freed

    # -- parts of the above

    def _waits(self, wait: Wait, now: float) -> None:
        """For what is not here; what is here of its request lasts anew. Raises Exhausted (QUEUE_FULL)."""
        self.waits.add(wait)
        rows = self._requests.renewed(wait.id.key, now)
        for tensor in filter(None, map(self.tensors.get, rows)):
            self._own_ends.renewed(tensor, now, self.limits.kept_s)
        if kept := self.kept.lasting(rows):
            self.effects.append(Renew(kept))

    def _is_here(self, tensor: Named, *, told: bool) -> bool:
        """Or on its way. Raises what refuses one that is to come; `told`: also to who asked for another one."""
        id_ = tensor.id
        self._check_alive(id_)
        known = self.tensors.get(id_)
        if known is not None:
            if known.described != tensor.described:
                raise taken(id_, "was put here already, and is another one")
            return True
        if id_ in self.offers:
            raise taken(id_, "is this engine's own")
        self._check_expected(id_, Purpose.GIVEN, tensor.described, told=told)
        self.check_size(tensor.described)
        return False

    def _arrives(self, named: Named, peer: str, ttl_s: float, now: float, payer: str) -> Tensor:
        id_, pages = named.id, self.check_size(named.described)
        tensor = Tensor(id_, named.described, pages, peer, now, ttl_s, next(self._numbers), now)
        self.tensors[id_] = tensor
        self._ledger.keep(RowKind.TENSOR, id_, payer, TENSOR_BYTES)
        self._requests.add(id_)
        return tensor

    def _check_alive(self, id_: TensorId) -> None:
        if (error := self.ended.error(id_)) is not None:
            raise error

    def _check_expected(self, id_: TensorId, purpose: Purpose, described: Description, *, told: bool = True) -> None:
        """Who asked for another one hears it at once, as whoever put this one does; of a bundle only the latter, as
        each of its tensors is put again by itself.
        """
        for wait, error in self.waits.unlike(id_, purpose, described):
            if told:
                self._answer(wait, error)
            raise error

    def _hold(self, tensor: Tensor, caller: str, now: float) -> None:
        """The caller has the tensor."""
        tensor.hold(now, caller)
        self._own_ends.held(tensor, now)

    def _not_idle(self, tensor: Tensor) -> None:
        """It was asked for, or dropped."""
        self._idle.discard(tensor)
        self._own_ends.never(tensor)

    def _end(self, id_: TensorId) -> None:
        if id_ in self.tensors:
            self._drop(self.tensors[id_])
        else:
            offer = self.offers[id_]
            self.offer_over(offer)
            self.effects.append(Withdraw(offer))

    def _drop(self, tensor: Tensor) -> None:
        del self.tensors[tensor.id]
        self._not_idle(tensor)
        self._forget(tensor.id)
        tensor.gone = True
        if not tensor.copying:
            self._free(tensor)
            self.effects.append(Drop(tensor))

    def _free(self, tensor: Tensor) -> None:
        self.spill_pages.give_back(tensor.slots)
        tensor.slots = ()

    def _forget(self, id_: TensorId) -> None:
        self._ledger.drop(RowKind.TENSOR, id_)
        self._requests.drop(id_)

    def _answer(self, wait: Wait, result: Tensor | Offer | KVGrpcError) -> None:
        self.waits.forget(wait.number)
        self.effects.append(Answer(wait.number, result))
