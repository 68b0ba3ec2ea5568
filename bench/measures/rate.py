"""Rate: the number of small pulls a second that two servers complete, and what each costs every process.

All is measured in turn with two servers that poll their sockets like `kvgrpc serve` and with two that use gRPC's own
polling, so that a new version of gRPC shows whether that is still worth it.
"""

import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from bench.plan import PullPlan, environment_of
from bench.results.pulls import PullResult
from bench.stages.calls import Caller
from bench.stages.hosts import Host
from bench.stages.processors import spent_ms
from kvgrpc.service.polling import VARIABLE

_BLOCK_BYTES = 16 << 10
_PROCESSES = ("client", "source", "destination")
_PULLS_ALONE = 10


@dataclass(frozen=True)
class RateSample:
    """Figures of one pair of servers."""

    pulls_per_s: float
    processor_ms: dict[str, float]
    """Processor time of one pull in milliseconds, by process."""
    alone_ms: float
    """Median time of one pull while nothing else is in flight, in milliseconds."""

    @property
    def total_ms(self) -> float:
        return sum(self.processor_ms.values())


@dataclass(frozen=True)
class ServerPair:
    """Two servers and their client."""

    source: Host
    destination: Host
    caller: Caller
    plan: PullPlan

    async def sample(self) -> RateSample:
        """Measures the rate, and single pulls."""
        seconds = 0.0

        async def pull() -> None:
            nonlocal seconds
            began = time.perf_counter()
            await self.caller.at_once(self.plan.rate_pulls, self.plan.in_flight)
            seconds = time.perf_counter() - began

        spent = await spent_ms(self.source, self.destination, self.plan.rate_pulls, pull)
        alone = await self.caller.one_block(_PULLS_ALONE)
        return RateSample(
            self.plan.rate_pulls / seconds,
            {name: spent[f"processor_ms_{name}"] for name in _PROCESSES},
            statistics.median(one.seconds for one in alone) * 1e3,
        )


async def measure(plan: PullPlan, found: PullResult) -> None:
    """Fills in the figures. Raises KVGrpcError if a call fails."""
    usual = environment_of(plan.data_paths[0])
    async with pair(plan, usual) as ours, pair(plan, usual | {VARIABLE: ""}) as theirs:
        pairs = [(await ours.sample(), await theirs.sample()) for _ in range(plan.repeats + 1)][1:]
    mine = [one for one, _ in pairs]
    found.pulls_per_s = statistics.median(one.pulls_per_s for one in mine)
    found.details |= {
        f"rate_processor_ms_{name}": statistics.median(one.processor_ms[name] for one in mine) for name in _PROCESSES
    }
    found.details |= {
        "polling_ratio_pulls_per_s": statistics.median(a.pulls_per_s / b.pulls_per_s for a, b in pairs),
        "polling_ratio_processor": statistics.median(a.total_ms / b.total_ms for a, b in pairs),
        "polling_ratio_one_block_pull": statistics.median(a.alone_ms / b.alone_ms for a, b in pairs),
    }


@contextlib.asynccontextmanager
async def pair(
    plan: PullPlan, environment: Mapping[str, str], credentials: grpc.ChannelCredentials | None = None, *,
    block_bytes: int = _BLOCK_BYTES, blocks: int = 0,
) -> AsyncIterator[ServerPair]:  # fmt: skip
    """Starts two servers and their client, and ends them. 0 blocks: one for each pull in flight."""
    blocks = blocks or plan.in_flight
    with contextlib.ExitStack() as ends:
        source, destination = (ends.enter_context(contextlib.closing(Host("server", environment))) for _ in range(2))
        one, other = (_start(server, plan, block_bytes, blocks) for server in (source, destination))
        async with Caller(one, other, credentials) as caller:
            await caller.allocate(blocks)
            yield ServerPair(source, destination, caller, plan)


def _start(host: Host, plan: PullPlan, block_bytes: int, blocks: int) -> str:
    """Starts a server. Returns its address."""
    arguments: dict[str, Any] = {"block_bytes": block_bytes, "blocks": blocks}
    arguments |= {"copy_threads": plan.copy_threads, "data_paths": list(plan.data_paths)}
    answer, fd = host.ask_fd("start", **arguments)
    os.close(fd)
    return str(answer["address"])
