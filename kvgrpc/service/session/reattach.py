"""An engine that comes back after its lead died: its workers attach again with their old memory, and only then its new
life begins.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from typing import TypeVar

from kvgrpc.errors import (
    AlreadyExists,
    InternalError,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
    invalid,
)
from kvgrpc.service.session.socket import Frames
from kvgrpc.service.session.workers import Reports, WorkerEnd, check_memory, in_workers
from kvgrpc.session.v1 import session_pb2

TICKET_BYTES_MIN = 16
_T = TypeVar("_T")


class Return:
    """One engine that comes back, until every worker is here. Make it on the loop. Always `end` it."""

    def __init__(self, request: session_pb2.AttachRequest) -> None:
        """Raises InvalidRequest for a ticket that could be guessed."""
        if len(request.rank_ticket) < TICKET_BYTES_MIN:
            raise invalid("rank_ticket", f"has at least {TICKET_BYTES_MIN} random bytes")
        self._ticket = request.rank_ticket
        self._memory = request.memory
        self._world_size = request.world_size or 1
        self._known: set[int] = set()
        self._here: set[int] = set()
        """Known ranks whose memory is here, too."""
        self._begins = False
        self._complete = asyncio.Event()
        self._begun = asyncio.Event()
        self._refusal: KVGrpcError | None = None
        self.memory: dict[int, int] = {}
        """Descriptors of shared memory, by rank; closed by `end`."""

    def awaits(self, ticket: bytes) -> bool:
        """Returns whether a worker with this ticket is one of the engine's."""
        return secrets.compare_digest(self._ticket, ticket)

    async def wait(self, frames: Frames) -> Frames:
        """Waits until every worker is here. Returns the scheduler's frames, of which none may come before. Raises
        Unavailable if the scheduler hung up, InternalError (DATA_PATH_FAILED) if some memory is not at rest.
        """
        ahead = _next(frames)
        while not self._complete.is_set() and not ahead.done():  # a worker that is here may leave again
            complete = asyncio.ensure_future(self._complete.wait())
            await asyncio.wait({ahead, complete}, return_when=asyncio.FIRST_COMPLETED)
            complete.cancel()
        if ahead.done():
            ahead.result()
            raise Unavailable(Reason.ENGINE_LOST, "the engine did not wait for its workers")
        if self._refusal is not None:
            ahead.cancel()
            raise self._refusal
        self._begins = True
        return _with(ahead, frames)

    @property
    def whole(self) -> bool:
        """True when every worker is here."""
        return len(self._here) == self._world_size

    async def take(
        self, request: session_pb2.AttachRankRequest, reports: AsyncIterator[Reports], worker: WorkerEnd
    ) -> AsyncIterator[Reports]:
        """Takes a worker, and returns its reports when the engine's life has begun. Raises PermissionDenied if it does
        not begin, a refusal of the worker, and errors of its reports: the worker may come again then.
        """
        self._check(request)
        if request.not_at_rest:
            why = f"the memory of rank {request.rank} is not proved to be at rest: {request.not_at_rest}"
            self._refusal = InternalError(Reason.DATA_PATH_FAILED, why)
            self._complete.set()
            raise self._refusal
        self._known.add(request.rank)
        try:
            if not in_workers(self._memory):
                self._keep(request.rank, await worker.memory())
            self._here.add(request.rank)
            if self.whole:
                self._complete.set()
            return await self._await_life(reports)
        except BaseException:
            self._leave(request.rank)
            raise

    def end(self) -> None:
        """Ends the return: the engine's life has begun, or will not."""
        self._begun.set()
        for fd in self.memory.values():
            os.close(fd)
        self.memory.clear()

    async def _await_life(self, reports: AsyncIterator[Reports]) -> AsyncIterator[Reports]:
        """Waits for the life to begin, while the worker is connected and silent."""
        begun = asyncio.ensure_future(self._begun.wait())
        ahead = _next(reports)
        try:
            while True:
                await asyncio.wait({begun, ahead}, return_when=asyncio.FIRST_COMPLETED)
                if begun.done():
                    return _with(ahead, reports)
                said = ahead.result()
                if said is None:
                    raise Unavailable(Reason.ENGINE_LOST, "the worker did not wait for its engine")
                if said:
                    raise invalid("reports", "come after the answer to the attach")
                ahead = _next(reports)
        except BaseException:
            ahead.cancel()
            raise
        finally:
            begun.cancel()

    def _leave(self, rank: int) -> None:
        """Removes a worker that left. Once the life begins, the session server sees this by `whole`."""
        self._known.discard(rank)
        self._here.discard(rank)
        if self._begins:
            return
        if self._refusal is None:
            self._complete.clear()
        memory = self.memory.pop(rank, None)
        if memory is not None:
            os.close(memory)

    def _keep(self, rank: int, memory: int) -> None:
        """Keeps a worker's memory. Closes it and raises PermissionDenied if the engine's return is over."""
        if self._begun.is_set():
            os.close(memory)
            raise PermissionDenied(Reason.NOT_OWNER, "this engine is not back")
        self.memory[rank] = memory

    def _check(self, request: session_pb2.AttachRankRequest) -> None:
        if self._begun.is_set():
            raise PermissionDenied(Reason.NOT_OWNER, "this engine is not back")
        if not request.returns:
            raise PermissionDenied(Reason.NOT_OWNER, "this engine comes back, and a new worker has not its memory")
        check_memory(request, self._memory)
        if request.rank >= self._world_size:
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, f"this engine has no rank {request.rank}")
        if request.rank in self._known:
            raise AlreadyExists(Reason.ENGINE_ATTACHED, f"rank {request.rank} has a worker already")


def _next(of: AsyncIterator[_T]) -> asyncio.Task[_T | None]:
    """Returns a task for the next item; None at the end. Its error may stay unread: the connection may be over."""
    found = asyncio.ensure_future(anext(of, None))
    found.add_done_callback(lambda done: done.cancelled() or done.exception())
    return found


async def _with(first: asyncio.Future[_T | None], rest: AsyncIterator[_T]) -> AsyncIterator[_T]:
    found = await first
    if found is not None:
        yield found
        async for found in rest:
            yield found
