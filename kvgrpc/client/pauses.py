"""The pause before a server is asked again: it grows with each failure in a row, up to a bound."""

import random

FIRST_S = 0.1
MAX_S = 2.0


def growing(
    failures: int, asked_s: float | None = None, *, first_s: float | None = None, max_s: float | None = None
) -> float:
    """Seconds after so many failures in a row. A server's wish counts when it is longer."""
    first_s, max_s = FIRST_S if first_s is None else first_s, MAX_S if max_s is None else max_s
    longest = min(max_s, first_s * 2.0 ** min(failures - 1, 30))
    # Jitter keeps clients of one server from coming back all at once. Not a secret, so any generator will do.
    return max(longest * random.uniform(0.5, 1.0), asked_s or 0.0)  # noqa: S311
