"""The clock of one lead: it has nothing to do with any other, and may run faster or slower."""

from kvgrpc.sim.agenda import Agenda
from kvgrpc.sim.faults import Luck

SKEW_S = (0.0, 1e6)
"""What it shows when the world begins."""


class Clock:
    """Of one life of a lead's process."""

    def __init__(self, agenda: Agenda, luck: Luck) -> None:
        self._agenda = agenda
        self._skew_s = luck.draw(SKEW_S)
        self._pace = 1.0 + luck.deviates("drift")

    def now(self) -> float:
        """What it shows."""
        return self._agenda.now * self._pace + self._skew_s

    def when(self, shown: float) -> float:
        """The time of the world at which it shows that."""
        return (shown - self._skew_s) / self._pace
