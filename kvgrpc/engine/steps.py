"""Steps: the reports that a new lead must get again, since its count of steps begins at 0."""

from collections.abc import Iterator

from kvgrpc.engine.transfers.pushes import LayerRange


class Steps:
    """The last whole step that was reported, and the reported layers of later steps."""

    def __init__(self) -> None:
        self._done = 0
        self._layers: list[tuple[int, LayerRange]] = []

    def done(self, step: int, layers: LayerRange | None = None) -> None:
        """Notes a report of a whole step, or of some layers."""
        if layers is not None:
            self._layers.append((step, layers))
        else:
            self._done = max(self._done, step)
        self._layers = [row for row in self._layers if row[0] > self._done]

    def __iter__(self) -> Iterator[tuple[int, LayerRange | None]]:
        """Yields (step, layers or None for all of them), in order."""
        if self._done:
            yield self._done, None
        yield from self._layers
