"""Calls that wait for tensors: bounded in number, each with a deadline."""

from collections.abc import Collection
from heapq import heappop, heappush

from kvgrpc.core.tensors.rows import Purpose, Wait
from kvgrpc.core.tensors.values import TensorId
from kvgrpc.errors import DeadlineExceeded, Exhausted, Reason

RETRY_DELAY_S = 0.1
_SAID = {
    Purpose.STORED: "was not stored",
    Purpose.GIVEN: "did not come",
    Purpose.OFFERED: "was not put here",
}


class Waits:
    """By number, by tensor and by deadline."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[int, Wait] = {}
        self._of: dict[bytes, dict[TensorId, dict[int, Wait]]] = {}
        """By request and tensor."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap, with those that are over until they are due."""

    def __len__(self) -> int:
        return len(self._rows)

    def check_room(self) -> None:
        """Raises Exhausted (QUEUE_FULL) where there is no room for one more."""
        if len(self._rows) >= self._most:
            text = f"{self._most} calls wait for tensors here"
            raise Exhausted(Reason.QUEUE_FULL, text, retry_delay_s=RETRY_DELAY_S, metadata={"limit": str(self._most)})

    def add(self, wait: Wait) -> None:
        """One more. Raises Exhausted (QUEUE_FULL)."""
        self.check_room()
        self._rows[wait.number] = wait
        self._of.setdefault(wait.id.key, {}).setdefault(wait.id, {})[wait.number] = wait
        heappush(self._deadlines, (wait.deadline, wait.number))

    def forget(self, number: int) -> None:
        """The call waits no more, for whatever reason."""
        wait = self._rows.pop(number, None)
        if wait is not None:
            of = self._of[wait.id.key]
            del of[wait.id][number]
            if not of[wait.id]:
                del of[wait.id]
            if not of:
                del self._of[wait.id.key]

    def of(self, id_: TensorId, purposes: Collection[Purpose]) -> list[Wait]:
        """Those that wait for a tensor for one of these purposes, in the order in which they came."""
        rows = self._of.get(id_.key, {}).get(id_, {})
        return [wait for wait in rows.values() if wait.purpose in purposes]

    def ids(self, key: bytes) -> list[TensorId]:
        """Tensors of a request that are waited for."""
        return list(self._of.get(key, ()))

    def due(self, now: float) -> list[tuple[Wait, DeadlineExceeded]]:
        """Those whose time is over, which are forgotten, and what they are refused with."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heappop(self._deadlines)
            wait = self._rows.get(number)
            if wait is not None:
                self.forget(number)
                what = f"tensor {wait.id.name} part {wait.id.part} {_SAID[wait.purpose]} in time"
                found.append((wait, DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "tensor"})))
        return found

    def next_deadline(self) -> float | None:
        """The earliest; it may be of a wait that is over."""
        return self._deadlines[0][0] if self._deadlines else None
