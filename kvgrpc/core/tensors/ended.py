"""What has ended: requests, and single tensors of them. What comes for them later is refused for a while."""

from kvgrpc.core.tensors.values import TensorId
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason

Name = bytes | TensorId
"""A request by its transfer key, or one of its tensors."""

_SAID = {
    Reason.TRANSFER_ENDED: "was released",
    Reason.CANCELLED: "was cancelled",
}


class Ended:
    """A bounded table: past its bound the oldest row is forgotten."""

    def __init__(self, most: int, kept_s: float) -> None:
        self._most = most
        self._kept_s = kept_s
        self._rows: dict[Name, tuple[float, Reason]] = {}
        """Until when, and how it ended; oldest first."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: Name, reason: Reason, now: float) -> None:
        """It has ended now: TRANSFER_ENDED or CANCELLED."""
        self._rows.pop(name, None)
        if len(self._rows) >= self._most:
            del self._rows[next(iter(self._rows))]
        self._rows[name] = now + self._kept_s, reason

    def has(self, name: Name) -> bool:
        """Whether it is remembered to have ended."""
        return name in self._rows

    def error(self, id_: TensorId) -> KVGrpcError | None:
        """What comes too late for this tensor, or for all of its request, is refused with."""
        for name, what in ((id_.key, "its request"), (id_, f"tensor {id_.name} part {id_.part}")):
            row = self._rows.get(name)
            if row is not None:
                return PreconditionFailed(row[1], f"{what} {_SAID[row[1]]}")
        return None

    def expire(self, now: float) -> None:
        """Forgets what is old."""
        while self._rows and (first := next(iter(self._rows))) and self._rows[first][0] <= now:
            del self._rows[first]

    def next_deadline(self) -> float | None:
        """When there is something to forget."""
        return next(iter(self._rows.values()))[0] if self._rows else None
