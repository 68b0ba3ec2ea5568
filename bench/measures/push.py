"""Pushes: whole pools against a baseline in turn, one block until the consumer wakes, and the work of the leads
alone.
"""

import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.measures import control
from bench.measures.between_hosts import Others, figures, others
from bench.measures.timed_pairs import quartiles
from bench.plan import Case, PushPlan, environment_of, path_of, pool
from bench.results.pushes import PushCase, PushResult
from bench.stages.calls import Caller, Moved, Registered
from bench.stages.engines import Engines
from bench.stages.processors import profiled, spent_ms
from bench.stages.raw_pairs import READ, WRITE
from bench.stages.servers import Pools, ServerStage
from bench.told import Told
from kvgrpc.v1 import transfer_pb2

_WARM = 20
_SMALL = {"block_bytes": 16 << 10, "blocks": 64}
_TINY_BYTES = 64
"""Block size in bytes with which 8,192 blocks are half a megabyte, so that moving them costs next to nothing."""
_PULL = "pull"


@dataclass(frozen=True)
class PushTimes:
    """Seconds that one case took, in one round."""

    ours: float
    wire: float
    """The part of `ours` in which postings were in flight."""
    base: dict[str, float]
    """Seconds by baseline; empty if there is none."""
    others: Others


class PushBandwidth:
    """Measures the cases of data paths whose processes have one environment."""

    def __init__(self, plan: PushPlan, stage: ServerStage, told: Told) -> None:
        self._plan = plan
        self._stage = stage
        self._told = told

    async def run(self) -> list[PushCase]:
        """Measures all cases of the plan."""
        found = []
        for block_bytes in self._plan.block_bytes:
            for data_path in self._plan.data_paths:
                raw = path_of(data_path) == "nixl"
                async with self._stage.pools(data_path, block_bytes, raw=raw) as pools:
                    found += [await self._measure(case, pools) for case in self._plan.cases(data_path, block_bytes)]
        return found

    async def _measure(self, case: Case, pools: Pools) -> PushCase:
        self._told(f"push {case.title}")
        pools.fill()
        pushed = await self._push(case, pools)
        pools.check(case, pushed)
        # The first round is not counted: it also maps memory and connects.
        moves = [await self._round(case, pools, first) for first in range(self._plan.repeats + 1)][1:]
        return _result(case, moves, pushed)

    async def _round(self, case: Case, pools: Pools, number: int) -> PushTimes:
        """Measures each way once; ours in turn before and after the base, so that drift favours no way."""
        base = {} if number % 2 else await self._base(case, pools)
        ours = await self._push(case, pools)
        base = base or await self._base(case, pools)
        return PushTimes(ours.seconds, ours.phase_s("wire"), base, others(case, pools))

    async def _base(self, case: Case, pools: Pools) -> dict[str, float]:
        """Returns the seconds of each baseline, by its name."""
        if path_of(case.data_path) != "nixl":
            return {_PULL: (await pools.caller.pull(case.ids("source"), case.ids("destination"))).seconds}
        operations = (WRITE,) if case.data_path == "nixl" else (WRITE, READ)
        return {
            f"raw_nixl {operation} {mode}": pair.move(case, operation)
            for operation in operations
            for mode, pair in pools.pairs.items()
        }

    async def _push(self, case: Case, pools: Pools) -> Moved:
        pushed = await pools.caller.push(await pools.caller.register(case.ids("destination")), case.ids("source"))
        pools.check_path(case, pushed)
        return pushed


def _result(case: Case, moves: list[PushTimes], pushed: Moved) -> PushCase:
    def gbps(seconds: list[float]) -> float:
        return case.nbytes / statistics.median(seconds) / 1e9

    ways = set(moves[0].base)
    best = min(ways, key=lambda way: statistics.median(move.base[way] for move in moves), default="")
    received = pushed.transfer.direction == transfer_pb2.DIRECTION_RECEIVE
    beside, spread = figures(case, [(move.ours, move.others) for move in moves])
    if best:
        spread["base_gbps"] = quartiles([case.nbytes / move.base[best] / 1e9 for move in moves])
        spread["ratio_base"] = quartiles([move.base[best] / move.ours for move in moves])
    return PushCase(
        name=case.title,
        datapath=case.data_path,
        block_bytes=case.block_bytes,
        blocks=case.blocks,
        layout=case.layout,
        threads=case.threads,
        descriptors=pushed.transfer.paths[0].descriptor_count,
        mover="destination" if received else "source",
        gbps=gbps([move.ours for move in moves]),
        control_ms=statistics.median(move.ours - move.wire for move in moves) * 1e3,
        base=best,
        base_gbps=gbps([move.base[best] for move in moves]) if best else None,
        ratio_base=statistics.median(move.base[best] / move.ours for move in moves) if best else None,
        quartiles={
            "gbps": quartiles([case.nbytes / move.ours / 1e9 for move in moves]),
            "control_ms": quartiles([(move.ours - move.wire) * 1e3 for move in moves]),
            **spread,
        },
        **beside,
    )


class OneBlock:
    """Pushes of one block, and the cost of pushing many to real servers, over the first of the plan's data paths."""

    def __init__(self, plan: PushPlan, stage: ServerStage, *, profile: bool) -> None:
        self._plan = plan
        self._stage = stage
        self._profile = profile
        self._block = np.zeros(1, dtype=np.int64)

    async def run(self, found: PushResult) -> None:
        """Fills in the figures."""
        async with self._caller(**_SMALL) as caller:
            await caller.allocate(_SMALL["blocks"])
            await self._pushes(caller, found)
        self._sessions(found)
        async with self._caller(block_bytes=_TINY_BYTES, blocks=self._plan.control_blocks) as caller:
            await caller.allocate(self._plan.control_blocks)
            many = Case("", 0, self._plan.control_blocks, "scattered", 0)
            for case in (replace(many, blocks=1), many):
                found.details[f"servers_{case.blocks}_ms"] = await self._servers_ms(caller, case)

    def _caller(self, **sizes: int) -> Caller:
        arguments: dict[str, Any] = {"data_paths": [path_of(self._plan.data_paths[0])], **sizes}
        addresses = []
        for host in (self._stage.source, self._stage.destination):
            answer, fd = host.ask_fd("start", copy_threads=self._plan.copy_threads, **arguments)
            os.close(fd)
            addresses.append(answer["address"])
        return Caller(*addresses)

    async def _pushes(self, caller: Caller, found: PushResult) -> None:
        """Measures pushes by a client in a process of its own, each beside a pull of one block."""
        pairs = []
        for _ in range(self._plan.pushes + _WARM):
            (pulled,) = await caller.one_block(1)
            pairs.append((await self._push_one(caller), pulled))
        del pairs[:_WARM]
        found.one_block_push_ms_p50 = statistics.median(pushed.seconds for pushed, _ in pairs) * 1e3
        found.details["one_block_pull_ms_p50"] = statistics.median(pulled.seconds for _, pulled in pairs) * 1e3

        async def push() -> None:
            for _ in range(self._plan.pushes):
                await self._push_one(caller)

        servers, count = (self._stage.source, self._stage.destination), self._plan.pushes
        found.details |= await spent_ms(*servers, count, push)
        if self._profile:
            found.profile += await profiled(*servers, count, "one push of one block", push)

    async def _push_one(self, caller: Caller) -> Moved:
        registered: Registered = await caller.register(self._block)
        return await caller.push(registered, self._block)

    def _sessions(self, found: PushResult) -> None:
        """Measures pushes from one engine to another, over their sessions."""
        layout = pool(**_SMALL).layout()
        seconds = []
        with Engines(self._plan.data_paths[0], layout, self._plan.copy_threads) as engines:
            for _ in range(self._plan.pushes + _WARM):
                push = engines.register(self._block)
                began = time.monotonic()
                engines.finish(push, self._block)
                seconds.append(engines.received() - began)
        found.details["session_one_block_push_ms_p50"] = statistics.median(seconds[_WARM:]) * 1e3

    async def _servers_ms(self, caller: Caller, case: Case) -> float:
        """Returns the milliseconds of processor time that a push costs both servers together, registration included."""
        source, destination = case.ids("source"), case.ids("destination")

        async def push(count: int = self._plan.handovers) -> None:
            for _ in range(count):
                await caller.push(await caller.register(destination), source)

        await push(1)
        spent = await spent_ms(self._stage.source, self._stage.destination, self._plan.handovers, push)
        return spent["processor_ms_source"] + spent["processor_ms_destination"]


async def measure(plan: PushPlan, found: PushResult, told: Told, *, profile: bool) -> None:
    """Fills in the figures of the plan."""
    told(f"the leads alone: a hand-over of {plan.control_blocks} blocks")
    found.control_8192_ms = control.handover_ms(plan, "scattered")
    found.details["control_contiguous_ms"] = control.handover_ms(plan, "contiguous")
    found.details["control_token_ids_ms"] = control.handover_ms(plan, "scattered", tokens=True)
    found.details["control_1_ms"] = control.handover_ms(replace(plan, control_blocks=1), "scattered")
    if profile:
        found.profile = control.profile(plan)
    told(f"the leads alone: pushes beside {plan.waiting_few} and {plan.waiting_many} registrations")
    found.details["core_push_us"], found.waiting_cost_ratio = control.waiting_cost(plan)
    for number, names in enumerate(_by_environment(plan.data_paths)):
        with ServerStage(plan, told, environment_of(names[0])) as stage:
            if not number:
                told("pushes of one block")
                await OneBlock(plan, stage, profile=profile).run(found)
            found.cases += await PushBandwidth(replace(plan, data_paths=names), stage, told).run()


def _by_environment(data_paths: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the data paths grouped by the environment of their processes, in order."""
    found: dict[str, tuple[str, ...]] = {}
    for name in data_paths:
        key = str(environment_of(name))
        found[key] = (*found.get(key, ()), name)
    return list(found.values())
