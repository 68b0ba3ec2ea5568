"""Calls that wait for tensors. They are bounded in number, and each has a deadline."""

from collections.abc import Collection, Iterator

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tensors.descriptions import Description, TensorId
from kvgrpc.core.tensors.rows import Purpose, TensorWait
from kvgrpc.core.values.owners import meet
from kvgrpc.errors import DeadlineExceeded, Exhausted, PreconditionFailed, Reason

RETRY_DELAY_S = 0.1
"""Retry delay told to a caller, in seconds. A lead that puts a tensor waits at least as long, whatever it is told."""
WAIT_BYTES = 3_000
"""Estimated bytes of a waiting call with its request."""
_SAID = {
    Purpose.STORED: "was not stored",
    Purpose.GIVEN: "did not come",
    Purpose.OFFERED: "was not put here",
}


class Waits:
    """Waiting calls, by number, by tensor and by deadline."""

    def __init__(self, most: int, ledger: Ledger, timers: Timers) -> None:
        self._most = most
        self._ledger = ledger
        self._rows: dict[int, TensorWait] = {}
        self._of: dict[bytes, dict[TensorId, dict[int, TensorWait]]] = {}
        """Waiting calls by request and tensor."""
        self._timers = timers

    def __len__(self) -> int:
        return len(self._rows)

    def check_room(self, count: int = 1) -> None:
        """Raises Exhausted (QUEUE_FULL) when there is no room for `count` more calls."""
        if len(self._rows) + count > self._most:
            text = f"{self._most} calls wait for tensors here"
            raise Exhausted(Reason.QUEUE_FULL, text, retry_delay_s=RETRY_DELAY_S, metadata={"limit": str(self._most)})

    def add(self, wait: TensorWait) -> None:
        """Adds a call. Raises Exhausted (QUEUE_FULL, or LIMIT_EXCEEDED for its payer's kept bytes)."""
        self.check_room()
        self._ledger.enter(RowKind.TENSOR_WAIT, wait.number, wait.payer, WAIT_BYTES)
        self._rows[wait.number] = wait
        self._of.setdefault(wait.id.key, {}).setdefault(wait.id, {})[wait.number] = wait
        self._timers.set(Timer.TENSOR_WAIT, str(wait.number), wait.deadline)

    def forget(self, number: int) -> None:
        """Removes a call that waits no more, if it is there."""
        wait = self._rows.pop(number, None)
        if wait is not None:
            self._timers.clear(Timer.TENSOR_WAIT, str(number))
            self._ledger.drop(RowKind.TENSOR_WAIT, number)
            of = self._of[wait.id.key]
            del of[wait.id][number]
            if not of[wait.id]:
                del of[wait.id]
            if not of:
                del self._of[wait.id.key]

    def find(self, number: int) -> TensorWait | None:
        """Returns the call of this number, if it still waits."""
        return self._rows.get(number)

    def of(self, id_: TensorId, purposes: Collection[Purpose], tenant: str) -> list[TensorWait]:
        """Returns the calls that wait for a tensor of a tenant for one of these purposes, in the order of their
        arrival.
        """
        rows = self._of.get(id_.key, {}).get(id_)
        if not rows:
            return []
        return [wait for wait in rows.values() if wait.purpose in purposes and meet(wait.tenant, tenant)]

    def unlike(
        self, id_: TensorId, purpose: Purpose, described: Description, tenant: str
    ) -> Iterator[tuple[TensorWait, PreconditionFailed]]:
        """Yields the calls that expect another tensor than the described one, with their errors."""
        for wait in self.of(id_, (purpose,), tenant):
            try:
                wait.expected.check(described)
            except PreconditionFailed as error:
                yield wait, error

    def ids(self, key: bytes) -> list[TensorId]:
        """Returns the tensors of a request that calls wait for."""
        return list(self._of.get(key, ()))

    def expire(self, name: str) -> tuple[TensorWait, DeadlineExceeded]:
        """Removes a call whose deadline, of that name, is over. Returns it with its error."""
        wait = self._rows[int(name)]
        self.forget(wait.number)
        what = f"tensor {wait.id.name} part {wait.id.part} {_SAID[wait.purpose]} in time"
        return wait, DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "tensor"})
