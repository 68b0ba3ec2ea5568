"""Pulls between engines whose ranks and blocks differ, beside memcpy of the same runs."""

import statistics
import time

import numpy as np

from kvgrpc.bench.geometries import geometry
from kvgrpc.bench.plan import GeometryPlan
from kvgrpc.bench.results.geometries import GeometryCase, GeometryResult
from kvgrpc.bench.stages.servers import Progress
from kvgrpc.bench.stages.unlike import UnlikeEngines
from kvgrpc.core.values.bridge import Bridge, Side
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout

_WARM = 2
_PLANS = 9
PLANNED_BLOCKS = 8_192


def measure(plan: GeometryPlan, found: GeometryResult, progress: Progress) -> None:
    """All cases of the plan."""
    for data_path in plan.data_paths:
        for name in plan.names:
            progress(f"{data_path}: {name}")
            found.cases.append(_case(plan, data_path, name))
    progress("tp 2 to 2 beside tp 1 to 1")
    found.ratio_tp2_tp1 = _two_to_one(plan)
    found.planning_ms = _planning_s() * 1e3


def _case(plan: GeometryPlan, data_path: str, name: str) -> GeometryCase:
    pair = geometry(name, plan.pool_bytes)
    with UnlikeEngines(data_path, pair, plan.copy_threads) as engines:
        engines.check()
        for _ in range(_WARM):
            engines.pull_s()
        times = []
        for number in range(plan.repeats):
            # In turn the first of the pair, so that what drifts favours none.
            ways = (engines.pull_s, engines.copy_s) if number % 2 else (engines.copy_s, engines.pull_s)
            seen = {way: way() for way in ways}
            times.append((seen[engines.pull_s], seen[engines.copy_s]))
        bridge = Bridge(pair.source, pair.destination)
        return GeometryCase(
            name=name,
            datapath=data_path,
            repack=bool(bridge.repacked),
            pairs=len(bridge.pairs),
            nbytes=engines.nbytes,
            runs=sum(len(some.runs) for some in engines.planned),
            run_bytes=min(int(some.runs.nbytes.min()) for some in engines.planned),
            gbps=engines.nbytes / statistics.median(pulled for pulled, _ in times) / 1e9,
            memcpy_gbps=engines.nbytes / statistics.median(copied for _, copied in times) / 1e9,
            ratio_memcpy=statistics.median(copied / pulled for pulled, copied in times),
        )


def _two_to_one(plan: GeometryPlan) -> float:
    """How much faster the same bytes come from two ranks to two than from one to one."""
    one, two = (geometry(name, plan.pool_bytes) for name in ("tp 1 to 1", "tp 2 to 2"))
    path, threads = plan.data_paths[0], plan.copy_threads
    with UnlikeEngines(path, one, threads) as alone, UnlikeEngines(path, two, threads) as together:
        for _ in range(_WARM):
            alone.pull_s(), together.pull_s()
        ratios = []
        for number in range(plan.repeats):
            ways = (alone, together) if number % 2 else (together, alone)
            seen = {id(way): way.pull_s() for way in ways}
            ratios.append(seen[id(alone)] / seen[id(together)])
        return statistics.median(ratios)


def _planning_s() -> float:
    """Processor time of a plan."""

    def side(ranks: int) -> Side:
        group = Group("kv", GroupKind.FULL_ATTENTION, 1, 16, PLANNED_BLOCKS, 8 // ranks, 128, "bfloat16", "head_major")
        return Side(uniform_layout(group, 2 * 16 * 8 // ranks * 128 * 2), ranks)

    rng = np.random.default_rng(1)
    lists = [(rng.permutation(PLANNED_BLOCKS).astype(np.int64),) for _ in range(2)]
    bridge, chunk = Bridge(side(2), side(2)), Chunk(lists[0], lists[1], None)
    times = []
    for _ in range(_PLANS):
        began = time.process_time()
        bridge.plan([chunk])
        times.append(time.process_time() - began)
    return statistics.median(times)
