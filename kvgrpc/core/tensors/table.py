"""The tensors of one life of an engine, as its lead sees them: which may come, who gets them, and which end.

Rules:
* A tensor has one description. A put or a call that states another one is refused before bytes move.
* A tensor that the engine holds is freed only by its release or its end: never by a deadline, a cancel, a put, or
  another caller that knows the request's key. One that an RPC caller holds also ends when it is not asked for in time.
* A tensor that nobody has asked for is freed when its time is over. Such tensors are spilled for room, oldest first.
* When somebody waits for a tensor of a request, the time of all that is here of it starts again.
* Ended names are remembered. Late calls for them are refused, and nothing is stored.
* A tensor of a tenant is unknown to callers of another one. Its name is taken until it ends.
"""

from collections.abc import Sequence
from itertools import count

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tensors.bundles import check_bundle
from kvgrpc.core.tensors.descriptions import Description, NamedTensor, Release, TensorId
from kvgrpc.core.tensors.ended import OF_PAIR, Ended, taken, too_large, too_late
from kvgrpc.core.tensors.offer_tables import TensorOffers, TensorsByRequest
from kvgrpc.core.tensors.rows import (
    TENSOR_BYTES,
    AnswerCall,
    BringBack,
    Drop,
    Effect,
    Fetch,
    Purpose,
    Renew,
    Tensor,
    TensorLimits,
    TensorOffer,
    TensorStage,
    TensorWait,
    Withdraw,
    seen,
)
from kvgrpc.core.tensors.spill import Idle, SpillPages
from kvgrpc.core.tensors.store_layout import pages_for
from kvgrpc.core.tensors.waits import RETRY_DELAY_S, OwnEnds, Waits
from kvgrpc.core.values.owners import ANONYMOUS, ENGINE_SIDE
from kvgrpc.errors import KVGrpcError, Reason, full

_GIVEN = (Purpose.GIVEN,)
_IN_STORE = (Purpose.STORED, Purpose.GIVEN)


class TensorTable:
    """All tensors and offers. `effects` lists, in order, what the shell has to do."""

    def __init__(self, limits: TensorLimits, store_pages: int, page_bytes: int, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self.limits = limits
        self.store_pages = store_pages
        self.page_bytes = page_bytes
        self.effects: list[Effect] = []
        self.timers = Timers()
        """Deadlines of all rows. Read-only outside."""
        self.waits = Waits(limits.waits, self._ledger, self.timers)
        self.ended = Ended(limits.tombstones, limits.tombstone_s, self._ledger, RowKind.TENSOR_ENDED)
        self.tensors: dict[TensorId, Tensor] = {}
        self.kept = TensorOffers(limits, self._ledger)
        self.offers = self.kept.rows
        self.spill_pages = SpillPages(limits.spill_pages)
        self._requests = TensorsByRequest()
        self._idle = Idle()
        self._own_ends = OwnEnds(limits.held_s, self.timers)
        self._numbers = count()

    # -- arrivals

    def arrive(
        self, tensors: Sequence[NamedTensor], peer: str, ttl_s: float, now: float, payer: str = "", tenant: str = ""
    ) -> list[Tensor]:
        """Registers a tensor or bundle that is to come. Returns [] when the very same tensor is here or on its way.

        Raises before anything changes: PreconditionFailed for a late tensor (TRANSFER_ENDED, CANCELLED) and for another
        one than expected (CONTENT_MISMATCH); AlreadyExists (TRANSFER_EXISTS) when another one has the name, or one of a
        bundle is here; OutOfRange (LIMIT_EXCEEDED) for a tensor larger than the store, and a bundle that takes more
        than half of it; Exhausted (LIMIT_EXCEEDED); InvalidRequest for a bundle that names a tensor twice.
        """
        bundled, pages = len(tensors) > 1, [self.check_size(row.described) for row in tensors]
        if bundled:
            check_bundle(tensors, sum(pages), self.store_pages)
        known = [tensor.id for tensor in tensors if self._is_here(tensor, tenant, told=not bundled)]
        if known and bundled:
            raise taken(known[0], "is here, or on its way")
        if known:
            return []
        if len(self.tensors) + len(tensors) > self.limits.tensors:
            raise full(f"{len(self.tensors)} tensors are here", self.limits.tensors, RETRY_DELAY_S)
        self._ledger.check(payer, TENSOR_BYTES * len(tensors))
        return [self._arrives(tensor, peer, ttl_s, now, payer, tenant) for tensor in tensors]

    def check_size(self, described: Description) -> int:
        """Returns the pages of a tensor. Raises OutOfRange (LIMIT_EXCEEDED) for more than the store has."""
        pages = pages_for(described.nbytes, self.page_bytes)
        if pages > self.store_pages:
            raise too_large(pages, self.store_pages)
        return pages

    def stored(self, tensor: Tensor, now: float) -> None:
        """Records that all bytes of a tensor are in its pages, for the first time or again."""
        tensor.move_to(TensorStage.STORED, now)
        waits = self.waits.of(tensor.id, _IN_STORE, tensor.tenant)
        if given := [wait for wait in waits if wait.purpose is Purpose.GIVEN]:
            for wait in given:
                self._hold(tensor, wait.caller, now)
        else:
            self._idle.add(tensor)
            self._own_ends.stored(tensor, now)
        for wait in waits:
            self._answer(wait, tensor)

    def failed(self, tensors: Sequence[Tensor], error: KVGrpcError, *, fetched: bool) -> None:
        """Gives puts the error of tensors that do not come now, and also calls that asked their source if they were
        `fetched`. Other calls with a source ask it. Those without wait on, unless no later try can do better.
        """
        final = not fetched and error.reason in OF_PAIR and len(tensors) == 1  # one of several is put by itself then
        for tensor in [tensor for tensor in tensors if not tensor.gone]:
            if tensor.stage is TensorStage.ARRIVING:
                self._drop(tensor)
            for wait in self.waits.of(tensor.id, _IN_STORE, tensor.tenant):
                if wait.purpose is Purpose.STORED or (fetched if wait.fetches else final):
                    self._answer(wait, error)
                elif wait.fetches:
                    self.effects.append(Fetch(wait.number))

    def not_fetched(self, number: int, error: KVGrpcError) -> None:
        """Gives a call the error of the source that it asked, unless the tensor comes from elsewhere."""
        wait = self.waits.find(number)
        if wait is not None and wait.id not in self.tensors:
            self._answer(wait, error)

    # -- calls that ask

    def ask(self, wait: TensorWait, now: float) -> None:
        """Gives a call its tensor, or lets it wait. Raises the error that an AnswerCall would contain, and Exhausted
        (QUEUE_FULL, LIMIT_EXCEEDED).
        """
        self.ended.check(wait.id, wait.tenant)
        offer, tensor = seen(self.offers.get(wait.id), wait.tenant), seen(self.tensors.get(wait.id), wait.tenant)
        if wait.purpose is Purpose.OFFERED and offer is not None:
            wait.expected.check(offer.described)
            if offer.token:
                self.effects.append(AnswerCall(wait.number, offer))
                return
        elif tensor is None and offer is not None:
            raise taken(wait.id, "is this engine's own: it is kept for others")
        if wait.purpose is Purpose.OFFERED or tensor is None:
            self.waits.add(wait)
            self._renew(wait, now)
            return
        wait.expected.check(tensor.described)
        if wait.purpose is Purpose.STORED and tensor.stage is not TensorStage.ARRIVING:
            self.effects.append(AnswerCall(wait.number, tensor))
        elif tensor.stage in (TensorStage.STORED, TensorStage.HELD):
            self._not_idle(tensor)
            self._hold(tensor, wait.caller, now)
            self.effects.append(AnswerCall(wait.number, tensor))
        else:
            self.waits.add(wait)
            self._not_idle(tensor)
            if tensor.stage is TensorStage.SPILLED:
                tensor.move_to(TensorStage.RETURNING, now)
                self.effects.append(BringBack(tensor))

    def not_taken(self, tensor: Tensor, now: float) -> None:
        """Takes a tensor back from a caller that is gone. If no other caller was given it, it is stored as before, for
        the next one. A tensor that the engine has stays the engine's.
        """
        tensor.given -= 1
        if not tensor.gone and not tensor.given and tensor.holder not in ENGINE_SIDE:
            tensor.holder = ""
            self._not_idle(tensor)
            self.stored(tensor, now)

    def check_held(self, tensor: Tensor) -> None:
        """Raises PreconditionFailed for a tensor that ended before its caller took it."""
        if tensor.gone:
            raise self.ended.error(tensor.id, tensor.tenant) or too_late(tensor.id, tensor.id, Reason.TRANSFER_ENDED)

    # -- offers

    def offer(self, offer: TensorOffer) -> TensorOffer:
        """Adds an offer, or returns the one that the same put made. Raises PreconditionFailed (TRANSFER_ENDED,
        CANCELLED, CONTENT_MISMATCH), AlreadyExists (TRANSFER_EXISTS) or Exhausted (LIMIT_EXCEEDED).
        """
        id_ = offer.id
        self.ended.check(id_, offer.tenant)
        known = self.kept.find(offer)
        if known is not None:
            return known
        if id_ in self.tensors:
            raise taken(id_, "came from another engine")
        self._check_expected(id_, Purpose.OFFERED, offer.described, offer.tenant)
        self.kept.check_room()
        self._ledger.enter(RowKind.TENSOR, id_, offer.payer, offer.kept_bytes)
        offer.number = next(self._numbers)
        self.offers[id_] = offer
        self._requests.add(id_)
        return offer

    def offered(self, offer: TensorOffer, token: bytes, transfer_id: str) -> None:
        """Records that the offer's hand-over stands."""
        offer.token, offer.transfer_id = token, transfer_id
        for wait in self.waits.of(offer.id, (Purpose.OFFERED,), offer.tenant):
            self._answer(wait, offer)

    def offer_over(self, offer: TensorOffer) -> None:
        """Removes an offer that is lost or was taken back."""
        if self.offers.get(offer.id) is offer:
            del self.offers[offer.id]
            self._forget(offer.id)

    def offer_sent(self, offer: TensorOffer, now: float) -> None:
        """Removes an offer, and remembers how it was put."""
        self.offer_over(offer)
        self.kept.sent.add(offer.id, offer, now, offer.kept_bytes)
        self._forget_later()

    # -- ends

    def release(self, asked: Release, reason: Reason, now: float, caller: str = ANONYMOUS) -> list[TensorId]:
        """Ends the named tensors of a request, or without names the whole request, also for tensors to come, as far as
        its tenant knows of them. Keeps tensors that their holder has not released (`Tensor.outlasts`). Returns the ids
        that were here and have ended.
        """
        wanted, key, tenant = list(dict.fromkeys(asked.names)), asked.key, asked.tenant
        for name in wanted or (key,):
            self.ended.end(name, tenant, reason, now)
        self._forget_later()
        found = []
        for id_ in wanted or list(self._requests.of(key)):
            tensor, offer = seen(self.tensors.get(id_), tenant), seen(self.offers.get(id_), tenant)
            if tensor is not None and not tensor.outlasts(reason, caller):
                found.append(id_)
                self._drop(tensor)
            elif offer is not None:
                found.append(id_)
                self.offer_over(offer)
                self.effects.append(Withdraw(offer))
        for id_ in wanted or self.waits.ids(key):
            error = too_late(id_, id_ if wanted else key, reason)
            for wait in self.waits.of(id_, tuple(Purpose), tenant):
                self._answer(wait, error)
        return found

    def has_request(self, key: bytes) -> bool:
        """Returns whether a tensor or an offer of the request is here or waited for."""
        return key in self._requests or bool(self.waits.ids(key))

    def due(self, now: float) -> None:
        """Ends all that is due: waits, tensors that end by themselves, remembered names."""
        for timer, name in self.timers.due(now):
            if timer is Timer.TENSOR_WAIT:
                wait, error = self.waits.expire(name)
                self.effects.append(AnswerCall(wait.number, error))
            elif timer is Timer.TENSOR_TTL:
                self._drop(self._own_ends.of(name))
            else:
                self.ended.expire(now)
                self.kept.sent.expire(now)
                self._forget_later()

    # -- room

    def spill(self, pages: int, now: float) -> list[Tensor]:
        """Returns the tensors to copy out of the store to free `pages` more pages, or [] if that is impossible."""
        chosen = self._idle.choose(pages, self.spill_pages.free)
        for tensor in chosen:
            self._idle.discard(tensor)
            tensor.move_to(TensorStage.SPILLING, now)
            tensor.copying = True
            tensor.slots = self.spill_pages.take(tensor.pages)
        return chosen

    def spilled(self, tensor: Tensor, now: float, *, copied: bool = True) -> str:
        """Records a tensor as outside the store and returns its allocation, which is free now. Returns "" for a tensor
        that was asked for meanwhile or could not be copied. Such a tensor stays in its pages.
        """
        if tensor.gone or not copied or self.waits.of(tensor.id, _GIVEN, tensor.tenant):
            return self.returned(tensor, now)
        tensor.copying = False
        tensor.move_to(TensorStage.SPILLED, now)
        self._own_ends.stored(tensor, now)
        freed, tensor.allocation_id = tensor.allocation_id, ""
        return freed

    def returning(self, tensor: Tensor, allocation_id: str) -> None:
        """Records that a tensor has pages in the store and is being copied into them."""
        tensor.allocation_id, tensor.copying = allocation_id, True

    def returned(self, tensor: Tensor, now: float) -> str:
        """Records a tensor as back in the store. Returns the free allocation if it was dropped meanwhile, or ""."""
        tensor.copying = False
        self.spill_pages.free_of(tensor)
        if tensor.gone:
            return tensor.allocation_id
        self.stored(tensor, now)
        return ""

    def stays_out(self, tensor: Tensor, error: KVGrpcError, now: float) -> str:
        """Records that a tensor could not come back, for lack of room or because its copy failed. Its waiting calls are
        refused and may ask again. Returns its allocation, which is free now.
        """
        tensor.copying = False
        freed, tensor.allocation_id = tensor.allocation_id, ""
        if tensor.gone:
            self.spill_pages.free_of(tensor)
            return freed
        tensor.move_to(TensorStage.SPILLED, now)
        self._own_ends.stored(tensor, now)
        for wait in self.waits.of(tensor.id, _GIVEN, tensor.tenant):
            self._answer(wait, error)
        return freed

    # -- helpers

    def _renew(self, wait: TensorWait, now: float) -> None:
        """Renews all that is here of the request for which a call waits."""
        rows = self._requests.renewed(wait.id.key, now)
        for id_ in rows:
            if (tensor := seen(self.tensors.get(id_), wait.tenant)) is not None:
                self._own_ends.renewed(tensor, now, self.limits.kept_s)
        if kept := self.kept.lasting(rows, wait.tenant):
            self.effects.append(Renew(kept))

    def _is_here(self, tensor: NamedTensor, tenant: str, *, told: bool) -> bool:
        """Returns whether a tensor is here or on its way. Raises the error for one that may not come."""
        id_ = tensor.id
        self.ended.check(id_, tenant)
        known = self.tensors.get(id_)
        if known is not None:
            if known.described != tensor.described or seen(known, tenant) is None:
                raise taken(id_, "was put here already, and is another one")
            return True
        if id_ in self.offers:
            raise taken(id_, "is this engine's own")
        self._check_expected(id_, Purpose.GIVEN, tensor.described, tenant, told=told)
        return False

    def _arrives(self, named: NamedTensor, peer: str, ttl_s: float, now: float, payer: str, tenant: str) -> Tensor:
        id_, pages = named.id, pages_for(named.described.nbytes, self.page_bytes)
        tensor = Tensor(id_, named.described, pages, peer, now, ttl_s, next(self._numbers), now, tenant=tenant)
        self.tensors[id_] = tensor
        self._ledger.keep(RowKind.TENSOR, id_, payer, TENSOR_BYTES)
        self._requests.add(id_)
        return tensor

    def _check_expected(
        self, id_: TensorId, purpose: Purpose, described: Description, tenant: str, *, told: bool = True
    ) -> None:
        """Raises the error for a tensor that differs from what a call expects. With `told`, that call gets it too.
        Calls are not told about a bundle, because each of its tensors is put again by itself.
        """
        for wait, error in self.waits.unlike(id_, purpose, described, tenant):
            if told:
                self._answer(wait, error)
            raise error

    def _hold(self, tensor: Tensor, caller: str, now: float) -> None:
        tensor.hold(now, caller)
        self._own_ends.held(tensor, now)

    def _not_idle(self, tensor: Tensor) -> None:
        """Marks a tensor as asked for or dropped."""
        self._idle.discard(tensor)
        self._own_ends.never(tensor)

    def _drop(self, tensor: Tensor) -> None:
        del self.tensors[tensor.id]
        self._not_idle(tensor)
        self._forget(tensor.id)
        tensor.gone = True
        if not tensor.copying:
            self.spill_pages.free_of(tensor)
            self.effects.append(Drop(tensor))

    def _forget_later(self) -> None:
        """Sets the deadlines of the oldest remembered rows, unless they are set."""
        for name, rows in ("ended", self.ended), ("sent", self.kept.sent):
            if self.timers.when(Timer.TENSOR_FORGET, name) is None and (when := rows.next_deadline()) is not None:
                self.timers.set(Timer.TENSOR_FORGET, name, when)

    def _forget(self, id_: TensorId) -> None:
        self._ledger.drop(RowKind.TENSOR, id_)
        self._requests.drop(id_)

    def _answer(self, wait: TensorWait, result: Tensor | TensorOffer | KVGrpcError) -> None:
        self.waits.forget(wait.number)
        self.effects.append(AnswerCall(wait.number, result))
