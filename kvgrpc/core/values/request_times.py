"""Request times: the one order in which all engines put requests that wait for each other.

A hand-over, a claim and a request that lacks blocks each have the time at which their request began. Who began earlier
is older. Clocks of hosts may differ: that costs fairness, never progress, for whatever the times are, all engines
compare the same ones.
"""

from typing import NamedTuple

REQUEST_AGE_MAX_US = 600 * 10**6
"""No request is taken for older than this by the engine that first hears its time from others: whoever invents one
gets no further ahead.
"""


class RequestTime(NamedTuple):
    """A request's place in that order; the greater one is younger."""

    time_us: int
    """Since the Unix epoch."""
    request_id: str
    """Tells apart those of the same microsecond."""


def heard(stated_us: int, wall_us: int, *, own: bool) -> int:
    """The time that a lead takes for the one stated in a call; `own`: by the engine itself, which is believed. Where it
    is not known when the call came (0), what is stated stays.
    """
    return stated_us if not wall_us or (own and stated_us) else plausible(stated_us, wall_us)


def plausible(time_us: int, wall_us: int) -> int:
    """The time that is taken for the one stated at the wall clock's `wall_us`; 0, not known, is now."""
    return min(max(time_us, wall_us - REQUEST_AGE_MAX_US), wall_us) if time_us else wall_us
