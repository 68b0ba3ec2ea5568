"""A cap on the bytes that one rank moves, by which an operator leaves bandwidth to others on the host.

Postings are cut into slices, and each slice is booked on one timeline that runs at the cap. This is pure arithmetic:
the mover asks when a slice may start, and waits by itself.
"""

from dataclasses import dataclass

from kvgrpc.errors import InvalidRequest, Reason

SLICE_S = 0.02
"""Time in which the cap allows one slice, in seconds: short, so that postings share the cap fairly."""
_SLICE_BYTES_MIN = 4096


@dataclass
class BandwidthCap:
    """Turns bytes into times. Raises InvalidRequest for a cap that is not positive."""

    bytes_per_s: float
    _free_at: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0:
            raise InvalidRequest(Reason.INVALID_FIELD, "a bandwidth limit is positive, or None")

    @property
    def slice_bytes(self) -> int:
        return max(int(self.bytes_per_s * SLICE_S), _SLICE_BYTES_MIN)

    def book(self, nbytes: int, now: float) -> float:
        """Returns the time at which `nbytes` may start to move: after the time that they and all before them take."""
        self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
        return self._free_at
