"""The staging store of a lead: what its table decides, done with the node's transfers.

How these fare is heard from the runner. A life of the engine that has no store has no tensors; a new life knows none of
the one before. The node is asked for something only when it is not busy: in a call, in a task, or when it has handled
its events.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvgrpc.core.events import CancelScope
from kvgrpc.core.tables.transfers import State, Transfer
from kvgrpc.core.tensors.calls import Get, Put, Release
from kvgrpc.core.tensors.rows import Answer, BringBack, Drop, Effect, Fetch, Offer, Purpose, Tensor, Wait
from kvgrpc.core.tensors.store import PAGES_MAX, page_bytes_of
from kvgrpc.core.tensors.table import TensorTable
from kvgrpc.core.tensors.values import ANY, Expected, TensorId
from kvgrpc.core.tensors.waits import RETRY_DELAY_S
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.grants import read_claims
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import granted_timeout
from kvgrpc.errors import Exhausted, KVGrpcError, PreconditionFailed, Reason
from kvgrpc.service.alarm import Alarm
from kvgrpc.service.lead import Lead
from kvgrpc.service.runner import copied
from kvgrpc.service.tensors.delivery import fetch, give_back
from kvgrpc.service.tensors.life import Life, gone
from kvgrpc.service.tensors.pages import Pages, StorePages
from kvgrpc.service.tensors.remote import RemoteStores
from kvgrpc.service.tensors.sending import Sending
from kvgrpc.service.tensors.spill import Memory, SpillMemory
from kvgrpc.service.tensors.transfers import error_of

Result = Tensor | Offer
TELLING_MAX = 1_024
"""Calls that tell a source that its tensors are wanted no more."""


@dataclass(eq=False)
class _Store:
    """The store of one life."""

    life: Life
    pages: StorePages
    sending: Sending

    @property
    def table(self) -> TensorTable:
        return self.life.table


@dataclass(eq=False)
class _Fetching:
    """What asks the source of a call: one task at a time."""

    make: Callable[[], "asyncio.Task[None]"]
    task: "asyncio.Task[None] | None" = None

    def begin(self) -> None:
        """Unless it is being asked."""
        if self.task is None or self.task.done():
            self.task = self.make()

    def end(self) -> None:
        """The call waits no more."""
        if self.task is not None:
            self.task.cancel()


class Staging:
    """Tensors of this server's engine. Its calls raise what they are refused with."""

    def __init__(self, lead: Lead, remote: RemoteStores, memory: Callable[[], Memory | None]) -> None:
        self._lead, self._remote, self._memory = lead, remote, memory
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Result | KVGrpcError]] = {}
        """Of calls that wait."""
        self._fetches: dict[int, _Fetching] = {}
        """Of those among them that name a source."""
        self._arriving: dict[str, tuple[Tensor, bool]] = {}
        """By transfer; and whether it was fetched."""
        self._alarm = Alarm(self._due)
        self._seen_cancels: tuple[int, bytes] = (0, b"")
        self._looking = False
        self._telling: set[asyncio.Task[int | KVGrpcError]] = set()
        self._store: _Store | None = None
        self._ending: set[asyncio.Task[Any]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        lead.runner.on_transfer.append(self._changed)
        lead.runner.on_life.append(self._begin)
        lead.runner.on_events.append(self._look)

    # -- calls

    @property
    def store(self) -> _Store:
        """Raises PreconditionFailed (POOL_KIND_MISMATCH) where the pool is no staging store, Unavailable (NO_POOL, or
        ENGINE_LOST when the server stops).
        """
        if self._store is None and self._lead.node.state.stopping:
            raise gone(self._lead)
        self._lead.node.state.pool  # noqa: B018 - raises where there is none
        if self._store is None:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH,
                "this engine's pool is no staging store of one rank: attach with one that store_layout makes, or set "
                "tensors.store_bytes",
            )
        return self._store

    async def put(self, put: Put, trace: str) -> Result:
        """PutTensor: the tensor as it is here."""
        store, limits = self.store, self._lead.config.limits
        self._lead.node.state.check_key(put.id.key)
        until = self._lead.runner.now + granted_timeout(put.timeout_s, limits.registration_timeout_s, limits)
        if put.token:
            return await self._receive(store, put, until, trace)
        return await store.sending.put(put, until, trace)

    async def get(self, get: Get, trace: str) -> tuple[Result, Pages | None]:
        """GetTensor: the tensor, its allocation and pages; of an offer None."""
        store = self.store
        if get.source is not None:
            self._lead.check_dial(get.source.address, "source.address")
        self._lead.node.state.check_key(get.id.key)
        most_s = self._lead.config.limits.wait_s
        until = store.life.now + min(get.timeout_s or most_s, most_s)
        purpose = Purpose.OFFERED if get.as_offer else Purpose.GIVEN
        number = self._ask(store, get.id, purpose, until, get.expected, fetches=get.source is not None)
        if purpose is Purpose.GIVEN and (tensor := store.table.tensors.get(get.id)) is not None:
            store.pages.hurry(tensor)
        if get.source is not None:
            self._fetches[number] = _Fetching(lambda: store.life.spawn(self._fetch(store, number, get, until, trace)))
            if get.id not in store.table.tensors:
                self._fetches[number].begin()
        try:
            found = await self._answer_to(store, number)
        finally:
            if (fetching := self._fetches.pop(number, None)) is not None:
                fetching.end()
        if isinstance(found, Offer):
            return found, None
        store.table.check_held(found)
        return found, (found.allocation_id, store.life.transfers.pages_of(found.allocation_id))

    def release(self, release: Release) -> int:
        """ReleaseTensors: how many were here."""
        store, source = self.store, release.source
        if source is not None:
            self._lead.check_dial(source.address, "source.address")
            if len(self._telling) >= TELLING_MAX:
                raise Exhausted(Reason.QUEUE_FULL, f"{TELLING_MAX} sources are being told", retry_delay_s=RETRY_DELAY_S)
        found = store.table.release(release.key, release.names, Reason.TRANSFER_ENDED, store.life.now)
        self._perform()
        return len(found)

    async def give_back(self, release: Release, trace: str) -> int:
        """Tells the source of what was released here: how many it kept."""
        told = self.store.life.spawn(give_back(self._remote, release, trace))
        self._telling.add(told)
        told.add_done_callback(self._telling.discard)
        await asyncio.wait((told,))
        if told.cancelled():
            raise gone(self._lead)
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
        """Ends everything that is under way."""
        self._end_life()
        await asyncio.gather(*self._ending, *self._serving, return_exceptions=True)
        await self._remote.stop()

    # -- what comes

    async def _receive(self, store: _Store, put: Put, until: float, trace: str) -> Result:
        claims = read_claims(put.token)
        source = claims.address
        self._lead.check_dial(source, "grant")
        self._lead.node.state.check_open()
        pages = store.table.check_size(put.described)
        if claims.token_count != pages:
            raise PreconditionFailed(
                Reason.INCOMPATIBLE_POOLS,
                f"the tensor takes {pages} pages here, and {claims.token_count} at its source: the stores have pages "
                "of different sizes, or the grant is of another tensor",
            )
        store.table.waits.check_room()
        ttl_s = put.ttl_s or self._lead.config.limits.registration_timeout_s
        try:
            tensor = store.table.arrive(put.id, put.described, source, ttl_s, store.life.now)
        finally:
            self._perform()
        number = self._ask(store, put.id, Purpose.STORED, until)
        if tensor is not None:
            store.life.spawn(self._bring(store, tensor, put, trace, until))
        return await self._answer_to(store, number)

    async def _fetch(self, store: _Store, number: int, get: Get, until: float, trace: str) -> None:
        """Asks for what is kept elsewhere, for this call and as long as it waits, and begins to bring it."""
        table = store.table
        try:
            put = await fetch(self._remote, get, until - store.life.now, trace)
            source, ttl_s = read_claims(put.token).address, self._lead.config.limits.registration_timeout_s
            self._lead.check_dial(source, "grant")
            tensor = table.arrive(put.id, put.described, source, ttl_s, store.life.now)
        except KVGrpcError as error:
            table.not_fetched(number, error.untraced())
        else:
            if tensor is not None:
                store.life.spawn(self._bring(store, tensor, put, trace))
        self._perform()

    async def _bring(self, store: _Store, tensor: Tensor, put: Put, trace: str, put_until: float | None = None) -> None:
        """Gives it pages and begins its pull. It was put here, or, without a time for that, fetched."""
        transfers, fetched = store.life.transfers, put_until is None
        try:
            allocation_id, pages = await store.pages.take(tensor, trace, put_until)
            if tensor.gone:
                transfers.free(allocation_id)
                return
            tensor.allocation_id = allocation_id
            tensor.transfer_id = transfers.pull(tensor, pages, put, trace)
        except KVGrpcError as error:
            if not tensor.gone:
                store.table.failed(tensor.id, error.untraced(), fetched=fetched)
        else:
            self._arriving[tensor.transfer_id] = tensor, fetched
            if (now := transfers.find(tensor.transfer_id)) is not None:  # what became of it by now was not heard
                self._changed(now)
        self._perform()

    # -- what the node says

    def _changed(self, transfer: Transfer) -> None:
        """A transfer changed. The node is busy: what follows is done in `_look`."""
        store = self._store
        if store is None or not transfer.over:
            return
        tensor, fetched = self._arriving.pop(transfer.id, (None, False))
        if tensor is not None and transfer.state is State.SUCCEEDED:
            store.table.stored(tensor, store.life.now)
        elif tensor is not None:
            store.table.failed(tensor.id, error_of(transfer.failure), fetched=fetched)
        store.sending.over(transfer.id, succeeded=transfer.state is State.SUCCEEDED)

    def _look(self) -> None:
        """The node has handled its events."""
        store = self._store
        if self._looking or store is None:
            return
        self._looking = True
        try:
            self._see_cancels(store)
            store.pages.look()
        finally:
            self._looking = False
        self._perform()

    def _see_cancels(self, store: _Store) -> None:
        """Requests that were cancelled since it was looked last end here too."""
        stones = self._lead.node.state.tombstones
        newest = (len(stones), next(reversed(stones), b""))
        if newest == self._seen_cancels:
            return
        for key in reversed(stones):
            if key == self._seen_cancels[1]:
                break
            if stones[key].error.reason is Reason.CANCELLED and store.table.has_request(key):
                store.table.release(key, (), Reason.CANCELLED, store.life.now)
        self._seen_cancels = newest

    # -- what the table wants done

    def _perform(self) -> None:
        """Everything, and sets the alarm."""
        store = self._store
        if store is None:
            return
        while store.table.effects:
            effects, store.table.effects = store.table.effects, []
            for effect in effects:
                self._do(store, effect)
        self._alarm.set(store.table.next_deadline())

    def _do(self, store: _Store, effect: Effect) -> None:
        match effect:
            case Answer(wait, result):
                future = self._answers.get(wait)
                if future is not None and not future.done():
                    future.set_result(result)
            case Drop(tensor):
                if self._arriving.pop(tensor.transfer_id, None) is not None:
                    store.life.transfers.end(tensor.transfer_id, "the tensor is wanted no more", CancelScope.ON_ABORT)
                if tensor.allocation_id:
                    store.life.transfers.free(tensor.allocation_id)
                else:
                    store.pages.forget(tensor)
            case BringBack(tensor):
                store.life.spawn(store.pages.bring_back(tensor))
            case Fetch(wait):
                if (fetching := self._fetches.get(wait)) is not None:
                    fetching.begin()
            case _:
                store.sending.withdraw(effect.offer)

    def _due(self) -> None:
        if self._store is not None:
            self._store.table.due(self._store.life.now)
            self._perform()
            self._store.pages.look()

    # -- who waits

    def _ask(
        self, store: _Store, id_: TensorId, purpose: Purpose, until: float, expected: Expected = ANY,
        *, fetches: bool = False,
    ) -> int:  # fmt: skip
        """A call that waits. Raises what refuses it."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            store.table.ask(Wait(number, id_, purpose, until, expected, fetches), store.life.now)
        except KVGrpcError:
            del self._answers[number]
            raise
        finally:
            self._perform()
        return number

    async def _answer_to(self, store: _Store, number: int) -> Result:
        try:
            result = await self._answers[number]
        finally:
            store.table.waits.forget(number)
            del self._answers[number]
            if not store.life.over:
                store.pages.look()
        if store.life.over:
            raise gone(self._lead)
        if isinstance(result, KVGrpcError):
            raise copied(result)
        return result

    # -- lives

    def _begin(self) -> None:
        """A new life. The node is busy."""
        self._end_life()
        engine, config = self._lead.node.state.description, self._lead.config
        page_bytes = _page_bytes(engine)
        if engine is None or not page_bytes:
            return
        spill_pages = min(config.tensors.spill_bytes // page_bytes, PAGES_MAX)
        table = TensorTable(config.tensors.limits(spill_pages, config.limits), engine.pool.groups[0].blocks, page_bytes)
        life = Life(self._lead, table, self._perform)
        pages = StorePages(life, SpillMemory(spill_pages, page_bytes, self._memory))
        self._store = _Store(life, pages, Sending(life, self._remote))

    def _end_life(self) -> None:
        """Calls that wait are refused."""
        store, self._store = self._store, None
        if store is not None:
            self._ending = store.life.end()
        for future in self._answers.values():
            if not future.done():
                future.set_result(gone(self._lead))
        self._arriving.clear()
        self._seen_cancels = (0, b"")
        self._alarm.clear()


def _page_bytes(engine: EngineDescription | None) -> int:
    """Bytes of a page of this engine's store; 0 where it has none."""
    if engine is None or engine.pool_kind is not PoolKind.SERVER_MANAGED or engine.world_size > 1:
        return 0
    return page_bytes_of(engine.pool)
