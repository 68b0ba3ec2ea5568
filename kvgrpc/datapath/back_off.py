"""Waits between a mover's turns for data paths that need polling."""

# Rows (age of the last news up to which the row applies, wait), in seconds.
NEEDED_S = ((0.0002, 0.0), (0.005, 0.00005), (float("inf"), 0.0002))
_NEW_PEER_S = ((0.005, 0.0005), (float("inf"), 0.002))
"""Waits, in seconds, if bytes move only by peers and need no turns. A turn takes up to 0.1 ms of a processor, which a
peer here may need.
"""


def back_off_s(news_age_s: float, *, needed: bool) -> float:
    """Returns the wait in seconds: 0 just after the last news, then short. `needed`: bytes move only by turns."""
    return next(wait for limit, wait in (NEEDED_S if needed else _NEW_PEER_S) if news_age_s < limit)
