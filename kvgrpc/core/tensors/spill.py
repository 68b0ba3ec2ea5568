"""Space outside a full store, and the choice of tensors that go there: the oldest are spilled, none is evicted."""

from kvgrpc.core.tensors.descriptions import TensorId
from kvgrpc.core.tensors.rows import Tensor

PASSED_OVER_MAX = 64
"""Maximum number of tensors passed over because they are too large for the free pages outside."""


class SpillPages:
    """The pages outside the store, free and used."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used_ever = 0
        self._given_back: list[int] = []

    @property
    def free(self) -> int:
        return self._most - self.used

    @property
    def used(self) -> int:
        return self._used_ever - len(self._given_back)

    def take(self, count: int) -> tuple[int, ...]:
        """Takes `count` of the free pages."""
        again = [self._given_back.pop() for _ in range(min(count, len(self._given_back)))]
        first = self._used_ever
        self._used_ever += count - len(again)
        return (*again, *range(first, self._used_ever))

    def free_of(self, tensor: Tensor) -> None:
        """Makes the pages of a tensor free again."""
        self._given_back += tensor.slots
        tensor.slots = ()


class Idle:
    """Tensors in the store that nobody has asked for, oldest first."""

    def __init__(self) -> None:
        self._rows: dict[TensorId, Tensor] = {}
        self._pages = 0

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor as the newest."""
        self._rows[tensor.id] = tensor
        self._pages += tensor.pages

    def discard(self, tensor: Tensor) -> None:
        """Removes a tensor that was asked for or is not in the store any more."""
        if self._rows.pop(tensor.id, None) is not None:
            self._pages -= tensor.pages

    def choose(self, pages: int, room: int) -> list[Tensor]:
        """Returns the oldest tensors that have `pages` pages together and fit into `room` pages, or [].

        A request for more pages than there are costs nothing, because it is repeated at every change.
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
