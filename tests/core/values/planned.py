"""Plans the runs that move between two pools of one rank each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.bridge import Bridge, BridgeSide
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.layout import PoolLayout


def planned(bridge: Bridge, *chunks: Chunk) -> Runs:
    """Returns the runs of chunks between two ranks; empty where nothing moves."""
    nothing: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    return next((some.runs for some in bridge.plan(chunks)), Runs(nothing, nothing, nothing))


def alone(pool: PoolLayout, other: PoolLayout | None = None) -> Bridge:
    """Makes the bridge between two engines of one rank each."""
    return Bridge(BridgeSide(pool, 1), BridgeSide(other or pool, 1))


def plan_runs(
    source: PoolLayout, destination: PoolLayout, blocks: Sequence[Ids], filled: Sequence[Ids],
    layers: LayerRange | None = None,
) -> Runs:  # fmt: skip
    """Plans the runs that fill blocks of each group of the destination from those of the source."""
    return planned(alone(source, destination), Chunk(tuple(blocks), tuple(filled), layers))
