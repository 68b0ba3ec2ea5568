"""The staging store of a lead: its table decides, the node's transfers do the work.

The runner tells how transfers change. A life of the engine without a store has no tensors, and a new life knows none of
the old. The node is asked only when it is not busy: in a call, in a task, or when it has handled its events.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import islice
from typing import Any

from kvgrpc.core.events import CancelScope
from kvgrpc.core.tables.transfers import State, Transfer
from kvgrpc.core.tensors.descriptions import Get, Put, Release
from kvgrpc.core.tensors.rows import (
    AnswerCall,
    BringBack,
    Drop,
    Effect,
    Fetch,
    Purpose,
    Renew,
    Tensor,
    TensorOffer,
    seen,
)
from kvgrpc.core.tensors.store_layout import PAGES_MAX, page_bytes_of
from kvgrpc.core.tensors.table import TensorTable
from kvgrpc.core.tensors.waits import RETRY_DELAY_S
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.grants import check_tenant, read_claims
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import granted_timeout
from kvgrpc.core.values.owners import ANONYMOUS, meet, tenant_of
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import Exhausted, KVGrpcError, PreconditionFailed, Reason
from kvgrpc.service import telemetry
from kvgrpc.service.callers import payer
from kvgrpc.service.lead import Lead
from kvgrpc.service.runner import Alarm
from kvgrpc.service.tensors.delivery import RemoteStores, give_back
from kvgrpc.service.tensors.fetcher import SourceFetcher
from kvgrpc.service.tensors.kept_tensors import KeptTensors
from kvgrpc.service.tensors.life import Life, gone
from kvgrpc.service.tensors.pages import Memory, Pages, SpillMemory, StorePages
from kvgrpc.service.tensors.sender import TensorSender
from kvgrpc.service.tensors.store_parts import Store
from kvgrpc.service.tensors.store_transfers import error_of
from kvgrpc.service.tensors.waiting_calls import Result, WaitingCalls

TELLING_MAX = 1_024
"""Maximum number of calls in flight that tell a source that its tensors are wanted no more."""


@dataclass(frozen=True)
class GetResult:
    """The result of a GetTensor."""

    tensors: Sequence[Result]
    """One tensor; as many as go together if a source was asked for several."""
    pages: Pages | None = None
    """The tensor's allocation and pages; None for tensors kept for others."""
    token: bytes = b""
    """The grant for tensors kept for others."""


class StagingStore:
    """The tensors of this server's engine. Calls raise their refusals."""

    def __init__(self, lead: Lead, remote: RemoteStores, memory: Callable[[], Memory | None]) -> None:
        self.lead = lead
        self._remote, self._memory = remote, memory
        self._arriving: dict[str, tuple[Sequence[Tensor], bool]] = {}
        """Tensors by transfer, and whether they were fetched."""
        self._alarm = Alarm(self._due)
        self._seen_cancels = 0
        self._looking = False
        self._telling: set[asyncio.Task[int | KVGrpcError]] = set()
        self._store: Store | None = None
        self._ending: set[asyncio.Task[Any]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        lead.runner.on_life.append(self._begin)

    # -- calls

    @property
    def store(self) -> Store:
        """The store of this life. Raises PreconditionFailed (POOL_KIND_MISMATCH) if the pool is no staging store,
        Unavailable (NO_POOL, or ENGINE_LOST when the server stops).
        """
        if self._store is not None:
            return self._store
        life = self.lead.runner.node.state.life
        if life.stopping:
            raise gone(self.lead)
        life.engine  # noqa: B018 - raises if there is no pool
        raise PreconditionFailed(
            Reason.POOL_KIND_MISMATCH,
            "this engine's pool is no staging store of one rank: attach with one that store_layout makes, or set "
            "tensors.store_bytes",
        )

    def put(self, put: Put, trace: str, caller: str = ANONYMOUS) -> Awaitable[Sequence[Result]]:
        """Serves PutTensor of that principal. Returns the tensors as they are here then."""
        store, limits = self.store, self.lead.config.limits
        self.lead.runner.node.state.tombstones.check_key(put.id.key, tenant=put.tenant)
        until = self.lead.runner.time() + granted_timeout(put.timeout_s, limits.registration_timeout_s, limits)
        if put.token:
            return self._receive(store, put, until, trace, caller)
        return store.sender.put(put, until, trace, caller)

    async def get(self, get: Get, trace: str, caller: str = ANONYMOUS) -> GetResult:
        """Serves GetTensor of that principal."""
        store = self.store
        if get.source is not None:
            self.lead.check_dial(get.source.address, "source.address")
        self.lead.runner.node.state.tombstones.check_key(get.id.key, tenant=get.tenant)
        if get.bundled:
            offers, token = store.kept.lend(get, trace)
            return GetResult(offers, token=token)
        most_s = self.lead.config.limits.wait_s
        until = store.life.time() + min(get.timeout_s or most_s, most_s)
        purpose = Purpose.OFFERED if get.as_offer else Purpose.GIVEN
        fetches = get.source is not None
        number = store.waiting.begin(
            get.id, purpose, until, get.expected, fetches=fetches, caller=caller, tenant=get.tenant
        )
        try:
            if purpose is Purpose.GIVEN and (tensor := seen(store.table.tensors.get(get.id), get.tenant)):
                store.pages.hurry(tensor)
            if get.source is not None:
                store.fetcher.add(number, get, until, trace)
            wait = store.waiting.end_of(number)
            found = await (telemetry.waited("tensor", trace, wait) if trace else wait)
        finally:
            store.fetcher.end(number)
            store.waiting.leave(number)
        if isinstance(found, TensorOffer):
            return GetResult((found,), token=found.token)
        store.table.check_held(found)
        return GetResult((found,), (found.allocation_id, store.life.transfers.pages_of(found.allocation_id)))

    def release(self, release: Release, caller: str = ANONYMOUS) -> int:
        """Serves ReleaseTensors of that principal. Returns how many were here."""
        store, source = self.store, release.source
        if source is not None:
            self.lead.check_dial(source.address, "source.address")
            if len(self._telling) >= TELLING_MAX:
                raise Exhausted(Reason.QUEUE_FULL, f"{TELLING_MAX} sources are being told", retry_delay_s=RETRY_DELAY_S)
        ended = Reason.TRANSFER_ENDED
        found = store.table.release(release, ended, store.life.time(), caller)
        self._perform()
        return len(found)

    async def give_back(self, release: Release, trace: str) -> int:
        """Tells the source what was released here. Returns how many tensors it kept."""
        told = self.store.life.spawn(give_back(self._remote, release, trace))
        self._telling.add(told)
        told.add_done_callback(self._telling.discard)
        await asyncio.wait((told,))
        if told.cancelled():
            raise gone(self.lead)
        result: int | KVGrpcError = told.result()
        if isinstance(result, KVGrpcError):
            raise result
        return result

    def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins to answer a call whose caller is no task."""
        task = asyncio.get_running_loop().create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def stop(self) -> None:
        """Ends the life's tasks, the answers in progress, and the channels."""
        self._end_life()
        await asyncio.gather(*self._ending, *self._serving, return_exceptions=True)
        await self._remote.stop()

    # -- arrivals

    async def _receive(self, store: Store, put: Put, until: float, trace: str, caller: str) -> Sequence[Tensor]:
        claims = read_claims(put.token)
        check_tenant(caller, claims)
        tenant = claims.tenant or tenant_of(caller)
        source = claims.address
        self.lead.check_dial(source, "grant")
        self.lead.runner.node.state.pool.check_open()
        pages = sum([store.table.check_size(tensor.described) for tensor in put.tensors])
        if claims.token_count != pages:
            raise PreconditionFailed(
                Reason.INCOMPATIBLE_POOLS,
                f"{pages} pages are taken here, and {claims.token_count} at the source: the stores have pages of "
                "different sizes, or the grant is of other tensors",
            )
        store.table.waits.check_room(payer(), len(put.tensors))
        ttl_s = put.ttl_s or self.lead.config.limits.registration_timeout_s
        try:
            tensors = store.table.arrive(put.tensors, source, ttl_s, store.life.time(), payer(), tenant)
        finally:
            self._perform()
        try:
            numbers = store.waiting.begin_all([tensor.id for tensor in put.tensors], Purpose.STORED, until, tenant)
        except KVGrpcError as error:
            store.table.failed(tensors, error.untraced(), fetched=False)
            self._perform()
            raise
        if tensors:
            store.life.spawn(self._bring(store, tensors, put, trace, until))
        wait = store.waiting.end_of_all(numbers)
        return await (wait if tensors else telemetry.waited("tensor", trace, wait))  # others may be bringing it

    def _fetched(self, store: Store, put: Put, trace: str) -> None:
        """Begins to bring what a source gives. Raises a refusal."""
        claims, ttl_s = read_claims(put.token), self.lead.config.limits.registration_timeout_s
        self.lead.check_dial(claims.address, "grant")
        if not meet(put.tenant, claims.tenant):
            raise PreconditionFailed(Reason.PEER_FAILED, f"{claims.address} answers with another tenant's tensor")
        tenant = claims.tenant or put.tenant
        tensors = store.table.arrive(put.tensors, claims.address, ttl_s, store.life.time(), payer(), tenant)
        if tensors:
            store.life.spawn(self._bring(store, tensors, put, trace))

    async def _bring(
        self, store: Store, tensors: Sequence[Tensor], put: Put, trace: str, put_until: float | None = None
    ) -> None:
        """Gives tensors pages and begins their pull. Without `put_until` they were fetched, else put. Tensors fetched
        together that do not come are asked for again, each by itself.
        """
        transfers, fetched = store.life.transfers, put_until is None and not put.bundled
        taken: list[Pages] = []
        try:
            taken = await store.pages.take(tensors, trace, put_until)
            for tensor, (allocation_id, _) in zip(tensors, taken, strict=True):
                tensor.allocation_id = allocation_id
            transfer_id = "" if _gone(tensors) else transfers.pull([pages for _, pages in taken], put, trace)
        except KVGrpcError as error:
            store.table.failed(tensors, error.untraced(), fetched=fetched)
        else:
            for tensor in tensors:
                tensor.transfer_id = transfer_id
            self._arriving[transfer_id] = tensors, fetched
            self._end_if_unwanted(store, transfer_id)
            if (now := transfers.find(transfer_id)) is not None and now.over:  # an end in the call was not heard
                self._ended(now)
        for tensor in tensors:
            if tensor.gone and tensor.allocation_id:
                transfers.free(tensor.allocation_id)  # dropped before it had its pages
        self._perform()

    def _end_if_unwanted(self, store: Store, transfer_id: str) -> None:
        tensors, _ = self._arriving.get(transfer_id, ((), False))
        if tensors and _gone(tensors):
            del self._arriving[transfer_id]
            store.life.transfers.end(transfer_id, "the tensor is no longer wanted", CancelScope.ON_ABORT)

    # -- events of the node

    def _ended(self, transfer: Transfer) -> None:
        """Takes the end of a transfer. The node is busy: `_look` does the rest."""
        store = self._store
        if store is None:
            return
        tensors, fetched = self._arriving.pop(transfer.id, ((), False))
        if transfer.state is State.SUCCEEDED:
            for tensor in tensors:
                if not tensor.gone:
                    store.table.stored(tensor, store.life.time())
        elif tensors:
            store.table.failed(tensors, error_of(transfer.failure), fetched=fetched)
        for part in (store.sender, store.kept):
            part.over(transfer.id, succeeded=transfer.state is State.SUCCEEDED)

    def _look(self) -> None:
        """Does what was left while the node was busy."""
        store = self._store
        if self._looking or store is None:
            return
        self._looking = True
        try:
            if self.lead.runner.node.state.tombstones.cancelled != self._seen_cancels:
                self._see_cancels(store)
            if store.kept.ended:
                store.kept.look()
            if store.pages.line.places:
                store.pages.look()
        finally:
            self._looking = False
        if store.table.effects or store.table.timers.earliest < self._alarm.at:
            self._perform()

    def _see_cancels(self, store: Store) -> None:
        """Ends the tensors of requests cancelled since the last look."""
        stones = self.lead.runner.node.state.tombstones
        unseen = max(stones.cancelled - self._seen_cancels, 0)  # the end of the last life empties the table
        self._seen_cancels = stones.cancelled
        newest = (key for key in reversed(stones.keys) if stones.keys[key].error.reason is Reason.CANCELLED)
        for key in islice(newest, unseen):
            if store.table.has_request(key):
                store.table.release(Release(key, tenant=stones.keys[key].tenant), Reason.CANCELLED, store.life.time())

    # -- effects of the table

    def _perform(self) -> None:
        """Performs all effects and sets the alarm, then raises the first error."""
        store, failed = self._store, list[Exception]()
        if store is None:
            return
        while store.table.effects:
            effects, store.table.effects = store.table.effects, []
            for effect in effects:
                try:
                    self._do(store, effect)
                except Exception as error:  # noqa: BLE001 - calls wait for later effects
                    failed.append(error)
        if store.table.timers.earliest < self._alarm.at:
            self._alarm.set(store.table.timers.next_deadline())
        if failed:
            raise failed[0]

    def _do(self, store: Store, effect: Effect) -> None:
        match effect:
            case AnswerCall(wait, result):
                store.waiting.answer(wait, result)
            case Drop(tensor):
                self._end_if_unwanted(store, tensor.transfer_id)
                if tensor.allocation_id:
                    store.life.transfers.free(tensor.allocation_id)
                else:
                    store.pages.forget(tensor)
            case Renew(offers):
                store.life.transfers.renew(offers)
            case BringBack(tensor):
                store.life.spawn(store.pages.bring_back(tensor))
            case Fetch(wait):
                store.fetcher.begin(wait)
            case _:
                (store.sender if effect.offer.consumers else store.kept).withdraw(effect.offer)

    def _due(self) -> None:
        if self._store is not None:
            self._store.table.due(self._store.life.time())
            self._perform()
            self._store.pages.look()

    # -- lives

    def _begin(self) -> None:
        """Begins a new life. The node is busy."""
        self._end_life()
        engine, config = self.lead.runner.node.state.life.description, self.lead.config
        page_bytes = _page_bytes(engine)
        if engine is None or not page_bytes:
            return
        spill_pages = min(config.tensors.spill_bytes // page_bytes, PAGES_MAX)
        limits, ledger = config.tensors.limits(spill_pages, config.limits), self.lead.runner.node.state.ledger
        table = TensorTable(limits, engine.pool.groups[0].blocks, page_bytes, ledger)
        life = Life(self.lead, table, self._perform)
        pages = StorePages(life, SpillMemory(spill_pages, page_bytes, self._memory))
        kept = KeptTensors(life)
        waits, sender = WaitingCalls(life, pages.look), TensorSender(life, self._remote, kept)
        fetcher = SourceFetcher(life, self._remote, lambda put, trace: self._fetched(store, put, trace))
        store = self._store = Store(life, pages, waits, kept, sender, fetcher)
        runner = self.lead.runner
        runner.on_end.append(self._ended)
        runner.on_events.append(self._look)

    def _end_life(self) -> None:
        """Ends the life: waiting calls are refused."""
        store, self._store = self._store, None
        if store is not None:
            runner = self.lead.runner
            runner.on_end.remove(self._ended)
            runner.on_events.remove(self._look)
            store.waiting.stop()
            store.sender.end()
            store.fetcher.stop()
            self._ending = store.life.end()
        self._arriving.clear()
        self._seen_cancels = 0
        self._alarm.clear()


def _gone(tensors: Sequence[Tensor]) -> bool:
    """Returns whether all tensors were dropped."""
    return not [tensor for tensor in tensors if not tensor.gone]


def _page_bytes(engine: EngineDescription | None) -> int:
    """Returns the bytes of a page of this engine's store; 0 if it has none."""
    if engine is None or engine.pool_kind is not PoolKind.SERVER_MANAGED or engine.world_size > 1:
        return 0
    return page_bytes_of(engine.pool)
