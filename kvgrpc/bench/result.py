"""What a run found, and what it is to reach."""

from dataclasses import asdict, dataclass, field
from typing import Any

BASELINES = {
    "memcpy": "memcpy once for each run, by as many threads as the data path copies with, in one process that maps both"
    " pools",
    "memcpy_whole": "one memcpy of the whole pool, by one thread",
    "raw_nixl": "NIXL called directly between two processes that map the same pools: descriptor lists, one transfer,"
    " polled until it is DONE; the better of two, with NIXL's progress thread on both sides, and without it while the"
    " target is polled every 100 us",
    "empty": "a grpc.aio server whose methods do nothing: one call, and one message each way over a stream;"
    " details.one_block_pull_empty_ms is what the messages of a pull take when nobody does anything with them",
    "busy": "the server embedded in a process whose other thread runs pure Python, at sys.setswitchinterval(0.0002);"
    " details.busy_5ms_* at Python's own 5 ms",
    "uncoalesced": "raw_nixl with one descriptor for each of the contiguous blocks",
}


@dataclass(frozen=True)
class CaseResult:
    """One case. Ratios are medians over pairs; above 1 we are faster."""

    datapath: str
    block_bytes: int
    blocks: int
    layout: str
    threads: int
    descriptors: int
    gbps: float
    """10^9 bytes a second, from the call to the woken waiter."""
    control_ms: float
    """Of one pull, all but the time in which postings were in flight."""
    memcpy_gbps: float
    ratio_memcpy: float
    raw_nixl_gbps: float | None = None
    ratio_raw_nixl: float | None = None
    raw_nixl_mode: str = ""
    """Which of the two was better: progress_thread or target_polled."""


@dataclass
class Result:
    """A whole run. What was not measured is None."""

    quick: bool
    repeats: int
    machine: dict[str, Any]
    versions: dict[str, str]
    baselines: dict[str, str]
    cases: list[CaseResult] = field(default_factory=list)
    memcpy_whole_gbps: float | None = None
    one_block_pull_ms_p50: float | None = None
    one_block_pull_ms_p50_busy: float | None = None
    completion_to_waiter_ms_p50: float | None = None
    completion_to_waiter_ms_p50_busy: float | None = None
    coalescing_ratio: float | None = None
    renew_1000_ms: float | None = None
    lease_us: float | None = None
    lease_cost_ratio_100k: float | None = None
    unary_ratio_empty: float | None = None
    idle_core_percent: float | None = None
    details: dict[str, float] = field(default_factory=dict)
    """Figures beside the main ones, such as what an empty call took in this run."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Target:
    """What a figure is to reach: at least, or at most, a bound."""

    name: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def figure_targets(found: Result) -> list[Target]:
    """The single figures of a run with their targets."""
    return [
        Target("one_block_pull_ms_p50", found.one_block_pull_ms_p50, 2.0),
        Target("one_block_pull_ms_p50_busy", found.one_block_pull_ms_p50_busy, 3.0),
        Target("completion_to_waiter_ms_p50", found.completion_to_waiter_ms_p50, 1.0),
        Target("completion_to_waiter_ms_p50_busy", found.completion_to_waiter_ms_p50_busy, 2.0),
        Target("coalescing_ratio", found.coalescing_ratio, 2.0, at_least=True),
        Target("renew_1000_ms", found.renew_1000_ms, 5.0),
        Target("lease_cost_ratio_100k", found.lease_cost_ratio_100k, 2.0),
        Target("unary_ratio_empty", found.unary_ratio_empty, 1.2),
        Target("idle_core_percent", found.idle_core_percent, 2.0),
    ]


def case_targets(case: CaseResult) -> list[Target]:
    """The ratios of a case with their targets, where there is one."""
    found = []
    if case.datapath == "shm":
        found.append(Target("ratio_memcpy", case.ratio_memcpy, 0.9, at_least=True))
    bound = _RAW_NIXL[case.datapath]
    if case.datapath == "shm" and case.block_bytes < 4 << 20:
        bound = 2.0
    if case.datapath == "cma" and case.block_bytes <= 16 << 10 and case.layout == "scattered":
        bound = 1.8
    found.append(Target("ratio_raw_nixl", case.ratio_raw_nixl, bound, at_least=True))
    return found


_RAW_NIXL = {"shm": 1.8, "cma": 1.3, "nixl": 0.95}
