"""An engine that comes back from a lead that died: the workers that it had attach again, with the memory that they had,
and only then its new life begins.
"""

import asyncio
import os
import secrets

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
from kvgrpc.service.session.workers import WorkerEnd, check_memory, in_workers
from kvgrpc.session.v1 import session_pb2

TICKET_BYTES_MIN = 16


class Return:
    """One engine that comes back, until every worker is here. Make it on the loop; `end` it in any case."""

    def __init__(self, request: session_pb2.AttachRequest) -> None:
        """Raises InvalidRequest for a ticket that could be guessed."""
        if len(request.rank_ticket) < TICKET_BYTES_MIN:
            raise invalid("rank_ticket", f"has at least {TICKET_BYTES_MIN} random bytes")
        self._ticket = request.rank_ticket
        self._memory = request.memory
        self._world_size = request.world_size or 1
        self._known: set[int] = set()
        self._here = 0
        self._complete = asyncio.Event()
        self._begun = asyncio.Event()
        self._refusal: KVGrpcError | None = None
        self.memory: dict[int, int] = {}
        """Descriptors of shared memory, by rank; closed by `end`."""

    def awaits(self, ticket: bytes) -> bool:
        """Whether a worker with this ticket is one of the engine's."""
        return secrets.compare_digest(self._ticket, ticket)

    async def wait(self, frames: Frames) -> Frames:
        """Until every worker is here; the scheduler's frames, of which none may come before. Raises Unavailable when
        the scheduler has hung up, InternalError (DATA_PATH_FAILED) when some memory is not at rest.
        """
        ahead = asyncio.ensure_future(anext(frames, None))
        complete = asyncio.ensure_future(self._complete.wait())
        await asyncio.wait({ahead, complete}, return_when=asyncio.FIRST_COMPLETED)
        if ahead.done():
            complete.cancel()
            ahead.result()
            raise Unavailable(Reason.ENGINE_LOST, "the engine did not wait for its workers")
        if self._refusal is not None:
            ahead.cancel()
            raise self._refusal
        return _with(ahead, frames)

    async def take(self, request: session_pb2.AttachRankRequest, worker: WorkerEnd) -> None:
        """A worker is here: returns when the engine's life has begun. Raises PermissionDenied when it does not begin,
        and what is wrong with the worker.
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
        except BaseException:
            self._known.discard(request.rank)
            raise
        self._here += 1
        if self._here == self._world_size:
            self._complete.set()
        await self._begun.wait()

    def end(self) -> None:
        """The engine's life has begun, or will not."""
        self._begun.set()
        for fd in self.memory.values():
            os.close(fd)
        self.memory.clear()

    def _keep(self, rank: int, memory: int) -> None:
        """Raises PermissionDenied, and closes it, where the engine ended meanwhile and does not."""
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


async def _with(first: asyncio.Future[session_pb2.ClientFrame | None], rest: Frames) -> Frames:
    frame = await first
    if frame is not None:
        yield frame
        async for frame in rest:
            yield frame
