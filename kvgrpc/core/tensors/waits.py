"""Deadlines of the tensor table: calls that wait for tensors, and tensors that end by themselves.

Waiting calls are bounded in number. Tensors that nobody has asked for end by themselves, and so do those that only RPC
callers hold, which may be gone.
"""

from collections.abc import Collection, Iterator

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tensors.descriptions import Description, TensorId
from kvgrpc.core.tensors.rows import Purpose, Tensor, TensorWait
from kvgrpc.core.values.owners import ENGINE_SIDE, meet
from kvgrpc.errors import DeadlineExceeded, PreconditionFailed, Reason, full

RETRY_DELAY_S = 0.1
"""Retry delay told to a caller, in seconds. A lead that puts a tensor waits at least as long, whatever it is told."""
WAIT_BYTES = 3_000
"""Estimated bytes of a waiting call with its request."""
_SAID = {Purpose.STORED: "was not stored", Purpose.GIVEN: "did not come", Purpose.OFFERED: "was not put here"}


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

    def check_room(self, payer: str, count: int = 1) -> None:
        """Raises Exhausted when there is no room for `count` more calls: QUEUE_FULL, or LIMIT_EXCEEDED for a tenant
        that would have more than its share.
        """
        if len(self._rows) + count > self._most:
            text = f"{self._most} calls wait for tensors here"
            raise full(text, self._most, RETRY_DELAY_S, Reason.QUEUE_FULL)
        self._ledger.check_rows(RowKind.TENSOR_WAIT, payer, self._most, count)

    def add(self, wait: TensorWait) -> None:
        """Adds a call. Raises Exhausted (QUEUE_FULL, or LIMIT_EXCEEDED for its payer's kept bytes or tenant)."""
        self.check_room(wait.payer)
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


class OwnEnds:
    """Deadlines of the tensors that end by themselves. All others have none."""

    def __init__(self, held_s: float, timers: Timers) -> None:
        self._held_s = held_s
        self._timers = timers
        self._tensors: dict[str, Tensor] = {}
        """Tensors by the names of their timers."""

    def stored(self, tensor: Tensor, now: float) -> None:
        """Sets the deadline to the tensor's TTL from now, unless it has a deadline already."""
        if str(tensor.number) not in self._tensors:
            self._at(tensor, now + tensor.ttl_s)

    def renewed(self, tensor: Tensor, now: float, most_s: float) -> None:
        """Renews the TTL of an unheld tensor that has a deadline, until it has been here for `most_s`."""
        when = self._timers.when(Timer.TENSOR_TTL, str(tensor.number))
        if when is not None and not tensor.holder:
            self._at(tensor, max(when, min(now + tensor.ttl_s, tensor.made + most_s)))

    def held(self, tensor: Tensor, now: float) -> None:
        """Clears the deadline of a tensor that the engine holds. Sets a new one for an RPC caller."""
        if tensor.holder in ENGINE_SIDE:
            self.never(tensor)
        else:
            self._at(tensor, now + self._held_s)

    def never(self, tensor: Tensor) -> None:
        """Clears the deadline of a tensor that was asked for or dropped."""
        if self._tensors.pop(str(tensor.number), None) is not None:
            self._timers.clear(Timer.TENSOR_TTL, str(tensor.number))

    def of(self, name: str) -> Tensor:
        """Returns the tensor whose deadline, of that name, is over."""
        return self._tensors[name]

    def _at(self, tensor: Tensor, when: float) -> None:
        name = str(tensor.number)
        self._tensors[name] = tensor
        self._timers.set(Timer.TENSOR_TTL, name, when)
