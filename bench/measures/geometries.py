"""Pulls between engines whose ranks and blocks differ, beside memcpy of the same runs."""

import statistics
import time

from bench.geometries import BLOCK_TOKENS, geometry, geometry_moving, tokens_of
from bench.measures.timed_pairs import quartiles, timed_pairs
from bench.plan import GeometryPlan
from bench.results.geometries import GeometryCase, GeometryResult
from bench.stages.unlike import UnlikeEngines
from bench.told import Told
from kvgrpc.core.values.bridge import Bridge

_WARM = 2
_PLANS = 9
_PLANNED_BLOCKS = 8_192
_PLANNED = ("tp 2 to 2", "tp 1 to 2", "token-major tp 1 to 2")


def measure(plan: GeometryPlan, found: GeometryResult, told: Told) -> None:
    """Measures all cases of the plan."""
    for data_path in plan.data_paths:
        for name in plan.names:
            told(f"{data_path}: {name}")
            found.cases.append(_case(plan, data_path, name))
    told("tp 2 to 2 beside tp 1 to 1")
    found.ratio_tp2_tp1 = _two_to_one(plan)
    told(f"plans of {_PLANNED_BLOCKS} blocks")
    found.planning_ms = {name: _planning_s(name) * 1e3 for name in _PLANNED}


def _case(plan: GeometryPlan, data_path: str, name: str) -> GeometryCase:
    pair = geometry_moving(name, plan.pool_bytes)
    with UnlikeEngines(data_path, pair, plan.copy_threads) as engines:
        engines.check()
        for _ in range(_WARM):
            engines.pull_s()
        times = timed_pairs(plan.repeats, engines.pull_s, engines.copy_s)
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
            quartiles={
                "gbps": quartiles([engines.nbytes / pulled / 1e9 for pulled, _ in times]),
                "memcpy_gbps": quartiles([engines.nbytes / copied / 1e9 for _, copied in times]),
                "ratio_memcpy": quartiles([copied / pulled for pulled, copied in times]),
            },
        )


def _two_to_one(plan: GeometryPlan) -> float:
    """Returns how much faster the same bytes move from two ranks to two than from one to one."""
    one, two = (geometry(name, tokens_of(plan.pool_bytes)) for name in ("tp 1 to 1", "tp 2 to 2"))
    path, threads = plan.data_paths[0], plan.copy_threads
    with UnlikeEngines(path, one, threads) as alone, UnlikeEngines(path, two, threads) as together:
        for _ in range(_WARM):
            alone.pull_s(), together.pull_s()
        times = timed_pairs(plan.repeats, alone.pull_s, together.pull_s)
        return statistics.median(one_s / two_s for one_s, two_s in times)


def _planning_s(name: str) -> float:
    """Returns the processor time, in seconds, of a plan for all layers, between all pairs of ranks."""
    pair = geometry(name, _PLANNED_BLOCKS * BLOCK_TOKENS)
    bridge, chunk = Bridge(pair.source, pair.destination), pair.chunk()
    times = []
    for _ in range(_PLANS):
        began = time.process_time()
        bridge.plan([chunk])
        times.append(time.process_time() - began)
    return statistics.median(times)
