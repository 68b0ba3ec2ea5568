"""The steps of a modelled engine: work that is queued now and done when its step is over, rank by rank."""

from collections.abc import Callable
from random import Random

from kvgrpc.core.events import StepDone

STEP_S = (0.005, 0.05)
LAG_S = (0.0, 0.01)
"""How much later one rank is over than another."""


class Steps:
    """Steps come one after another, and only while there is work."""

    def __init__(
        self, rng: Random, ranks: int, later: Callable[[float, Callable[[], None]], None],
        report: Callable[[StepDone], None],
    ) -> None:  # fmt: skip
        self._rng = rng
        self._ranks = ranks
        self._later = later
        self._report = report
        self._number = 0
        self._works: list[Callable[[int], None]] = []

    def queue(self, work: Callable[[int], None]) -> int:
        """Does `work(rank)` on every rank in the step that is being put together; its number."""
        if not self._works:
            self._number += 1
            self._later(self._rng.uniform(*STEP_S), self._run)
        self._works.append(work)
        return self._number

    def _run(self) -> None:
        works, self._works = self._works, []
        number = self._number
        for rank in range(self._ranks):
            self._later(self._rng.uniform(*LAG_S), lambda rank=rank: self._end(number, rank, works))  # type: ignore[misc]

    def _end(self, number: int, rank: int, works: list[Callable[[int], None]]) -> None:
        for work in works:
            work(rank)
        self._report(StepDone(rank, number))
