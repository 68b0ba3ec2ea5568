"""The engine's end of the void page: one store takes handed-over blocks back."""

import mmap
import os


class VoidSlots:
    """Slots of the page that the lead shares. Without a page there are none, and `take` returns 0."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._free: list[int] = []
        self._slots: dict[str, int] = {}

    def begin(self, fd: int, slots: int) -> None:
        """Maps the page of a new lead in place of the last one. Takes the descriptor over."""
        self.close()
        self._map = mmap.mmap(fd, slots) if slots else None
        if fd >= 0:
            os.close(fd)
        self._free = list(range(slots, 0, -1))

    def take(self, lease_id: str) -> int:
        """Returns the slot of a lease, the same for all its parts; 0 when none is free."""
        slot = self._slots.get(lease_id, 0)
        if not slot and self._free:
            slot = self._slots[lease_id] = self._free.pop()
        return slot

    def void(self, lease_id: str) -> bool:
        """Voids a lease: on return the lead vouches for none of its blocks. Returns False if it has no slot."""
        slot = self._slots.get(lease_id)
        if slot is None or self._map is None:
            return False
        self._map[slot - 1] = 1
        return True

    def ended(self, lease_id: str) -> bool:
        """Frees the slot of a lease that is over for the lead. Returns whether its blocks were taken back."""
        slot = self._slots.pop(lease_id, None)
        if slot is None or self._map is None:
            return False
        taken_back, self._map[slot - 1] = self._map[slot - 1] == 1, 0
        self._free.append(slot)
        return taken_back

    def close(self) -> None:
        """Unmaps the page: no lease has a slot any more. Idempotent."""
        self._free, self._slots = [], {}
        if self._map is not None:
            self._map.close()
            self._map = None
