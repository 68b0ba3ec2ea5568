"""The well-behaved caller, and the look at health: what others get from a lead while one caller floods it."""

import asyncio
import functools
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.overload.site import OTHER, Site
from bench.stages.calls import Caller, Moved, content
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.errors import InternalError, KVGrpcError, Reason
from kvgrpc.v1 import handoff_pb2, transfer_pb2
from kvgrpc.v1.handoff_pb2_grpc import HandoffServiceStub

Pull = Callable[[Ids, Ids], Awaitable[Moved]]
BLOCKS = 64
PERIOD_S = 0.05
"""Time from the beginning of a pull to that of the next one, in seconds."""
HEALTH_S = 0.1
CALL_S = 60.0
LATE_S = 10.0
"""Time after which a question about health counts as unanswered, in seconds."""


@dataclass
class Seen:
    """What the caller, and health, met in what they began within a phase. Times are in seconds."""

    pulls: list[float] = field(default_factory=list)
    """Times of pulls of the Python client, whose calls share a stream."""
    unary: list[float] = field(default_factory=list)
    """Times of pulls by unary RPCs, as clients of other languages make them."""
    failed: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    sick: Counter[str] = field(default_factory=Counter)
    """Number of answers of health that were not SERVING."""

    def __add__(self, other: "Seen") -> "Seen":
        return Seen(
            self.pulls + other.pulls,
            self.unary + other.unary,
            self.failed + other.failed,
            self.health + other.health,
            self.sick + other.sick,
        )


class Others:
    """Both callers. They run all the time, and note what they meet in `seen`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.seen = Seen()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Others"]:
        credentials = self._site.credentials(OTHER)
        address = self._site.destination.address
        channel = grpc.aio.secure_channel(address, credentials) if credentials else grpc.aio.insecure_channel(address)
        async with Caller(self._site.source.address, address, credentials) as caller, channel:
            await caller.allocate(BLOCKS)
            await caller.one_block(BLOCKS)
            tasks = [asyncio.create_task(self._pull(caller)), asyncio.create_task(self._look(channel))]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task

    def phase(self) -> Seen:
        """Returns what was met since the last call, and begins anew."""
        found, self.seen = self.seen, Seen()
        return found

    async def _pull(self, caller: Caller) -> None:
        """Begins pulls at their times, whatever becomes of those before; one whose block is in use is late."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            free = asyncio.Queue[int]()
            for number in range(BLOCKS):
                free.put_nowait(number)
            for count in itertools.count(1):
                number = await free.get()
                pull = caller.pull if count % 2 else functools.partial(self._unary_pull, caller)
                seen = self.seen.pulls if count % 2 else self.seen.unary
                group.create_task(self._timed(pull, number, seen, free))
                await asyncio.sleep(max(began + count * PERIOD_S - time.monotonic(), 0.0))

    async def _timed(self, pull: Pull, number: int, times: list[float], free: "asyncio.Queue[int]") -> None:
        block, failed = np.array([number], dtype=np.int64), self.seen.failed
        try:
            times.append((await pull(block, block)).seconds)
        except (KVGrpcError, grpc.RpcError) as error:
            failed[str(error)[:200]] += 1
        free.put_nowait(number)

    async def _unary_pull(self, caller: Caller, block: Ids, _: Ids) -> Moved:
        job = handoff_pb2.HandOver(blocks=caller.source_blocks(block), content=content(1))
        handed = handoff_pb2.FinishedBlocksRequest(transfer_key=os.urandom(16), for_readers=job)
        grant = (await HandoffServiceStub(caller.source).FinishedBlocks(handed, timeout=CALL_S)).grant
        request = handoff_pb2.PullBlocksRequest(
            grant=grant, content=content(1),
            destination=handoff_pb2.PullDestination(blocks=caller.destination_blocks(block)),
            wait=transfer_pb2.TransferWait(timeout=Duration(seconds=30)),
        )  # fmt: skip
        began = time.monotonic_ns()
        ended = (await HandoffServiceStub(caller.destination).PullBlocks(request, timeout=CALL_S)).transfer
        woken = time.monotonic_ns()
        if ended.state != transfer_pb2.TRANSFER_STATE_SUCCEEDED:
            raise InternalError(Reason.INTERNAL, f"a transfer failed: {ended.failure.message or ended}")
        return Moved((woken - began) / 1e9, woken, ended)

    async def _look(self, channel: grpc.aio.Channel) -> None:
        check = health_pb2_grpc.HealthStub(channel).Check
        while True:
            began, seen = time.monotonic(), self.seen
            try:
                status = (await check(health_pb2.HealthCheckRequest(service=""), timeout=LATE_S)).status
            except grpc.aio.AioRpcError as error:
                seen.sick[error.code().name] += 1
            else:
                seen.health.append(time.monotonic() - began)
                if status != health_pb2.HealthCheckResponse.SERVING:
                    seen.sick[health_pb2.HealthCheckResponse.ServingStatus.Name(status)] += 1
            await asyncio.sleep(max(began + HEALTH_S - time.monotonic(), 0))
