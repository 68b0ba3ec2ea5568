"""Pages of the store: given out in turn, with room made by spilling into plain memory that no data path reaches."""

import asyncio
import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.tensors.descriptions import TensorId
from kvgrpc.core.tensors.line import Line, LinePlace
from kvgrpc.core.tensors.rows import Purpose, Tensor
from kvgrpc.core.tensors.waits import RETRY_DELAY_S
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.errors import Exhausted, InternalError, KVGrpcError, Reason
from kvgrpc.service import telemetry
from kvgrpc.service.runner import Alarm
from kvgrpc.service.tensors.life import Life

_log = logging.getLogger(__name__)
Memory = NDArray[np.uint8]


class SpillMemory:
    """Memory of `pages` pages. `store` returns the pool's memory, or None if this process does not have it."""

    def __init__(self, pages: int, page_bytes: int, store: Callable[[], Memory | None]) -> None:
        self._page_bytes = page_bytes
        self._store = store
        # The system zeroes pages on first use: a spill that is never used costs nothing.
        self._pages: Memory | None = None
        if pages:
            try:
                mapping = mmap.mmap(-1, pages * page_bytes)
            except OSError as error:  # the server's start checked that it fits
                _log.error("nothing is spilled: %d bytes did not fit: %s", pages * page_bytes, error)
            else:
                self._pages = np.frombuffer(mapping, dtype=np.uint8).reshape(pages, page_bytes)

    @property
    def usable(self) -> bool:
        """True if tensors can be copied there."""
        return self._pages is not None and self._store() is not None

    def copier(self, pages: Sequence[int], slots: Sequence[int], *, out: bool) -> Callable[[], None]:
        """Returns a function, for a thread, that copies pages of the store out to the slots, or back."""
        memory, spill = self._store(), self._pages
        assert memory is not None, "it is usable"
        assert spill is not None, "it is usable"
        store = memory[: len(memory) // self._page_bytes * self._page_bytes].reshape(-1, self._page_bytes)

        def copy() -> None:
            for page, slot in zip(pages, slots, strict=True):
                if out:
                    spill[slot] = store[page]
                else:
                    store[page] = spill[slot]

        return copy


_log = logging.getLogger(__name__)
HELD_S = 0.5
"""Maximum time a put waits here for pages before it is told to come again, in seconds. It is long enough that a store
whose tensors are used as they come always has waiting puts.
"""
BUNDLE_HELD_S = 0.1
"""Maximum time a bundle waits for pages, in seconds. Then each of its tensors is put or fetched by itself: there may be
room for one that the engine waits for, though not for all.
"""
Pages = tuple[str, Ids]
"""An allocation and its pages."""


@dataclass(eq=False)
class _WantedPages:
    tensors: Sequence[Tensor]
    place: LinePlace
    was_put: bool
    trace: str
    future: asyncio.Future[list[Pages]]

    @property
    def gone(self) -> bool:
        """True when all tensors were dropped."""
        return not [tensor for tensor in self.tensors if not tensor.gone]


class StorePages:
    """Gives pages to tensors, by their places in the line."""

    def __init__(self, life: Life, spill: SpillMemory) -> None:
        self._life = life
        self._spill = spill
        self._may_spill = True
        """False once a copy out of the store has failed."""
        self.line = Line(life.table.store_pages)
        self._wanted: dict[TensorId, _WantedPages] = {}
        """Requests by waiting tensor."""
        self._spilling = 0
        """Number of pages that are being copied out."""
        self._looking = False
        self._alarm = Alarm(self._look_again)

    async def take(self, tensors: Sequence[Tensor], trace: str, put_until: float | None = None) -> list[Pages]:
        """Returns the pages of each tensor, once all can have theirs; others may be spilled for them. A put, which must
        end by `put_until`, waits only a moment, so that it can still be told why, and so does a bundle. Others wait as
        long as a call waits for the tensor. Raises Exhausted (POOL_EXHAUSTED), and refusals of new work.
        """
        ids, count = [tensor.id for tensor in tensors], sum([tensor.pages for tensor in tensors])
        was_put = put_until is not None
        awaited = self._awaited(tensors)
        urgent = not was_put or awaited > 0
        future: asyncio.Future[list[Pages]] = asyncio.get_running_loop().create_future()
        wanted = _WantedPages(tensors, self.line.join(ids[0], count, urgent=urgent), was_put, trace, future)
        self._wanted |= dict.fromkeys(ids, wanted)
        self._see_awaited(wanted, awaited)
        try:
            if wanted.gone:
                raise _unwanted()
            self.look()
            most_s = None if put_until is None else min(HELD_S, (put_until - self._life.time()) / 2)
            if len(tensors) > 1:
                most_s = BUNDLE_HELD_S if most_s is None else min(most_s, BUNDLE_HELD_S)
            if not future.done():
                wait = asyncio.wait((future,), timeout=most_s)
                await (telemetry.waited("pages", trace, wait) if trace else wait)
            if future.done():
                return future.result()
        finally:
            for id_ in ids:
                if self._wanted.get(id_) is wanted:
                    del self._wanted[id_]
            if was_put and wanted.place.whole and not future.done() and not wanted.gone:
                self.line.refuse(wanted.place, self._life.time())
            else:
                self.line.leave(wanted.place)
            self._look_at(self._life.time())
        raise Exhausted(
            Reason.POOL_EXHAUSTED,
            f"the store has no room for {count} pages beside the {self.line.reserved} that are for tensors "
            "which its engine waits for, or others came first",
            retry_delay_s=RETRY_DELAY_S,
        )

    def hurry(self, tensor: Tensor) -> None:
        """Moves a tensor that the engine waits for to the front."""
        wanted = self._wanted.get(tensor.id)
        self.line.hurry(tensor.id if wanted is None else wanted.place.id)
        if wanted is not None:
            self._see_awaited(wanted, self._awaited(wanted.tensors))
        self.look()

    def _awaited(self, tensors: Sequence[Tensor]) -> int:
        """Returns the number of tensors that the engine waits for."""
        waits = self._life.table.waits
        return sum([bool(waits.of(tensor.id, (Purpose.GIVEN,), tensor.tenant)) for tensor in tensors])

    def _see_awaited(self, wanted: _WantedPages, awaited: int) -> None:
        """Bars a put from the reserved pages while the engine waits for only some of its tensors."""
        wanted.place.whole = awaited in {0, len(wanted.tensors)} or not wanted.was_put

    def forget(self, tensor: Tensor) -> None:
        """Ends the request of a dropped tensor, if all its tensors are gone."""
        wanted = self._wanted.get(tensor.id)
        if wanted is not None and wanted.gone and not wanted.future.done():
            self.line.leave(wanted.place)
            wanted.future.set_exception(_unwanted())
            self._look_at(self._life.time())

    def look(self) -> None:
        """Gives out pages that are free by now, and spills if that makes room."""
        if self._looking:
            return
        self._looking = True
        try:
            while self.line.places and self._serve():
                pass
        finally:
            self._looking = False

    def _serve(self) -> bool:
        """Serves the head of the line. Returns whether it is served, and the next one has its turn."""
        life = self._life
        place = self.line.head(life.time())
        if place is None:
            return False
        wanted = self._wanted.get(place.id)
        if wanted is None:
            assert place.absent_until is not None, "it waits here, or is to come again"
            self._look_at(place.absent_until)
            return False
        if not wanted.was_put and not any(
            life.table.waits.of(tensor.id, (Purpose.STORED, Purpose.GIVEN), tensor.tenant) for tensor in wanted.tensors
        ):
            self._end(wanted, _unwanted())
            return True
        lacks = self.line.lacks(place, life.transfers.free_pages())
        if lacks:
            self._make_room(lacks - self._spilling)
            return False
        taken: list[Pages] = []
        try:
            for tensor in wanted.tensors:
                taken.append(life.transfers.allocate(tensor.pages, wanted.trace))
        except KVGrpcError as error:
            for allocation_id, _ in taken:
                life.transfers.free(allocation_id)
            self._end(wanted, error.untraced())
        else:
            self.line.leave(place)
            wanted.future.set_result(taken)
        return True

    def _end(self, wanted: _WantedPages, error: KVGrpcError) -> None:
        self.line.leave(wanted.place)
        wanted.future.set_exception(error)

    async def bring_back(self, tensor: Tensor) -> None:
        life, table = self._life, self._life.table
        try:
            ((allocation_id, pages),) = await self.take((tensor,), "")
        except KVGrpcError as error:
            self._free(table.stays_out(tensor, error.untraced(), life.time()))
            return
        if tensor.gone:
            self._free(allocation_id)
            return
        table.returning(tensor, allocation_id)
        defect = await self._copy(tensor, pages.tolist(), out=False)
        if defect is None:
            self._free(table.returned(tensor, life.time()))
        else:
            self._free(table.stays_out(tensor, defect, life.time()))

    def _look_at(self, when: float) -> None:
        if self.line.places:
            self._alarm.set(when)

    def _look_again(self) -> None:
        if not self._life.over:
            self.look()

    def _make_room(self, pages: int) -> None:
        """Begins to copy unwanted tensors out, if that makes room for `pages` more pages."""
        if pages > 0 and self._may_spill and self._spill.usable:
            life = self._life
            for tensor in life.table.spill(pages, life.time()):
                self._spilling += tensor.pages
                life.spawn(self._copy_out(tensor))

    async def _copy_out(self, tensor: Tensor) -> None:
        pages = self._life.transfers.pages_of(tensor.allocation_id).tolist()
        defect = await self._copy(tensor, pages, out=True)
        self._spilling -= tensor.pages
        self._may_spill = self._may_spill and defect is None
        self._free(self._life.table.spilled(tensor, self._life.time(), copied=defect is None))
        self.look()

    async def _copy(self, tensor: Tensor, pages: Sequence[int], *, out: bool) -> KVGrpcError | None:
        """Copies a tensor between the store and its pages outside. Returns the error, or None."""
        try:
            await asyncio.to_thread(self._spill.copier(pages, tensor.slots, out=out))
        except Exception as error:  # noqa: BLE001 - an uncaught error would leave the tensor in copying for ever
            _log.exception("tensor %s part %d could not be copied", tensor.id.name, tensor.id.part)
            return InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}")
        return None

    def _free(self, allocation_id: str) -> None:
        if allocation_id:
            self._life.transfers.free(allocation_id)
        self._life.perform()


def _unwanted() -> Exhausted:
    return Exhausted(Reason.POOL_EXHAUSTED, "the tensor is no longer wanted")
