"""Results of `python -m bench push` and `python -m bench layerwise`, and their targets."""

from dataclasses import dataclass, field
from typing import ClassVar

from bench.plan import COLLECTIVE
from bench.results.between_hosts import BETWEEN_HOSTS, BetweenHosts, targets_of
from bench.results.pulls import CONTROL, RAW_NIXL, Run
from bench.results.targets import Target

PUSH_BASELINES = {
    **CONTROL,
    "pull": "a pull of the same blocks between the same two servers",
    "raw_nixl WRITE": f"{RAW_NIXL}; the source writes",
    "raw_nixl READ": "the same, the destination reads",
    "nixl-tcp": "all processes of ours and of the baseline run with UCX_TLS=tcp; the base is the better of READ and"
    " WRITE",
    **BETWEEN_HOSTS,
    "one_block_push_ms_p50": "from the call of FinishedBlocks to the woken waiter, by gRPC; registered before."
    " details.session_one_block_push_ms_p50: from Push.finished of one attached engine to the event Received of the"
    " other",
    "control_8192_ms": "processor time of both leads for one push of scattered blocks with an opaque content:"
    " ReserveBlocks, RegisterPush, FinishedBlocks, OpenAccess, PartsReady, SettleAccess and WaitTransfer, each parsed,"
    " decided in the core, answered and serialised, and the plan of descriptors; no sockets, no gRPC, no bytes moved."
    " details.servers_*: processor time of two real servers per push of so many blocks of 64 bytes, gRPC and kernel"
    " included",
    "waiting_cost_ratio": "processor time of both cores for one push beside many registrations that wait at source and"
    " destination, over the same beside few",
}
LAYERWISE_BASELINES = {
    "prefill": "a synthetic one: a layer of all blocks is finished every layer_ms, which makes the prefill"
    " longer than moving all blocks takes; it uses no processor",
    "pushed whole": "one part with everything, handed over after the prefill",
    "layer by layer": "one part for each layer, handed over when the layer is finished",
    "layers early": "layers that the engine at the destination had before the end of the prefill",
    "time left": "from the end of the prefill until the engine at the destination has Received",
    "visible_ratio": "of a case: the median over its pairs; of the run: that of the worst case",
    "processor of P, of D": "processor time of the servers at source and destination in a layer-wise push, for each"
    " layer, in ms",
    "nixl-tcp": "both servers run with UCX_TLS=tcp",
}
_BASE_BOUND = 0.95
_VISIBLE_BOUND = 0.25


@dataclass(frozen=True)
class PushCase(BetweenHosts):
    """One case of pushes. Above 1 we are faster than the base."""

    name: str
    datapath: str
    block_bytes: int
    blocks: int
    layout: str
    threads: int
    descriptors: int
    mover: str
    """Side that moved the bytes: source or destination."""
    gbps: float
    """Bandwidth in GB/s (10^9 bytes a second), from the call of FinishedBlocks to the woken waiter."""
    control_ms: float
    """Time of one push in milliseconds, without the time in which postings were in flight."""
    base: str
    """Baseline of `ratio_base`, and its mode; empty without NIXL."""
    base_gbps: float | None
    ratio_base: float | None
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    """First and third quartile of the repeats, by name of a figure."""

    def targets(self) -> list[Target]:
        """Returns the case's ratios as targets, first the ratio to its base."""
        base = Target("ratio_base", self.ratio_base, _BASE_BOUND, at_least=True)
        return [base, *(targets_of(self, self.block_bytes) if self.datapath == COLLECTIVE else ())]


@dataclass
class PushResult(Run):
    """A run of `python -m bench push`."""

    kind: ClassVar[str] = "push"
    cases: list[PushCase] = field(default_factory=list)
    one_block_push_ms_p50: float | None = None
    control_8192_ms: float | None = None
    waiting_cost_ratio: float | None = None
    details: dict[str, float] = field(default_factory=dict)
    """Figures beside the main ones."""
    profile: list[str] = field(default_factory=list)
    """Profiles of the control work and of the servers' processor time of a push of one block, if asked for."""

    def targets(self) -> list[Target]:
        return [
            Target("one_block_push_ms_p50", self.one_block_push_ms_p50, 2.0),
            Target("control_8192_ms", self.control_8192_ms, 5.0),
            Target("waiting_cost_ratio", self.waiting_cost_ratio, 1.5),
        ]

    def figures(self) -> dict[str, float | None]:
        return dict(self.details)


@dataclass(frozen=True)
class LayerwiseCase:
    """One case of a prefill whose blocks are pushed, whole or layer by layer. Times are medians."""

    datapath: str
    layers: int
    block_bytes: int
    """Block size of one layer, in bytes."""
    blocks: int
    layout: str
    layer_ms: float
    """Time of one layer of the prefill, in milliseconds."""
    prefill_ms: float
    whole_ms: float
    """Time of a whole push without a prefill, in milliseconds. `layer_ms` is derived from it."""
    visible_whole_ms: float
    visible_layerwise_ms: float
    visible_ratio: float
    part_ms_source: float
    """Processor time of the server at the source for each part of one layer, in milliseconds."""
    part_ms_destination: float
    """Processor time of the server at the destination for each such part, including its copies, in milliseconds."""
    layers_early: float
    """Number of layers that the destination's engine had before the end of the prefill."""
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    """First and third quartile of the repeats, by name of a figure."""

    def targets(self) -> list[Target]:
        """Returns the case's ratio as a target."""
        return [Target("visible_ratio", self.visible_ratio, _VISIBLE_BOUND)]


@dataclass
class LayerwiseResult(Run):
    """A run of `python -m bench layerwise`."""

    kind: ClassVar[str] = "layerwise"
    cases: list[LayerwiseCase] = field(default_factory=list)
    visible_ratio: float | None = None

    def targets(self) -> list[Target]:
        return [Target("visible_ratio", self.visible_ratio, _VISIBLE_BOUND)]

    def figures(self) -> dict[str, float | None]:
        return {}
