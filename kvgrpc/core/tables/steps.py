"""How far each rank is with the engine's steps."""

from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.compatibility import EngineDescription


class RankSteps:
    """The last engine step that each rank has finished, in each layer of its pipeline stage."""

    def __init__(self, engine: EngineDescription | None) -> None:
        ranks = range(engine.world_size) if engine is not None else ()
        self._steps: list[dict[int, int]] = [
            dict.fromkeys(sorted(engine.pool.stage_layers[rank // engine.stage_ranks]), 0)
            for rank in ranks
            if engine is not None
        ]

    def finish(self, rank: int, step: int, layers: LayerRange | None) -> None:
        """A rank finished all work of the steps up to this one; with `layers` only that of those layers."""
        mine = self._steps[rank]
        for layer, before in mine.items():
            if _within(layer, layers):
                mine[layer] = max(before, step)

    def done(self, layers: LayerRange | None = None) -> int:
        """The last step that every rank has finished: in all its layers, or in those of these that it has."""
        return min((step for mine in self._steps for layer, step in mine.items() if _within(layer, layers)), default=0)


def _within(layer: int, layers: LayerRange | None) -> bool:
    return layers is None or layers[0] <= layer < sum(layers)
