"""Request times: the one order in which all engines put requests that wait for each other.

A hand-over, a claim and a request that lacks blocks each carry the time at which their request began. The request that
began earlier is older. Clocks of hosts may differ. That costs fairness, never progress, because all engines compare the
same times.
"""

from typing import NamedTuple

REQUEST_AGE_MAX_US = 600 * 10**6
"""Maximum age, in microseconds, at which the first engine that hears a request's time from others takes the request. An
invented time gains no more than that.
"""


class RequestTime(NamedTuple):
    """A request's place in the order of requests. The greater one is younger."""

    time_us: int
    """Microseconds since the Unix epoch."""
    request_id: str
    """Tie-breaker for requests of the same microsecond."""


def heard(stated_us: int, wall_us: int, *, own: bool) -> int:
    """Returns the time that a lead uses for the one stated in a call. If the engine itself states it (`own`), it is
    believed. If the call's arrival time is unknown (`wall_us` 0), the stated time stays.
    """
    return stated_us if not wall_us or (own and stated_us) else plausible(stated_us, wall_us)


def plausible(time_us: int, wall_us: int) -> int:
    """Returns the stated time clamped to the allowed age at `wall_us`. An unknown time (0) becomes `wall_us`."""
    return min(max(time_us, wall_us - REQUEST_AGE_MAX_US), wall_us) if time_us else wall_us
