"""Modelled memory that no data path reaches, with the mirror that peers and postings reach instead."""

from collections.abc import Sequence
from typing import Any

from sim.world.memory import UNWRITTEN, Memory


class MirroredMemory(Memory):
    """The engine computes and reads `cells`. A posting fills them only when it lands from the mirror."""

    mirrored = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._mirror = [UNWRITTEN] * len(self.cells)

    @property
    def outside(self) -> list[int]:
        return self._mirror

    def arrive(self, cell: int, number: int, transfer_id: str) -> None:
        self.check_given(cell, transfer_id)
        self._mirror[cell] = number

    def land(self, cells: Sequence[int], transfer_id: str) -> None:
        """Copies on what a posting has brought into the mirror."""
        for cell in cells:
            super().arrive(cell, self._mirror[cell], transfer_id)

    def copy_out(self, cells: Sequence[int]) -> None:
        """Copies cells into the mirror, as they are now."""
        for cell in cells:
            self._mirror[cell] = self.cells[cell]
