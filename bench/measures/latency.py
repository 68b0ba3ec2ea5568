"""Latency: the time of one small pull, the cost of single calls, and the cost of an idle server."""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import numpy as np

from bench.plan import PullPlan
from bench.results.pulls import PullResult
from bench.stages.calls import Caller, Moved, content
from bench.stages.hosts import Host
from bench.stages.processors import profiled, spent_ms
from kvgrpc.v1 import lease_pb2, lease_pb2_grpc, transfer_pb2, transfer_pb2_grpc

_POOL = {"block_bytes": 16 << 10, "blocks": 64}
_WARM = 20
_CALL_S = 30.0
_REST_S = 0.03
_SETTLE_DOWN_S = 0.5
_AT_ONCE = 50
SWITCH_S = 0.0002
"""Switch interval of the interpreter for the busy figures, in seconds. With Python's own 5 ms, every thread of the
server waits that long whenever it has something to do. Both are measured.
"""
LEASES_RENEWED = 1_000


class Latency:
    """Measures with two servers of small pools; pulls take the best of the plan's data paths."""

    def __init__(self, plan: PullPlan, source: Host, destination: Host, baseline: Host, *, profile: bool) -> None:
        self._plan = plan
        self._profile = profile
        self._source = source
        self._destination = destination
        self._baseline = baseline

    async def run(self, found: PullResult) -> None:
        """Fills in the figures."""
        source, destination = self._start(self._source), self._start(self._destination)
        async with Caller(source, destination) as caller:
            await caller.allocate(_POOL["blocks"])
            await self._pulls(caller, found)
            await self._rested(caller, found)
            await self._calls(caller, found)
            found.renew_1000_ms = await self._renewals(caller)
        self._embedded(source, found)
        found.idle_core_percent = await self._idle()

    def _start(self, host: Host) -> str:
        arguments: dict[str, Any] = {"copy_threads": self._plan.copy_threads, "stamped": True, **_POOL}
        answer, fd = host.ask_fd("start", data_paths=list(self._plan.data_paths), **arguments)
        os.close(fd)
        return str(answer["address"])

    async def _pulls(self, caller: Caller, found: PullResult) -> None:
        """Measures pulls of one block by a client in a process of its own."""
        await caller.one_block(_WARM)
        self._destination.ask("stamps")
        pulled: list[Moved] = []

        async def pull() -> None:
            pulled.extend(await caller.one_block(self._plan.pulls))

        found.details |= await spent_ms(self._source, self._destination, self._plan.pulls, pull)
        ends = self._destination.ask("stamps")["ended_ns"]
        tails = [(one.woken_ns - end) / 1e6 for one, end in zip(pulled, ends, strict=True)]
        found.one_block_pull_ms_p50 = statistics.median(one.seconds * 1e3 for one in pulled)
        found.completion_to_waiter_ms_p50 = statistics.median(tails)
        if self._profile:
            found.profile = await profiled(self._source, self._destination, self._plan.pulls, "one pull", pull)

    async def _rested(self, caller: Caller, found: PullResult) -> None:
        """Measures a pull after a rest, and the one right after it."""
        pairs = []
        for _ in range(self._plan.rested_pulls):
            await asyncio.sleep(_REST_S)
            rested, warm = await caller.one_block(2)
            pairs.append((rested.seconds, warm.seconds))
        found.rested_pull_ratio = statistics.median(rested / warm for rested, warm in pairs)
        found.details["rested_pull_ms_p50"] = statistics.median(rested for rested, _ in pairs) * 1e3

    def _embedded(self, source: str, found: PullResult) -> None:
        """Measures pulls by the destination's own process: alone, and beside a thread of it that runs pure Python."""
        alone = self._embedded_ms(source, busy=False)
        found.details |= {"embedded_one_block_pull_ms_p50": alone[0], "embedded_completion_to_waiter_ms_p50": alone[1]}
        busy = self._embedded_ms(source, busy=True, switch_s=SWITCH_S)
        found.one_block_pull_ms_p50_busy, found.completion_to_waiter_ms_p50_busy = busy
        default = self._embedded_ms(source, busy=True)
        found.details |= {"busy_5ms_one_block_pull_ms_p50": default[0], "busy_5ms_completion_ms_p50": default[1]}

    def _embedded_ms(self, source: str, **how: Any) -> tuple[float, float]:
        answer = self._destination.ask("embedded_pulls", source=source, count=self._plan.pulls, **how)
        return statistics.median(answer["total_ms"]), statistics.median(answer["tail_ms"])

    async def _calls(self, caller: Caller, found: PullResult) -> None:
        """Measures our lightest call and an empty one, in turn."""
        lightest = transfer_pb2_grpc.TransferServiceStub(caller.destination).AcknowledgeTransfers
        address = self._baseline.ask("empty_server")["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            empty: Any = channel.unary_unary("/Empty/Call")
            stream: Any = channel.stream_stream("/Empty/Stream")()
            pairs = []
            for _ in range(self._plan.pulls + _WARM):
                theirs = await _timed(lambda: empty(b"", timeout=_CALL_S))
                ours = await _timed(lambda: lightest(transfer_pb2.AcknowledgeTransfersRequest(), timeout=_CALL_S))
                pairs.append((ours, theirs))
            streamed = [await _timed(lambda: _echo(stream)) for _ in range(self._plan.pulls + _WARM)][_WARM:]
            stream.cancel()
        del pairs[:_WARM]
        found.unary_ratio_empty = statistics.median(ours / theirs for ours, theirs in pairs)
        call_ms = statistics.median(theirs for _, theirs in pairs) * 1e3
        stream_ms = statistics.median(streamed) * 1e3
        found.details |= {
            "empty_call_ms_p50": call_ms,
            "empty_stream_ms_p50": stream_ms,
            # A pull is a call, and two questions over a stream, one after the other.
            "one_block_pull_empty_ms": call_ms + 2 * stream_ms,
        }

    async def _renewals(self, caller: Caller) -> float:
        """Returns the milliseconds of one RenewLeases of 1,000 leases."""
        stub = lease_pb2_grpc.LeaseServiceStub(caller.source)
        block = np.zeros(1, dtype=np.int64)
        grant = lease_pb2.GrantLeaseRequest(blocks=caller.source_blocks(block), content=content(1))
        refs = []
        for _ in range(0, LEASES_RENEWED, _AT_ONCE):
            calls = (stub.GrantLease(grant, timeout=_CALL_S) for _ in range(_AT_ONCE))
            refs += [lease_pb2.LeaseRef(lease_id=one.lease.lease_id) for one in await asyncio.gather(*calls)]
        request = lease_pb2.RenewLeasesRequest(leases=refs)
        seconds = []
        for _ in range(self._plan.renewals + 1):
            seconds.append(await _timed(lambda: stub.RenewLeases(request, timeout=_CALL_S)))
        return statistics.median(seconds[1:]) * 1e3

    async def _idle(self) -> float:
        """Returns the percentage of a core that a server with a peer uses while it has nothing to do."""
        await asyncio.sleep(_SETTLE_DOWN_S)
        before, began = self._destination.ask("processor_s")["seconds"], time.monotonic()
        await asyncio.sleep(self._plan.idle_s)
        after, ended = self._destination.ask("processor_s")["seconds"], time.monotonic()
        return float((after - before) / (ended - began) * 100)


async def _echo(stream: Any) -> None:
    await stream.write(b"-")
    await stream.read()


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    """Returns the seconds that a call takes."""
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began
