"""Request times: the one order in which all engines put requests that wait for each other.

A hand-over, a claim and a request that lacks blocks each have the time at which their request began. Who began earlier
is older. Clocks of hosts may differ: that costs fairness, never progress, for whatever the times are, all engines
compare the same ones.
"""

from typing import NamedTuple

REQUEST_AGE_MAX_NS = 600 * 10**9
"""No request is taken for older than this by the engine that first hears its time from others: whoever invents one
gets no further ahead.
"""


class RequestTime(NamedTuple):
    """A request's place in that order; the greater one is younger."""

    time_ns: int
    """Since the Unix epoch."""
    request_id: str
    """Tells apart those of the same nanosecond."""


def plausible(time_ns: int, wall_ns: int) -> int:
    """The time that is taken for the one stated at the wall clock's `wall_ns`; 0, not known, is now."""
    return min(max(time_ns, wall_ns - REQUEST_AGE_MAX_NS), wall_ns) if time_ns else wall_ns
