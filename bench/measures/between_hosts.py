"""Compares collective with the other ways between hosts without RDMA: raw Gloo, and raw NIXL over TCP."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.plan import COLLECTIVE, Case
from bench.stages.raw_pairs import READ, WRITE
from bench.stages.servers import Pools


@dataclass(frozen=True)
class Others:
    """Seconds that other ways took for one case, in one round; all None for a case over another data path."""

    gloo: float | None = None
    nixl: dict[str, float] | None = None
    """Seconds over TCP, by operation and mode; empty without NIXL."""


def others(case: Case, pools: Pools) -> Others:
    """Measures each way once."""
    if case.data_path != COLLECTIVE:
        return Others()
    nixl = {
        f"{operation} {mode}": pair.move(case, operation)
        for operation in (WRITE, READ)
        for mode, pair in pools.pairs.items()
    }
    return Others(pools.gloo.move() if pools.gloo is not None else None, nixl)


def figures(case: Case, rounds: Sequence[tuple[float, Others]]) -> dict[str, Any]:
    """Returns the fields of BetweenHosts. `rounds` holds our seconds, and those of the other ways measured beside
    them.
    """
    found: dict[str, Any] = {}
    gloo = [(ours, other.gloo) for ours, other in rounds if other.gloo is not None]
    if gloo:
        found["gloo_gbps"], found["ratio_gloo"] = _compared(case, gloo)
    ways = [(ours, other.nixl) for ours, other in rounds if other.nixl]
    if ways:
        best = min(ways[0][1], key=lambda way: statistics.median(by_way[way] for _, by_way in ways))
        found["nixl_tcp_mode"] = best
        found["nixl_tcp_gbps"], found["ratio_nixl_tcp"] = _compared(
            case, [(ours, by_way[best]) for ours, by_way in ways]
        )
    return found


def _compared(case: Case, pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the other way's bandwidth in GB/s, and the ratio of its seconds to ours."""
    seconds = statistics.median(other for _, other in pairs)
    return case.nbytes / seconds / 1e9, statistics.median(other / ours for ours, other in pairs)
