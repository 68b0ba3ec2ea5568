"""Pages of the store: for what comes at once, for what can wait in the order in which it came, and how spilling makes
room for both.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from kvgrpc.core.tensors.rows import Tensor
from kvgrpc.core.values.descriptors import Ids
from kvgrpc.errors import Exhausted, KVGrpcError, Reason
from kvgrpc.service.tensors.life import Life
from kvgrpc.service.tensors.spill import SpillMemory

RETRY_DELAY_S = 0.1
Pages = tuple[str, Ids]
"""An allocation and its pages."""


@dataclass(eq=False)
class _Wanted:
    pages: int
    trace: str
    future: asyncio.Future[Pages]


class StorePages:
    """Who gets pages. While somebody waits, nobody else gets any."""

    def __init__(self, life: Life, spill: SpillMemory) -> None:
        self._life = life
        self._spill = spill
        self._queue: deque[_Wanted] = deque()

    async def take(self, pages: int, trace: str, until: float | None) -> Pages:
        """So many, for which others may be spilled; with `until` it waits for them. Raises Exhausted (POOL_EXHAUSTED),
        and what refuses new work.
        """
        try:
            return self._take(pages, trace)
        except Exhausted as error:
            if error.reason is not Reason.POOL_EXHAUSTED:
                raise
            copies = [] if self._queue else self._make_room(pages)
            if not copies and until is None:
                raise
        if copies:
            await asyncio.wait(copies)
        return self._take(pages, trace) if until is None else await self._wait(pages, trace, until - self._life.now)

    def look(self) -> None:
        """The node has handled its events: gives out what is free by now, and spills where that makes room."""
        transfers = self._life.transfers
        while self._queue and transfers.free_pages() >= self._queue[0].pages:
            wanted = self._queue.popleft()
            try:
                wanted.future.set_result(transfers.allocate(wanted.pages, wanted.trace))
            except KVGrpcError as error:
                wanted.future.set_exception(error.untraced())
        if self._queue:
            self._make_room(self._queue[0].pages)

    async def bring_back(self, tensor: Tensor) -> None:
        """A tensor outside of the store is wanted in it."""
        life, table = self._life, self._life.table
        until = life.now + life.lead.config.limits.wait_s
        try:
            allocation_id, pages = await self.take(tensor.pages, "", until)
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

    def _take(self, pages: int, trace: str) -> Pages:
        if self._queue:
            raise Exhausted(
                Reason.POOL_EXHAUSTED, "tensors that were asked for wait for pages of the store",
                retry_delay_s=RETRY_DELAY_S,
            )  # fmt: skip
        return self._life.transfers.allocate(pages, trace)

    async def _wait(self, pages: int, trace: str, timeout_s: float) -> Pages:
        loop = asyncio.get_running_loop()
        wanted = _Wanted(pages, trace, loop.create_future())
        self._queue.append(wanted)
        loop.call_soon(self.look)
        await asyncio.wait((wanted.future,), timeout=timeout_s)
        if not wanted.future.done():
            self._queue.remove(wanted)
            raise Exhausted(
                Reason.POOL_EXHAUSTED, f"the store did not have {pages} free pages in time",
                retry_delay_s=RETRY_DELAY_S,
            )  # fmt: skip
        return wanted.future.result()

    def _make_room(self, pages: int) -> "list[asyncio.Task[None]]":
        """Begins to copy out what nobody has asked for, if that makes room for so many."""
        if not self._spill.usable:
            return []
        life = self._life
        chosen = life.table.spill(pages - life.transfers.free_pages(), life.now)
        return [life.spawn(self._copy_out(tensor)) for tensor in chosen]

    async def _copy_out(self, tensor: Tensor) -> None:
        pages = self._life.transfers.pages_of(tensor.allocation_id).tolist()
        await asyncio.to_thread(self._spill.copier(pages, tensor.slots, out=True))
        self._free(self._life.table.spilled(tensor, self._life.now))

    def _free(self, allocation_id: str) -> None:
        if allocation_id:
            self._life.transfers.free(allocation_id)
        self._life.perform()
