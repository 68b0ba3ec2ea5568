"""How long a mover waits between turns of data paths that need polling."""

# Up to this age of the last news, this long.
NEEDED_S = ((0.0002, 0.0), (0.005, 0.00005), (float("inf"), 0.0002))
_NEW_PEER_S = ((0.005, 0.0005), (float("inf"), 0.002))
"""While only peers move bytes and need no turns for it: one takes up to 0.1 ms of a processor, which a peer on this
host may miss just then."""


def back_off_s(news_age_s: float, *, needed: bool) -> float:
    """None for a moment after the last news, then short waits. `needed`: something moves only by these turns."""
    return next(wait for limit, wait in (NEEDED_S if needed else _NEW_PEER_S) if news_age_s < limit)
