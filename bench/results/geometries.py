"""Results of `python -m bench geometry`, and their targets."""

from dataclasses import dataclass, field
from typing import ClassVar

from bench.results.pulls import Run
from bench.results.targets import Target

BASELINES = {
    "memcpy": "memcpy once for each run that is to arrive, over all pairs of ranks, by as many threads as all ranks of"
    " the destination copy with, in one process that maps the pools of all ranks",
    "runs": "those of the destination's blocks, whether they are moved one by one or re-packed",
    "ratio_tp2_tp1": "of pulls of the same bytes, the time from one rank to one over that from two ranks to two, which"
    " have twice the copy threads",
    "planning_ms": "one plan for 8,192 scattered blocks in all layers, for all pairs of ranks",
}


@dataclass(frozen=True)
class GeometryCase:
    """Pulls between two engines. Ratios are medians over pairs; above 1 we are faster."""

    name: str
    datapath: str
    repack: bool
    """True if the destination re-packs what it has read."""
    pairs: int
    """Number of pairs of ranks."""
    nbytes: int
    runs: int
    run_bytes: int
    """Length of the shortest run, in bytes."""
    gbps: float
    memcpy_gbps: float
    ratio_memcpy: float
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    """First and third quartile of the repeats, by name of a figure."""

    def targets(self) -> list[Target]:
        """Returns the case's ratio as a target, over shm."""
        if self.datapath != "shm":
            return []
        return [Target("ratio_memcpy", self.ratio_memcpy, 0.5 if self.repack else 0.9, at_least=True)]


@dataclass
class GeometryResult(Run):
    """A run of `python -m bench geometry`."""

    kind: ClassVar[str] = "geometry"
    cases: list[GeometryCase] = field(default_factory=list)
    ratio_tp2_tp1: float | None = None
    planning_ms: dict[str, float] = field(default_factory=dict)
    """Planning time in milliseconds, by name of a case."""

    def targets(self) -> list[Target]:
        return [
            Target("ratio_tp2_tp1", self.ratio_tp2_tp1, 0.9, at_least=True),
            *(Target(f"planning_ms of {name}", ms, 5.0) for name, ms in self.planning_ms.items()),
        ]

    def figures(self) -> dict[str, float | None]:
        return {}
