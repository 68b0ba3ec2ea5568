"""Results of pulls, and their targets. `Run` is the part that all kinds of runs share."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from bench.plan import COLLECTIVE
from bench.results.between_hosts import BETWEEN_HOSTS, BetweenHosts, targets_of
from bench.results.targets import Target
from kvgrpc.config import WINDOW

RAW_NIXL = (
    "NIXL called directly between two processes that map the same pools: descriptor lists, one transfer, polled until"
    " it is DONE; the better of two, with NIXL's progress thread on both sides, and without it while the target is"
    " polled every 100 us"
)
CONTROL = {
    "control": "the time of a transfer in which none of its bytes were under way: calls, questions, plans",
    "runs": "stretches of contiguous bytes, each of which is moved as one",
}
"""What the columns of a table of pulls or pushes are."""
BASELINES = {
    **CONTROL,
    "memcpy": "memcpy once for each run, by as many threads as the data path copies with, in one process that maps both"
    " pools",
    "memcpy_whole": "one memcpy of the whole pool, by one thread",
    "raw_nixl": RAW_NIXL,
    **BETWEEN_HOSTS,
    "empty": "a grpc.aio server whose methods do nothing: one call, and one message each way over a stream;"
    " details.one_block_pull_empty_ms is what the messages of a pull take when no side does anything with them",
    "busy": "the server embedded in a process whose other thread runs pure Python, at sys.setswitchinterval(0.0002);"
    " details.busy_5ms_* at Python's own 5 ms",
    "without": "the same pull between the same two servers without checksums, right after it. With them: ratio_without"
    " is of pulls that begin when the source has summed up what it handed over, ratio_at_once of others",
    "polling": "servers whose gRPC waits for its sockets as it does by itself (GRPC_EXPERIMENTS is empty), in turn with"
    " ours: details.polling_ratio_* are ours over theirs, of pulls a second, of the processor time of a pull in all"
    " three processes, and of the time of one pull alone",
    "plain": "the same calls and pulls between two servers without TLS, in turn with two under mutual TLS, whose client"
    " has a certificate, too: tls_*_ratio are TLS over plain text",
    "shm": "the same pull of a whole pool of the largest blocks over shm, in turn with window, between servers of its"
    " own: private_window_ratio_shm",
    "observed": "the same pulls in turn between two servers without metrics and traces: metrics_ratio and"
    " tracing_*_ratio are of the processor time of a pull at both servers",
    "rested": "the pull right after the one that comes after 30 ms without any",
    "uncoalesced": "raw_nixl with one descriptor for each of the contiguous blocks",
}
_TO_RAW_NIXL = {"shm": 1.8, "cma": 1.3, "nixl": 0.95}


@dataclass
class Run:
    """The part of a result that all runs have. A figure that was not measured is None."""

    kind: ClassVar[str] = "pull"
    """The command that measures such a result."""

    quick: bool
    repeats: int
    machine: dict[str, Any]
    versions: dict[str, str]
    baselines: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def targets(self) -> list[Target]:
        """Returns the single figures that have targets."""
        raise NotImplementedError

    def figures(self) -> dict[str, float | None]:
        """Returns the single figures without targets."""
        raise NotImplementedError


@dataclass(frozen=True)
class PullCase(BetweenHosts):
    """One case. Ratios are medians over pairs; above 1 we are faster."""

    name: str
    datapath: str
    block_bytes: int
    blocks: int
    layout: str
    threads: int
    descriptors: int
    gbps: float
    """Bandwidth in GB/s (10^9 bytes a second), from the call to the woken waiter."""
    control_ms: float
    """Time of one pull in milliseconds, without the time in which postings were in flight."""
    memcpy_gbps: float
    ratio_memcpy: float
    raw_nixl_gbps: float | None = None
    ratio_raw_nixl: float | None = None
    raw_nixl_mode: str = ""
    """The better of the two modes: progress_thread or target_polled."""
    ratio_without: float | None = None
    """Time of the same pull without checksums over that with them. The source already has its sums."""
    ratio_at_once: float | None = None
    """The same ratio for a pull right after the hand-over: the source computes its sums while it is read."""

    quartiles: dict[str, list[float]] = field(default_factory=dict)
    """First and third quartile of the repeats, by name of a figure."""

    def targets(self) -> list[Target]:
        """Returns the case's ratios that have targets. A pull with checksums has targets of its own."""
        if self.ratio_without is not None:
            bound = 0.85 if self.datapath == "nixl" else 0.5
            ratios = {"ratio_without": self.ratio_without, "ratio_at_once": self.ratio_at_once}
            return [Target(name, ratio, bound, at_least=True) for name, ratio in ratios.items()]
        if self.datapath == COLLECTIVE:
            return targets_of(self, self.block_bytes)
        found = []
        if self.datapath == "shm":
            found.append(Target("ratio_memcpy", self.ratio_memcpy, 0.9, at_least=True))
        if self.datapath == WINDOW:
            return [Target("ratio_memcpy", self.ratio_memcpy, 0.4, at_least=True)]
        bound = _TO_RAW_NIXL[self.datapath]
        if self.datapath == "shm" and self.block_bytes < 4 << 20:
            bound = 2.0
        if self.datapath == "cma" and self.block_bytes <= 16 << 10 and self.layout == "scattered":
            bound = 1.8
        found.append(Target("ratio_raw_nixl", self.ratio_raw_nixl, bound, at_least=True))
        return found


@dataclass
class PullResult(Run):
    """A run of `python -m bench pull`."""

    cases: list[PullCase] = field(default_factory=list)
    memcpy_whole_gbps: float | None = None
    one_block_pull_ms_p50: float | None = None
    one_block_pull_ms_p50_busy: float | None = None
    rested_pull_ratio: float | None = None
    """Time of a pull after 30 ms without any, over that of the one right after it."""
    completion_to_waiter_ms_p50: float | None = None
    completion_to_waiter_ms_p50_busy: float | None = None
    coalescing_ratio: float | None = None
    renew_1000_ms: float | None = None
    lease_us: float | None = None
    lease_cost_ratio_100k: float | None = None
    unary_ratio_empty: float | None = None
    idle_core_percent: float | None = None
    pulls_per_s: float | None = None
    """Pulls of one block a second, with 64 in flight."""
    tls_call_ratio: float | None = None
    """Time of our lightest call under mutual TLS, over that in plain text."""
    tls_pull_ratio: float | None = None
    """Time of one pull of one block, in the same way."""
    tls_rate_ratio: float | None = None
    """Pulls of one block a second with 64 in flight, in the same way."""
    authorization_us: float | None = None
    """Time that the gate takes of a call under mutual TLS with roles, in microseconds."""
    private_window_ratio_shm: float | None = None
    """Bandwidth of pulls of the largest blocks over window, over that over shm."""
    metrics_ratio: float | None = None
    """Processor time of a pull at both servers with metrics, over that without."""
    tracing_off_ratio: float | None = None
    """The same of calls with a trace context that nobody records."""
    tracing_1_percent_ratio: float | None = None
    """The same of pulls of which one in a hundred is recorded and exported."""
    tracing_100_percent_ratio: float | None = None
    """The same of pulls that are all recorded and exported."""
    scrape_10000_ms: float | None = None
    """Time for which a scrape holds the event loop of a lead with 10,000 leases, in milliseconds."""
    details: dict[str, float] = field(default_factory=dict)
    """Figures beside the main ones, such as the time of an empty call in this run."""
    profile: list[str] = field(default_factory=list)
    """Profile of the servers' processor time of a pull, if asked for."""

    def targets(self) -> list[Target]:
        return [
            Target("one_block_pull_ms_p50", self.one_block_pull_ms_p50, 2.0),
            Target("one_block_pull_ms_p50_busy", self.one_block_pull_ms_p50_busy, 3.0),
            Target("rested_pull_ratio", self.rested_pull_ratio, 2.0),
            Target("completion_to_waiter_ms_p50", self.completion_to_waiter_ms_p50, 1.0),
            Target("completion_to_waiter_ms_p50_busy", self.completion_to_waiter_ms_p50_busy, 2.0),
            Target("coalescing_ratio", self.coalescing_ratio, 2.0, at_least=True),
            Target("renew_1000_ms", self.renew_1000_ms, 5.0),
            Target("lease_cost_ratio_100k", self.lease_cost_ratio_100k, 2.0),
            Target("unary_ratio_empty", self.unary_ratio_empty, 1.2),
            Target("idle_core_percent", self.idle_core_percent, 2.0),
            Target("tls_call_ratio", self.tls_call_ratio, 1.15),
            Target("tls_pull_ratio", self.tls_pull_ratio, 1.15),
            Target("tls_rate_ratio", self.tls_rate_ratio, 0.85, at_least=True),
            Target("authorization_us", self.authorization_us, 10.0),
            Target("private_window_ratio_shm", self.private_window_ratio_shm, 0.45, at_least=True),
            Target("metrics_ratio", self.metrics_ratio, 1.02),
            Target("tracing_off_ratio", self.tracing_off_ratio, 1.02),
            Target("tracing_1_percent_ratio", self.tracing_1_percent_ratio, 1.05),
            Target("tracing_100_percent_ratio", self.tracing_100_percent_ratio, 1.35),
            Target("scrape_10000_ms", self.scrape_10000_ms, 20.0),
        ]

    def figures(self) -> dict[str, float | None]:
        plain = {"pulls_per_s": self.pulls_per_s, "lease_us": self.lease_us}
        return {**plain, "memcpy_whole_gbps": self.memcpy_whole_gbps, **self.details}
