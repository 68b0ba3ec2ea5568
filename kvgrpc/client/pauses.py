"""Computes the pause before the next attempt at a server: it grows with each failure in a row, up to a bound."""

import random

FIRST_S = 0.1
MAX_S = 2.0


def growing(
    failures: int, asked_s: float | None = None, *, first_s: float | None = None, max_s: float | None = None
) -> float:
    """Returns the pause after that many failures in a row, in seconds. A longer pause that the server asks for wins."""
    first_s, max_s = FIRST_S if first_s is None else first_s, MAX_S if max_s is None else max_s
    longest = min(max_s, first_s * 2.0 ** min(failures - 1, 30))
    # Jitter keeps clients of one server from retrying all at once. Any generator will do: the number is no secret.
    return max(longest * random.uniform(0.5, 1.0), asked_s or 0.0)  # noqa: S311
