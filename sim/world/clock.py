"""The clock of one lead: it is unrelated to any other, and may run faster or slower."""

from collections.abc import Callable

from sim.world.agenda import Agenda
from sim.world.faults import Luck

NEVER = float("inf")
SKEW_S = (0.0, 1e6)
"""Range of its time when the world begins, in seconds."""


class Clock:
    """The clock of one life of a lead's process."""

    def __init__(self, agenda: Agenda, luck: Luck) -> None:
        self._agenda = agenda
        self._skew_s = luck.draw(SKEW_S)
        self._pace = 1.0 + luck.deviates("drift")

    def now(self) -> float:
        """Returns the time that the clock shows."""
        return self._agenda.now * self._pace + self._skew_s

    def when(self, shown: float) -> float:
        """Returns the time of the world at which the clock shows `shown`."""
        return (shown - self._skew_s) / self._pace


class Alarm:
    """The alarm of one life of a lead's process: calls `ring` when its clock shows the earliest time that was set."""

    def __init__(self, agenda: Agenda, clock: Clock, ring: Callable[[float], None]) -> None:
        self._agenda = agenda
        self._clock = clock
        self._ring = ring
        self._at = NEVER

    def set(self, deadline: float | None) -> None:
        """Makes the alarm ring at `deadline`, unless an earlier time is set."""
        if deadline is None or deadline >= self._at:
            return
        self._at = deadline

        def tick() -> None:
            if self._at == deadline:
                self._at = NEVER
                self._ring(deadline)

        self._agenda.at(self._clock.when(deadline), tick)
