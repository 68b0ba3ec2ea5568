"""Pipeline stages of vLLM: each worker knows the layers of its own stage only, and the engine has all of them."""

from collections.abc import Sequence
from dataclasses import replace

from kvgrpc.core.values.layout import PoolLayout


def joined(stages: Sequence[PoolLayout]) -> PoolLayout:
    """Returns the pool of an engine with these stages, each as its own workers see it: with layers numbered from 0.
    vLLM gives all stages the same groups, with as many blocks of the same size.
    """
    regions = [
        replace(region, first_layer=region.first_layer + first_layers(stages, stage)[region.group], stage=stage)
        for stage, layout in enumerate(stages)
        for region in layout.regions
    ]
    groups = tuple(
        replace(group, layers=layers)
        for group, layers in zip(stages[0].groups, first_layers(stages, len(stages)), strict=True)
    )
    return PoolLayout(groups, tuple(regions), max(layout.total_bytes for layout in stages))


def first_layers(stages: Sequence[PoolLayout], stage: int) -> list[int]:
    """Returns the number of a stage's first layer, for each group: the number of layers in the stages before it."""
    return [sum(layout.groups[i].layers for layout in stages[:stage]) for i in range(len(stages[0].groups))]
