"""Tensors that this engine puts: they are sent to their consumers, or kept until the consumers fetch them.

While tensors are on their way to some consumers, later puts to the same ones wait a moment, and go together as a
bundle: one hand-over that a consumer reads at once. A bundle that a consumer does not take, for whatever reason, is not
retried: each of its tensors is then sent by itself.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import field, replace

from kvgrpc.core.events import CancelScope
from kvgrpc.core.tensors.bundles import BYTES_MAX, BundleQueue
from kvgrpc.core.tensors.descriptions import LeadAddress, Put
from kvgrpc.core.tensors.ended import too_late
from kvgrpc.core.tensors.rows import TensorOffer
from kvgrpc.core.tensors.store_layout import pages_for
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import DeadlineExceeded, InternalError, InvalidRequest, KVGrpcError, OutOfRange, Reason, Unavailable
from kvgrpc.service import telemetry
from kvgrpc.service.callers import payer
from kvgrpc.service.runner import Alarm, copied
from kvgrpc.service.tensors.delivery import RemoteStores, deliver
from kvgrpc.service.tensors.kept_tensors import KeptTensors
from kvgrpc.service.tensors.life import Life, gone

_log = logging.getLogger(__name__)
LIMITS_MAX = 1_024
"""Maximum number of consumers whose stated limit of a bundle is remembered."""
LIMIT_DIGITS_MAX = 9
"""Maximum number of digits of a limit that a consumer states; a longer one counts as 0, so nothing is bundled there."""
_ENDED_HERE = frozenset({Reason.CANCELLED, Reason.LEASE_RELEASED, Reason.LEASE_VOIDED})
"""Reasons that a consumer gives for a hand-over that its source ended."""


@dataclass(frozen=True)
class _PutRoute:
    """The values that puts must share to go together."""

    key: bytes
    consumers: tuple[LeadAddress, ...]
    ttl_s: float | None
    request_id: str
    trace: str
    tenant: str


@dataclass(eq=False)
class _PutUnderWay:
    """One put on its way to its consumers."""

    offer: TensorOffer
    put: Put
    until: float
    route: _PutRoute
    accepted: bool = False
    """True when its call was not refused at once: from then on the allocation is this lead's."""
    bundle: str = ""
    """The transfer of its bundle, while a consumer may still read it."""
    came_at: float = 0.0
    """Time at which it came, on the clock of `time.perf_counter`, while it waits for its turn; otherwise 0.0."""
    ended: bool = False
    """True when its hand-over ended before all consumers had the tensor, not by a `withdraw`: it is not sent again."""
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TensorSender:
    """The puts of one life."""

    def __init__(self, life: Life, remote: RemoteStores, kept: KeptTensors) -> None:
        self._life = life
        self._remote = remote
        self._kept_tensors = kept
        self._ways: dict[TensorOffer, _PutUnderWay] = {}
        self._sent: dict[str, list[_PutUnderWay]] = {}
        """Ways that are handed over, by transfer."""
        self._bundles: BundleQueue[_PutRoute, _PutUnderWay] = BundleQueue()
        self._most_pages = pages_for(BYTES_MAX, life.table.page_bytes)
        self._limits: dict[tuple[LeadAddress, ...], int] = {}
        """Pages that a bundle may take, by consumers that refused a larger one."""
        self._alarm = Alarm(self._due)

    async def put(self, put: Put, until: float, trace: str, caller: str) -> Sequence[TensorOffer]:
        """Serves PutTensor at the source, for the first time or again. Returns its one tensor. Raises the refusal of
        this lead or of the first consumer, and DeadlineExceeded (DEADLINE) if it is put again and the first put takes
        longer.
        """
        offer, again = self._offer(put, until, trace, caller)
        way = self._ways.get(offer)
        if way is not None and not put.asynchronous:
            await asyncio.wait((way.done,), timeout=until - self._life.time() if again else None)
            if not way.done.done():
                late = "the tensor is still on its way to its consumers"
                raise DeadlineExceeded(Reason.DEADLINE, late, metadata={"phase": "tensor"})
            if way.done.cancelled():
                raise gone(self._life.lead)
        if offer.refused is not None and not put.asynchronous:
            raise copied(offer.refused)
        return (offer,)

    def over(self, transfer_id: str, *, succeeded: bool) -> None:
        """Takes the end of a transfer. The node is busy."""
        for way in self._sent.pop(transfer_id, ()):
            way.ended = not succeeded
            self._life.table.offer_sent(way.offer, self._life.time())

    def withdraw(self, offer: TensorOffer) -> None:
        """Takes a put back. Others of its bundle go by themselves."""
        self._sent.pop(offer.transfer_id, None)
        way = self._ways.get(offer)
        if way is not None:
            self._bundles.discard(way.route, way)
            ended = self._life.table.ended.error(offer.id, offer.tenant)
            offer.refused = ended or too_late(offer.id, offer.id, Reason.TRANSFER_ENDED)
            self._over(way)
            self._life.transfers.end(way.bundle, "one of its tensors was taken back", CancelScope.BOTH)
        self._life.transfers.end(offer.transfer_id, "the tensor was taken back", CancelScope.BOTH)

    def end(self) -> None:
        """Ends the puts: the life is over."""
        self._alarm.clear()
        for way in self._ways.values():
            way.done.cancel()

    # -- puts

    def _offer(self, put: Put, until: float, trace: str, caller: str) -> tuple[TensorOffer, bool]:
        """Returns the offer, and whether it was put before. A new offer is handed over, or begins its way. The
        allocation of a put that is refused here stays its caller's.
        """
        life, table, lead = self._life, self._life.table, self._life.lead
        pages = table.check_size(put.described)
        for i, consumer in enumerate(put.consumers):
            lead.check_dial(consumer.address, f"consumers[{i}].address")
        asked = TensorOffer(
            put.id, put.described, pages, put.allocation_id, put.consumers, life.time(), put.consumer_count
        )
        asked.payer, asked.ttl_s, asked.tenant = payer(), put.ttl_s, put.tenant
        known, held = table.kept.find(asked), pages
        if known is None:
            lead.runner.node.state.pool.check_open()
            lead.runner.node.state.transfers.check_room(asked.payer)
            held = life.transfers.take_over(put.allocation_id, caller)
        try:
            if held != pages:
                what = f"the tensor takes {pages} pages, and the allocation has {held}"
                raise InvalidRequest(Reason.BLOCK_COUNT_MISMATCH, what)
            offer = table.offer(asked)
            if known is None and put.consumers:
                self._begin(offer, put, until, trace)
            elif known is None:
                self._kept_tensors.keep(offer, put, trace)
        except KVGrpcError:
            if known is None:
                life.transfers.return_to(put.allocation_id, caller)
            raise
        finally:
            life.perform()
        return offer, known is not None

    # -- ways to consumers

    def _begin(self, offer: TensorOffer, put: Put, until: float, trace: str) -> None:
        """Sends a new offer at once, or lets it wait for its turn. Raises a refusal at once."""
        route = _PutRoute(put.id.key, put.consumers, put.ttl_s, put.request_id, trace, put.tenant)
        way = _PutUnderWay(offer, put, until, route)
        self._ways[offer] = way
        self._bundles.add(way.route, way, offer.pages, self._life.time())
        self._look(way.route)
        if not (offer.transfer_id or way.done.done()):
            way.came_at = time.perf_counter()
        if way.done.done() and offer.refused is not None:
            raise copied(offer.refused)
        way.accepted = True

    def _due(self) -> None:
        """Sends what has waited long enough."""
        if not self._life.over:
            for route in self._bundles.due(self._life.time()):
                self._look(route)
            self._alarm.set(self._bundles.next_deadline())  # the alarm may have rung early
            self._life.perform()

    def _look(self, route: _PutRoute) -> None:
        """Sends the puts of a route whose turn it is."""
        most_pages = min(self._limits.get(route.consumers, self._most_pages), self._most_pages)
        while ways := self._bundles.take(route, most_pages, self._life.time()):
            sent = self._hand_over(ways)
            if sent is None and len(ways) == 1:
                self._bundles.ended(route)
            else:
                self._life.spawn(self._send_next(ways, sent))
        self._alarm.set(self._bundles.next_deadline())

    async def _send_next(self, ways: list[_PutUnderWay], sent: "_SentPuts | None") -> None:
        """Sends what was taken from a route, then what waits there."""
        route = ways[0].route
        try:
            await self._send(ways, sent)
        except Exception as defect:
            for way in ways:
                self._refuse(way, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {defect!r}"))
                self._over(way)
            raise
        finally:
            self._bundles.ended(route)
        self._look(route)
        self._life.perform()

    async def _send(self, ways: list[_PutUnderWay], sent: "_SentPuts | None") -> None:
        """Sends puts to all consumers. The hand-over ends then, even if a consumer had the tensor already and never
        came for it.
        """
        errors = [] if sent is None else await self._deliver(ways, sent)
        # A consumer that was not heard may be reading; one that refused a bundle is not.
        unheard = any(isinstance(error, Unavailable) for error in errors)
        if sent is not None:
            self._sent.pop(sent.transfer_id, None)
        if sent is not None and not unheard:
            self._end(sent)
        elif sent is not None:
            for way in ways:
                way.bundle = sent.transfer_id
        if len(ways) > 1 and (errors or sent is None):
            self._learn(ways[0].route, errors)
            await asyncio.gather(*(self._send_alone(way) for way in ways if not way.ended and not way.done.done()))
        for way in ways:
            if errors and (way.ended or len(ways) == 1):
                self._refuse(way, errors[0])
            self._over(way)
        if sent is not None and unheard:
            self._end(sent)

    def _end(self, sent: "_SentPuts") -> None:
        self._life.transfers.end(sent.transfer_id, "it was not read by all of its consumers", CancelScope.BOTH)

    async def _send_alone(self, way: _PutUnderWay) -> None:
        """Sends one put of a bundle that a consumer did not take. The consumer may have joined it to the old hand-over,
        which the source ended: then it is sent once more.
        """
        sent = self._hand_over([way])
        self._life.perform()
        if sent is None:
            return
        errors = await self._deliver([way], sent)
        if errors and errors[0].reason in _ENDED_HERE and not way.ended and not way.done.done():
            errors = await self._deliver([way], sent)
        if errors:
            self._refuse(way, errors[0])
        self._over(way)
        self._sent.pop(sent.transfer_id, None)
        self._end(sent)

    async def _deliver(self, ways: list[_PutUnderWay], sent: "_SentPuts") -> list[KVGrpcError]:
        """Delivers to all consumers. Returns the errors of those without it."""
        life, put, until = self._life, _together(ways), min([way.until for way in ways])

        def left() -> float:
            return until - life.time() if [way for way in ways if not way.done.done()] else 0.0

        sends = [
            deliver(self._remote, put, sent.token, consumer, left, ways[0].route.trace) for consumer in put.consumers
        ]
        return [error for error in await asyncio.gather(*sends) if error is not None]

    def _hand_over(self, ways: list[_PutUnderWay]) -> "_SentPuts | None":
        """Hands the pages of all puts over, for at least as long as the puts may take. Returns None if that is refused;
        a single put is over then, and may be put again.
        """
        life, limits, put = self._life, self._life.lead.config.limits, _together(ways)
        until = max([way.until for way in ways])
        for way in ways:
            if way.came_at:
                telemetry.wait_ended("turn", way.route.trace, way.came_at)
                way.came_at = 0.0
        ttl_s = min(max(put.ttl_s or limits.lease_ttl_s, until - life.time()), limits.lease_cap_s)
        offers = [way.offer for way in ways]
        try:
            token, transfer_id = life.transfers.hand_over(offers, put, ttl_s, ways[0].route.trace)
        except KVGrpcError as error:
            if len(ways) == 1:
                self._refuse(ways[0], error)
                self._life.table.offer_over(ways[0].offer)
                self._over(ways[0])
            return None
        for offer in offers:
            offer.transfer_id = transfer_id
        self._sent[transfer_id] = ways
        if len(offers) == 1:
            life.table.offered(offers[0], token, transfer_id)
        return _SentPuts(token, transfer_id)

    def _learn(self, route: _PutRoute, errors: list[KVGrpcError]) -> None:
        """Remembers the smallest limit of a bundle that these consumers stated."""
        most = [error.metadata.get("limit", "") for error in errors if isinstance(error, OutOfRange)]
        if most:
            known = [int(text) if text.isdecimal() and len(text) <= LIMIT_DIGITS_MAX else 0 for text in most]
            self._limits[route.consumers] = min(known)
            if len(self._limits) > LIMITS_MAX:
                del self._limits[next(iter(self._limits))]

    def _refuse(self, way: _PutUnderWay, error: KVGrpcError) -> None:
        """Records why a tensor is not at its consumers, unless a reason is known."""
        id_ = way.offer.id
        if way.offer.refused is None:
            way.offer.refused = error.untraced()
            _log.info("tensor %s part %d was not put: %s", id_.name, id_.part, error)

    def _over(self, way: _PutUnderWay) -> None:
        """Ends a way: all consumers have the tensor, or one is without it. The table remembers the end of an offer that
        was handed over and not taken back. Idempotent.
        """
        if self._ways.pop(way.offer, None) is None:
            return
        life = self._life
        if way.accepted:
            life.transfers.free(way.offer.allocation_id)
        if life.table.offers.get(way.offer.id) is way.offer:
            life.table.offer_sent(way.offer, life.time())
        if not way.done.done():
            way.done.set_result(None)


@dataclass(frozen=True)
class _SentPuts:
    """A hand-over to consumers."""

    token: bytes
    transfer_id: str


def _together(ways: list[_PutUnderWay]) -> Put:
    """Returns one put of all tensors of these ways."""
    if len(ways) == 1:
        return ways[0].put
    return replace(ways[0].put, bundled=tuple(tensor for way in ways[1:] for tensor in way.put.tensors))
