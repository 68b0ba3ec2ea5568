"""Tensors that end by themselves: those that nobody has asked for, or that only RPC callers hold, which may be gone."""

from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tensors.rows import Tensor
from kvgrpc.core.values.owners import ENGINE_SIDE


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
