"""Searches a smaller world that breaks the same rule, with fewer events, troubles, engines and requests."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvgrpc.core.values.limits import Limits
from sim.seeds import chaos, traffic
from sim.seeds.run import Violation, run
from sim.seeds.setup import Setup
from sim.world import faults

RUNS = 120
"""Maximum number of worlds to try. More rarely give one that is easier to read."""


Enough = Callable[[], bool]


def never() -> bool:
    """Returns False: the search is never cut short."""
    return False


class ShrinkSearch:
    """One search. `setup` and `violation` are the smallest found so far. The search stops early once `enough` returns
    True.
    """

    def __init__(self, setup: Setup, violation: Violation, runs: int = RUNS, enough: Enough = never) -> None:
        self.setup = setup
        self.violation = violation
        self._left = runs
        self._enough = enough

    @property
    def over(self) -> bool:
        """True once nothing more is tried."""
        return self._left <= 0 or self._enough()

    def run(self) -> None:
        """Tries what makes the largest difference first."""
        self._shorten()
        for smaller in (*_simpler(), *_fewer()):
            self._try(smaller(self.setup))
        self._leave_out()
        self._shorten()

    def _try(self, setup: Setup) -> bool:
        """Takes a setup if it breaks the same rule."""
        if setup == self.setup or self.over:
            return False
        self._left -= 1
        found = next((v for v in run(setup).violations if v.rule is self.violation.rule), None)
        if found is None:
            return False
        self.setup, self.violation = setup, found
        return True

    def _shorten(self) -> None:
        """Bisects the number of events. If the rule breaks in the middle, later events are not needed."""
        low, high = 0, min(self.setup.steps, self.violation.step)
        self._try(replace(self.setup, steps=high))
        while high - low > max(high // 16, 1) and not self.over:
            middle = (low + high) // 2
            if self._try(replace(self.setup, steps=middle)):
                high = min(middle, self.violation.step)
            else:
                low = middle

    def _leave_out(self) -> None:
        """Leaves requests out, in ever smaller portions."""
        if self.over:
            return
        count = run(self.setup).requests
        size = count
        while size >= 1:
            for first in range(1, count + 1, size):
                portion = frozenset(range(first, min(first + size, count + 1)))
                self._try(replace(self.setup, left_out=self.setup.left_out | portion))
            size //= 2


def _simpler() -> Iterator[Callable[[Setup], Setup]]:
    """Yields setups without each kind of trouble."""
    for kind in chaos.KINDS:
        yield lambda setup, kind=kind: replace(setup, mishaps=setup.mishaps.without(kind))  # type: ignore[misc]
    for kind in faults.KINDS:
        yield lambda setup, kind=kind: replace(setup, faults=setup.faults.without(kind))  # type: ignore[misc]
    for kind in traffic.KINDS:
        yield lambda setup, kind=kind: replace(setup, habits=setup.habits.without(kind))  # type: ignore[misc]


def _fewer() -> Iterator[Callable[[Setup], Setup]]:
    """Yields smaller worlds."""
    yield lambda setup: replace(setup, engines=2)
    yield lambda setup: replace(setup, engines=min(setup.engines, 3))
    yield lambda setup: replace(setup, ranks=1)
    yield lambda setup: replace(setup, limits=Limits())
    yield lambda setup: replace(setup, writers=frozenset())
    yield lambda setup: replace(setup, hoarders=0)
    yield lambda setup: replace(setup, mirrored=0)
    yield lambda setup: replace(setup, collective=0)
    yield lambda setup: replace(setup, aliased=False)
    yield lambda setup: replace(setup, stages=(), unlike=tuple(min(ranks, 2) for ranks in setup.unlike))
    yield lambda setup: replace(setup, unlike=(), stages=())
    yield lambda setup: replace(setup, given_out=False)
    yield lambda setup: replace(setup, trespasses_per_s=0.0)
    yield lambda setup: replace(setup, liars=0)
    yield lambda setup: replace(setup, inventions_per_s=0.0)
    yield lambda setup: replace(setup, other_lives=0.0)
    yield lambda setup: replace(setup, false_checksums=0.0)
    yield lambda setup: replace(setup, rate_per_s=min(setup.rate_per_s, 2.0))


def shrink(setup: Setup, violation: Violation, runs: int = RUNS, enough: Enough = never) -> tuple[Setup, Violation]:
    """Returns the smallest setup that was found to break the same rule, and its violation."""
    search = ShrinkSearch(setup, violation, runs, enough)
    search.run()
    return search.setup, search.violation
