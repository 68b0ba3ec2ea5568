"""What goes wrong, how often, and how long things take. Everything else is drawn from the seed."""

from dataclasses import dataclass
from random import Random

Range = tuple[float, float]


@dataclass(frozen=True)
class Faults:
    """Probabilities are per message, posting or mapping; durations in seconds. The default is a healthy world."""

    delay_s: Range = (0.0001, 0.002)
    """One message, one way."""
    slow: float = 0.0
    """A message takes `slow_s` instead: this is what reorders."""
    slow_s: Range = (0.05, 2.0)
    lose_request: float = 0.0
    lose_reply: float = 0.0
    duplicate: float = 0.0
    """A request arrives twice."""
    silence_s: Range = (0.5, 2.0)
    """How long a cut link or a crashed peer goes unnoticed by liveness."""

    cell_s: Range = (0.0001, 0.002)
    """A mover copies one cell."""
    stall: float = 0.0
    """A posting stops in the middle for `stall_s`."""
    stall_s: Range = (1.0, 60.0)
    break_posting: float = 0.0
    """A posting ends with an error in the middle."""
    lose_posting: float = 0.0
    """A posting is reported as failed in the middle while it goes on writing; that it is at rest is proved later."""
    break_mapping: float = 0.0
    """A rank does not reach its peer."""
    rekey_proves_nothing: float = 0.0
    """A peer may go on writing although the data path began anew."""

    def draw(self, rng: Random, span: Range) -> float:
        """A duration between the two ends of `span`."""
        return rng.uniform(*span)

    def hits(self, rng: Random, probability: float) -> bool:
        """Whether it goes wrong this time. A fault that never happens draws nothing."""
        return probability > 0 and rng.random() < probability


ROUGH = Faults(
    slow=0.05,
    lose_request=0.03,
    lose_reply=0.03,
    duplicate=0.03,
    stall=0.03,
    break_posting=0.02,
    lose_posting=0.02,
    break_mapping=0.05,
    rekey_proves_nothing=0.3,
)
"""A bad day: most requests still succeed."""

RPC_TIMEOUT_S = 1.0
"""A caller takes a call for lost."""
OPEN_TIMEOUT_S = 8.0
"""The same for OpenAccess, which may wait for its lease at the issuer."""
