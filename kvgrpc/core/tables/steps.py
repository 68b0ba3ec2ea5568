"""The progress of each rank in the engine's steps."""

from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.compatibility import EngineDescription


class RankSteps:
    """The last engine step that each rank has finished, in each layer of its pipeline stage."""

    def __init__(self, engine: EngineDescription | None) -> None:
        self._engine = engine
        self._steps: dict[int, dict[int, int]] = {}
        """Rank -> layer -> last finished step, for ranks that have reported."""
        self._whole = [0] * (engine.world_size if engine is not None else 0)
        """Last step that each rank has finished in all its layers."""
        self._layers: dict[int, list[int]] = {}
        """Layers of each pipeline stage that was looked up."""

    def finish(self, rank: int, step: int, layers: LayerRange | None) -> None:
        """Records that a rank finished all work up to `step`, or with `layers` only that of those layers."""
        mine = self._steps.setdefault(rank, {})
        for layer in self._within(rank, layers):
            mine[layer] = max(mine.get(layer, 0), step)
        if len(mine) == len(self._within(rank, None)):
            self._whole[rank] = min(mine.values())

    def done(self, layers: LayerRange | None = None) -> int:
        """Returns the last step that every rank has finished in all its layers, or in its layers among `layers`."""
        if layers is None:
            return min(self._whole, default=0)
        ranks = range(len(self._whole))
        return min(
            (self._steps.get(rank, {}).get(layer, 0) for rank in ranks for layer in self._within(rank, layers)),
            default=0,
        )

    def _within(self, rank: int, layers: LayerRange | None) -> list[int]:
        """Returns a rank's layers, or those among `layers`."""
        assert self._engine is not None, "only a pool has ranks"
        stage = rank // self._engine.stage_ranks
        if stage not in self._layers:
            self._layers[stage] = self._engine.pool.stage_layers(stage)
        mine = self._layers[stage]
        return mine if layers is None else [layer for layer in mine if layers[0] <= layer < sum(layers)]
