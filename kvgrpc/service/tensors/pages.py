"""Pages of the store: for whose turn it is, and how spilling makes room for it."""

import asyncio
from dataclasses import dataclass

from kvgrpc.core.tensors.line import KEPT_S, Line, Place
from kvgrpc.core.tensors.rows import Purpose, Tensor
from kvgrpc.core.tensors.values import TensorId
from kvgrpc.core.values.descriptors import Ids
from kvgrpc.errors import Exhausted, KVGrpcError, Reason
from kvgrpc.service.tensors.life import Life
from kvgrpc.service.tensors.spill import SpillMemory

RETRY_DELAY_S = 0.1
HELD_S = 0.5
"""How long a put waits here for pages before it is told to come again: long enough that a store whose tensors are used
as they come is never short of puts that wait.
"""
Pages = tuple[str, Ids]
"""An allocation and its pages."""


@dataclass(eq=False)
class _Wanted:
    place: Place
    trace: str
    future: asyncio.Future[Pages]


class StorePages:
    """Who gets pages, by its place in the line."""

    def __init__(self, life: Life, spill: SpillMemory) -> None:
        self._life = life
        self._spill = spill
        self.line = Line(life.table.store_pages)
        self._wanted: dict[TensorId, _Wanted] = {}
        """Of the tensors that wait here."""
        self._spilling = 0
        """Pages that are being copied out."""
        self._looking = False

    async def take(self, tensor: Tensor, trace: str, until: float, *, was_put: bool) -> Pages:
        """Its pages, for which others may be spilled. What is wanted here waits until then; what `was_put` a moment,
        and never so long that its put cannot be told why. Raises Exhausted (POOL_EXHAUSTED), and what refuses new work.
        """
        left_s = until - self._life.now
        urgent = not was_put or bool(self._life.table.waits.of(tensor.id, (Purpose.GIVEN,)))
        place = self.line.join(tensor.id, tensor.pages, urgent=urgent)
        wanted = self._wanted[tensor.id] = _Wanted(place, trace, asyncio.get_running_loop().create_future())
        try:
            self.look()
            if not wanted.future.done():
                await asyncio.wait((wanted.future,), timeout=min(HELD_S, left_s / 2) if was_put else left_s)
            if wanted.future.done():
                return wanted.future.result()
        finally:
            del self._wanted[tensor.id]
            if was_put and not wanted.future.done() and not tensor.gone:
                self.line.refuse(place, self._life.now)
            else:
                self.line.leave(place)
            self._look_soon()
        raise Exhausted(
            Reason.POOL_EXHAUSTED,
            f"the store has no room for {tensor.pages} pages beside the {self.line.reserved} that are for tensors "
            "which its engine waits for, or others came first",
            retry_delay_s=RETRY_DELAY_S,
        )

    def hurry(self, tensor: Tensor) -> None:
        """The engine waits for it."""
        self.line.hurry(tensor.id)
        self.look()

    def forget(self, tensor: Tensor) -> None:
        """It was dropped, and wants no pages."""
        wanted = self._wanted.get(tensor.id)
        if wanted is not None and not wanted.future.done():
            self.line.leave(wanted.place)
            wanted.future.set_exception(Exhausted(Reason.POOL_EXHAUSTED, "the tensor is wanted no more"))
            self._look_soon()

    def look(self) -> None:
        """Gives out what is free by now, and spills where that makes room."""
        if self._looking:
            return
        self._looking = True
        try:
            while self._serve():
                pass
        finally:
            self._looking = False

    def _serve(self) -> bool:
        """Whether there was enough for whose turn it is."""
        life = self._life
        place = self.line.head(life.now)
        if place is None:
            return False
        wanted = self._wanted.get(place.id)
        lacks = self.line.lacks(place, life.transfers.free_pages())
        if wanted is None:
            self._look_soon(KEPT_S)
            return False
        if lacks:
            self._make_room(lacks - self._spilling)
            return False
        self.line.leave(place)
        if not wanted.future.done():
            try:
                wanted.future.set_result(life.transfers.allocate(place.pages, wanted.trace))
            except KVGrpcError as error:
                wanted.future.set_exception(error.untraced())
        return True

    async def bring_back(self, tensor: Tensor) -> None:
        """A tensor outside of the store is wanted in it."""
        life, table = self._life, self._life.table
        until = life.now + life.lead.config.limits.wait_s
        try:
            allocation_id, pages = await self.take(tensor, "", until, was_put=False)
        except KVGrpcError as error:
            table.stays_out(tensor, error.untraced(), life.now)
            life.perform()
            return
        if tensor.gone:
            life.transfers.free(allocation_id)
            return
        table.returning(tensor, allocation_id)
        await asyncio.to_thread(self._spill.copier(pages.tolist(), tensor.slots, out=False))
        self._free(table.returned(tensor, life.now))

    def _look_soon(self, delay_s: float = 0.0) -> None:
        if len(self.line):
            asyncio.get_running_loop().call_later(delay_s, self._look_again)

    def _look_again(self) -> None:
        if not self._life.over:
            self.look()

    def _make_room(self, pages: int) -> None:
        """Begins to copy out what nobody has asked for, if that makes room for so many more."""
        if pages > 0 and self._spill.usable:
            life = self._life
            for tensor in life.table.spill(pages, life.now):
                self._spilling += tensor.pages
                life.spawn(self._copy_out(tensor))

    async def _copy_out(self, tensor: Tensor) -> None:
        pages = self._life.transfers.pages_of(tensor.allocation_id).tolist()
        await asyncio.to_thread(self._spill.copier(pages, tensor.slots, out=True))
        self._spilling -= tensor.pages
        self._free(self._life.table.spilled(tensor, self._life.now))

    def _free(self, allocation_id: str) -> None:
        if allocation_id:
            self._life.transfers.free(allocation_id)
        self._life.perform()
