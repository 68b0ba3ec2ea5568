"""The steps of a modelled engine: work is queued now and done when its step is over, rank by rank."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from kvgrpc.core.events import StepDone
from kvgrpc.core.values.call import LayerRange
from sim.world.memory import ALL_LAYERS

STEP_S = (0.005, 0.05)
LAG_S = 0.01
"""Maximum delay between two ranks, or between one layer and the next, in seconds."""
BY_LAYER = 0.5
"""Share of the steps that report each layer."""


@dataclass(frozen=True)
class Work:
    """Work of a step: `do` runs on every rank for some layers at a time, `then` once all ranks are done."""

    do: Callable[[int, LayerRange], None]
    then: Callable[[], None]


class Steps:
    """Steps that run one after another, only while there is work. `layers` are those of each rank; `later` and `report`
    are the lead's.
    """

    def __init__(
        self,
        rng: Random,
        layers: Sequence[Collection[int]],
        later: Callable[[float, Callable[[], None]], None],
        report: Callable[[StepDone], None],
    ) -> None:
        self._rng = rng
        self._layers = [tuple((layer, 1) for layer in sorted(mine)) for mine in layers]
        self._later = later
        self._report = report
        self._number = 0
        self._works: list[Work] = []
        self._ends: list[deque[Callable[[], None]]] = [deque() for _ in layers]
        """Ends of each rank's steps. They come in order, with any delay."""

    def queue(self, work: Work) -> int:
        """Adds work to the next step. Returns the step's number."""
        if not self._works:
            self._number += 1
            self._later(self._rng.uniform(*STEP_S), self._run)
        self._works.append(work)
        return self._number

    def _run(self) -> None:
        works, self._works = self._works, []
        number = self._number
        left = set(range(len(self._layers)))
        by_layer = self._rng.random() < BY_LAYER

        def end(rank: int, layers: LayerRange, *, last: bool) -> None:
            for work in works:
                work.do(rank, layers)
            if last:
                left.discard(rank)
            self._report(StepDone(rank, number, None if last else layers))
            for work in works if last and not left else ():
                work.then()

        for rank, ends in enumerate(self._ends):
            at_s = 0.0
            pieces: tuple[LayerRange, ...] = self._layers[rank] if by_layer else (ALL_LAYERS,)
            for layers in pieces:
                at_s += self._rng.uniform(0.0, LAG_S)
                ends.append(partial(end, rank, layers, last=layers == pieces[-1]))
                self._later(at_s, lambda ends=ends: ends.popleft()())  # type: ignore[misc]
