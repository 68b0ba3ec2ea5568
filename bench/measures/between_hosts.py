"""Compares collective with the other ways between hosts without RDMA: raw Gloo, and raw NIXL over TCP."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.measures.timed_pairs import quartiles
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


def figures(case: Case, rounds: Sequence[tuple[float, Others]]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Returns the fields of BetweenHosts, and quartiles by field. `rounds` holds our seconds, and those of the other
    ways measured beside them.
    """
    found: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    gloo = [(ours, other.gloo) for ours, other in rounds if other.gloo is not None]
    if gloo:
        _compare("gloo", case, gloo, found, spread)
    ways = [(ours, other.nixl) for ours, other in rounds if other.nixl]
    if ways:
        best = min(ways[0][1], key=lambda way: statistics.median(by_way[way] for _, by_way in ways))
        found["nixl_tcp_mode"] = best
        _compare("nixl_tcp", case, [(ours, by_way[best]) for ours, by_way in ways], found, spread)
    return found, spread


def _compare(
    other: str,
    case: Case,
    pairs: Sequence[tuple[float, float]],
    found: dict[str, Any],
    spread: dict[str, list[float]],
) -> None:
    """Fills in the other way's bandwidth in GB/s, and the ratio of its seconds to ours."""
    gbps, ratios = [case.nbytes / seconds / 1e9 for _, seconds in pairs], [seconds / ours for ours, seconds in pairs]
    for name, values in ((f"{other}_gbps", gbps), (f"ratio_{other}", ratios)):
        found[name], spread[name] = statistics.median(values), quartiles(values)
