"""The void page: where an engine takes blocks back that it handed over, faster than any message.

One byte for each slot, in memory that engine and lead share. The engine sets it before it reuses the blocks of the
slot's lease; the lead looks at it last before it vouches for them.
"""

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.tables.leases import LeaseTable
from kvgrpc.errors import invalid

SLOTS = 65_536
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class VoidPage:
    """The page of one session, and the lease of every slot in use."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvgrpc-void", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, SLOTS)
        # An engine that shrank it would kill its lead at the next look.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, SLOTS, prot=mmap.PROT_READ)
        self._flags: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._leases: dict[int, str] = {}
        self._slots: dict[str, int] = {}

    def name(self, slot: int, lease_id: str) -> None:
        """The slot, counted from 1, is that lease's only one. Raises InvalidRequest for one that cannot be."""
        if not 0 < slot <= SLOTS:
            raise invalid("void_slot", f"is from 1 to {SLOTS}")
        if not lease_id:
            raise invalid("void_slot", "belongs to a lease whose id the engine has minted")
        if self._leases.get(slot, lease_id) != lease_id:
            raise invalid("void_slot", f"{slot} is in use for lease {self._leases[slot]}")
        if self._slots.get(lease_id, slot) != slot:
            raise invalid("void_slot", f"lease {lease_id} has slot {self._slots[lease_id]}")
        self._leases[slot], self._slots[lease_id] = lease_id, slot

    def ended(self, lease_id: str) -> None:
        """The lease is over: its slot, if it has one, may be another's."""
        slot = self._slots.pop(lease_id, None)
        if slot is not None:
            del self._leases[slot]

    def refused(self, lease_id: str, leases: LeaseTable) -> None:
        """A hand-over was refused: its slot is free, unless other parts stand on the lease."""
        lease = leases.find(lease_id)
        if lease is None or not lease.live:
            self.ended(lease_id)

    def voided(self) -> tuple[str, ...]:
        """The leases whose flag is set, and that have not ended."""
        if not self._slots or not self._flags.any():
            return ()
        # Of a copy: numpy raises where flags change while it counts them, and the engine may set one at any moment.
        flags = self._flags.copy()
        if np.count_nonzero(flags) > len(self._leases):  # an engine may set those of slots that it named for no lease
            return tuple(lease_id for slot, lease_id in self._leases.items() if flags[slot - 1])
        found = (self._leases.get(slot, "") for slot in (np.flatnonzero(flags) + 1).tolist())
        return tuple(lease_id for lease_id in found if lease_id)

    def close(self) -> None:
        """Unmaps it. Idempotent."""
        if self.fd < 0:
            return
        self._slots.clear()
        self._flags = np.empty(0, dtype=np.uint8)
        self._map.close()
        os.close(self.fd)
        self.fd = -1
