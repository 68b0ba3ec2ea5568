"""The steps of a modelled engine: work that is queued now and done when its step is over, rank by rank."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from kvgrpc.core.events import StepDone

STEP_S = (0.005, 0.05)
LAG_S = 0.01
"""How much later, at most, one rank is over than another."""


@dataclass(frozen=True)
class Work:
    """What a step does on every rank, and what may happen once all ranks have done it."""

    do: Callable[[int], None]
    then: Callable[[], None]


class Steps:
    """Steps come one after another, and only while there is work. `later` and `report` are those of the lead."""

    def __init__(
        self,
        rng: Random,
        ranks: int,
        later: Callable[[float, Callable[[], None]], None],
        report: Callable[[StepDone], None],
    ) -> None:
        self._rng = rng
        self._ranks = ranks
        self._later = later
        self._report = report
        self._number = 0
        self._works: list[Work] = []
        self._ends: list[deque[Callable[[], None]]] = [deque() for _ in range(ranks)]
        """Of each rank: its steps are over in their order, however late each is."""

    def queue(self, work: Work) -> int:
        """Does the work in the step that is being put together; its number."""
        if not self._works:
            self._number += 1
            self._later(self._rng.uniform(*STEP_S), self._run)
        self._works.append(work)
        return self._number

    def _run(self) -> None:
        works, self._works = self._works, []
        number = self._number
        left = set(range(self._ranks))

        def end(rank: int) -> None:
            for work in works:
                work.do(rank)
            left.discard(rank)
            self._report(StepDone(rank, number))
            for work in works if not left else ():
                work.then()

        for rank, ends in enumerate(self._ends):
            ends.append(partial(end, rank))
            self._later(self._rng.uniform(0.0, LAG_S), lambda ends=ends: ends.popleft()())  # type: ignore[misc]
