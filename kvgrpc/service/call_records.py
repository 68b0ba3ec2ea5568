"""Times of calls, whatever carries them. All of it runs on the event loop."""

import time
from collections import defaultdict

from kvgrpc.service.histogram import CALL_BOUNDS_S, Histogram

OK = "OK"
"""Status code of a call without an error."""


class CallRecords:
    """Calls that ended, by method and status code, while somebody counts them."""

    def __init__(self) -> None:
        self.counting = False
        self.seconds: dict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(CALL_BOUNDS_S))

    def ended(self, method: str, code: str, began: float) -> None:
        """Counts a call. `began` is on the clock of `time.perf_counter`."""
        if self.counting:
            self.seconds[method, code].observe(time.perf_counter() - began)
