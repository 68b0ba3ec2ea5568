"""Results of `python -m bench tensors`, and their targets."""

from dataclasses import dataclass, field
from typing import ClassVar

from bench.results.pulls import Run
from bench.results.targets import Target

BASELINES = {
    "gloo": "send and recv of torch.distributed with Gloo between two processes, one message a tensor, 8 of them under"
    " way; for `put` one",
    "put_async": "all tensors are put at once; the other engine gets them in order, 8 at a time, and gives each back",
    "put_in_place": "the same, of tensors that the source has computed in its store",
    "put": "each tensor is put when the other engine has the one before",
    "get": "the source keeps all tensors; the other engine fetches them in order, 8 at a time",
    "full_ratio": "put_async into a store with room for 8 tensors, over one with room for all of them",
}


@dataclass(frozen=True)
class TensorCase:
    """Tensors from one engine to another. Ratios are medians over pairs; above 1 we are faster."""

    name: str
    datapath: str
    way: str
    tensor_bytes: int
    tensors: int
    gbps: float
    """Bandwidth in GB/s (10^9 bytes a second), until the other engine has had the last tensor."""
    gloo_gbps: float
    ratio_gloo: float
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    """First and third quartile of the repeats, by name of a figure."""

    def targets(self) -> list[Target]:
        """Returns the case's ratio as a target, if many tensors are in flight. A single `put` only pays for its
        calls.
        """
        if self.way == "put":
            return []
        return [Target("ratio_gloo", self.ratio_gloo, 0.8, at_least=True)]


@dataclass
class TensorResult(Run):
    """A run of `python -m bench tensors`."""

    kind: ClassVar[str] = "tensors"
    cases: list[TensorCase] = field(default_factory=list)
    full_ratio: dict[str, float] = field(default_factory=dict)
    """Ratio by data path."""

    def targets(self) -> list[Target]:
        return [Target(f"full_ratio over {path}", ratio, 0.9, at_least=True) for path, ratio in self.full_ratio.items()]

    def figures(self) -> dict[str, float | None]:
        return {}
