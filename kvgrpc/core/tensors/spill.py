"""Room outside of the store, and which tensors of the store go there."""

from kvgrpc.core.tensors.rows import Tensor
from kvgrpc.core.tensors.values import TensorId

PASSED_OVER_MAX = 64
"""Tensors that are too large for what is left outside, before no more are looked at."""


class SpillPages:
    """Which pages outside of the store are free."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used_ever = 0
        self._given_back: list[int] = []

    @property
    def free(self) -> int:
        """How many."""
        return self._most - self.used

    @property
    def used(self) -> int:
        """How many are not free."""
        return self._used_ever - len(self._given_back)

    def take(self, count: int) -> tuple[int, ...]:
        """So many of the free ones."""
        again = [self._given_back.pop() for _ in range(min(count, len(self._given_back)))]
        first = self._used_ever
        self._used_ever += count - len(again)
        return (*again, *range(first, self._used_ever))

    def give_back(self, slots: tuple[int, ...]) -> None:
        """They are free again."""
        self._given_back += slots


class Idle:
    """Tensors in the store that nobody has asked for, oldest first."""

    def __init__(self) -> None:
        self._rows: dict[TensorId, Tensor] = {}
        self._pages = 0

    def add(self, tensor: Tensor) -> None:
        """It is the newest."""
        self._rows[tensor.id] = tensor
        self._pages += tensor.pages

    def discard(self, tensor: Tensor) -> None:
        """It is asked for, or is in the store no more."""
        if self._rows.pop(tensor.id, None) is not None:
            self._pages -= tensor.pages

    def choose(self, pages: int, room: int) -> list[Tensor]:
        """The oldest that have so many pages together, in as many as there is `room` for; none where that does not do.

        What cannot do costs nothing: it is asked for again whenever something changes.
        """
        if pages > min(room, self._pages):
            return []
        chosen: list[Tensor] = []
        freed = passed_over = 0
        for tensor in self._rows.values():
            if freed >= pages or passed_over >= PASSED_OVER_MAX:
                break
            if freed + tensor.pages <= room:
                chosen.append(tensor)
                freed += tensor.pages
            else:
                passed_over += 1
        return chosen if freed >= pages else []
