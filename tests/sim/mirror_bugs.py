"""Bugs of engines with mirrors, to be planted in the core: see mutants."""

from dataclasses import replace
from typing import Any


def read_uncopied(add: Any) -> Any:
    """What is handed over is not waited for until it is in the mirrors."""

    def _add(self: Any, lease: Any, number: int, *rest: Any) -> None:
        add(self, lease, number, *rest)
        lease.uncopied.discard(number)

    return _add


def copied_early(add: Any) -> Any:
    """What is handed over is copied before the step that writes it is done."""

    def _add(self: Any, lease: Any, number: int, blocks: Any, layers: Any, _: int) -> None:
        add(self, lease, number, blocks, layers, 0)

    return _add


def copied_anyway(copied: Any) -> Any:
    """A rank that could not copy is taken for one that has."""
    return lambda self, event: copied(self, replace(event, message=""))


def copied_by_one(copied: Any) -> Any:
    """The first rank that has copied speaks for all."""

    def _copied(self: Any, event: Any) -> None:
        for rank in range(self._state.pool.world_size):
            copied(self, replace(event, rank=rank))

    return _copied
