"""Planted bugs of engines with mirrors; see `mutants`."""

from dataclasses import replace
from typing import Any


def read_uncopied(add: Any) -> Any:
    """A lease does not wait until its blocks are in the mirrors."""

    def _add(self: Any, lease: Any, number: int, *rest: Any) -> None:
        add(self, lease, number, *rest)
        lease.uncopied.discard(number)

    return _add


def copied_early(add: Any) -> Any:
    """Blocks are copied into the mirrors before the step that writes them is done."""

    def _add(self: Any, lease: Any, number: int, blocks: Any, layers: Any, _: int) -> None:
        add(self, lease, number, blocks, layers, 0)

    return _add


def copied_anyway(copied: Any) -> Any:
    """A rank whose copy failed counts as having copied."""
    return lambda self, event: copied(self, replace(event, message=""))


def copied_by_one(copied: Any) -> Any:
    """The first rank that has copied counts for all ranks."""

    def _copied(self: Any, event: Any) -> None:
        for rank in range(self._state.life.engine.world_size):
            copied(self, replace(event, rank=rank))

    return _copied
