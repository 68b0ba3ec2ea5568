"""Faults of a world: their probabilities, and how long things take. Everything else is drawn from the seed."""

from collections import Counter
from dataclasses import dataclass, fields
from random import Random

Range = tuple[float, float]


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, posting or mapping; durations in seconds. The default is a healthy world."""

    delay_s: Range = (0.0001, 0.002)
    """Time of one message, one way."""
    slow: float = 0.0
    """A message takes `slow_s` instead, which reorders messages."""
    slow_s: Range = (0.05, 2.0)
    lose_request: float = 0.0
    lose_reply: float = 0.0
    duplicate: float = 0.0
    """A request arrives twice."""
    silence_s: Range = (0.5, 2.0)
    """Time for which a cut link or a crashed peer goes unnoticed by liveness."""

    cell_s: Range = (0.0001, 0.002)
    """Time in which a mover copies one cell."""
    stall: float = 0.0
    """A posting stops in the middle for `stall_s`."""
    stall_s: Range = (1.0, 60.0)
    break_posting: float = 0.0
    """A posting ends with an error in the middle."""
    lose_posting: float = 0.0
    """A posting is reported as failed in the middle while it goes on writing; the proof that it is at rest comes
    later.
    """
    report_late: float = 0.0
    """The end of a posting is reported `slow_s` late."""
    corrupt: float = 0.0
    """One cell of a posting arrives as something else, without an error."""
    mute: float = 0.0
    """A rank answers a request (an endpoint, a mapping, checksums) only after `stall_s`."""
    break_mapping: float = 0.0
    """A rank does not reach its peer."""
    break_copy: float = 0.0
    """A rank cannot copy between its memory and its mirror."""

    land_late: float = 0.0
    """Some of what a process wrote into a peer's memory lands `slow_s` after the process is gone."""
    undrained: float = 0.0
    """A rank that sees a process end cannot tell if all that the process had sent has arrived."""
    rekey_proves_nothing: float = 0.0
    """A peer may go on writing although the data path was restarted."""

    drift: float = 0.0
    """Maximum relative deviation of a lead's clock, faster or slower than the others."""

    def draw(self, rng: Random, span: Range) -> float:
        """Returns a duration between the two ends of `span`, in seconds."""
        low, high = span
        return low + (high - low) * rng.random()

    def without(self, kind: str) -> "Faults":
        """Returns the faults without that kind."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Faults(**values | {kind: 0.0})


KINDS = tuple(field.name for field in fields(Faults) if isinstance(field.default, float))
"""Names of the faults."""


class Luck:
    """Draws the faults of one part of a world. `seen` counts them; a fault that never happens draws nothing."""

    def __init__(self, rng: Random, faults: Faults, seen: Counter[str] | None = None) -> None:
        self.rng = rng
        self.faults = faults
        self._seen = Counter() if seen is None else seen

    def strikes(self, kind: str) -> bool:
        """Returns True if that fault happens this time."""
        odds: float = getattr(self.faults, kind)
        if odds <= 0 or self.rng.random() >= odds:
            return False
        self._seen[kind] += 1
        return True

    def deviates(self, kind: str) -> float:
        """Returns a random deviation, at most the size of that fault, to either side."""
        size: float = getattr(self.faults, kind)
        if size:
            self._seen[kind] += 1
        return self.rng.uniform(-size, size)

    def draw(self, span: Range) -> float:
        """Returns a duration between the two ends of `span`, in seconds."""
        return self.faults.draw(self.rng, span)


ROUGH = Faults(
    slow=0.05,
    lose_request=0.03,
    lose_reply=0.03,
    duplicate=0.03,
    stall=0.03,
    break_posting=0.02,
    lose_posting=0.02,
    report_late=0.02,
    mute=0.02,
    break_mapping=0.05,
    break_copy=0.02,
    land_late=0.5,
    undrained=0.3,
    rekey_proves_nothing=0.3,
    drift=0.01,
)
"""Faults of a bad day: most requests still succeed."""

STORMY = Faults(
    slow=0.1,
    lose_request=0.08,
    lose_reply=0.08,
    duplicate=0.1,
    stall=0.1,
    stall_s=(0.5, 10.0),
    break_posting=0.08,
    lose_posting=0.08,
    report_late=0.08,
    mute=0.05,
    break_mapping=0.1,
    break_copy=0.08,
    land_late=0.5,
    undrained=0.5,
    rekey_proves_nothing=0.5,
    silence_s=(0.1, 1.0),
    drift=0.05,
)
"""Faults of a day on which little succeeds."""

RPC_TIMEOUT_S = 1.0
"""Time after which a caller takes a call for lost, in seconds."""
OPEN_TIMEOUT_S = 8.0
"""Time after which a caller takes an OpenAccess for lost, in seconds. An OpenAccess may wait for its lease at the
issuer.
"""
