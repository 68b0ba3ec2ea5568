"""The void page: an engine takes handed-over blocks back in it, faster than any message could.

It has one byte for each slot, in memory that engine and lead share. The engine sets the byte before it reuses the
blocks of the slot's lease. The lead reads it last before it vouches for them.
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
        # An engine that shrank it would kill its lead at the next read.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, SLOTS, prot=mmap.PROT_READ)
        self._flags: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._leases: dict[int, str] = {}
        self._slots: dict[str, int] = {}

    def name(self, slot: int, lease_id: str) -> None:
        """Names the only lease of a slot, which counts from 1. Raises InvalidRequest for an impossible pair."""
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
        """Frees the slot of a lease that is over, if it has one."""
        slot = self._slots.pop(lease_id, None)
        if slot is not None:
            del self._leases[slot]

    def refused(self, lease_id: str, leases: LeaseTable) -> None:
        """Frees the slot of a refused hand-over, unless other parts stand on the lease."""
        lease = leases.find(lease_id)
        if lease is None or not lease.live:
            self.ended(lease_id)

    def voided(self) -> tuple[str, ...]:
        """Returns the leases whose flag is set and that have not ended."""
        if not self._slots or not self._flags.any():
            return ()
        # Of a copy: numpy raises if flags change while it counts them, and the engine may set one at any moment.
        flags = self._flags.copy()
        if np.count_nonzero(flags) > len(self._leases):  # an engine may also set flags of slots without a lease
            return tuple(lease_id for slot, lease_id in self._leases.items() if flags[slot - 1])
        found = (self._leases.get(slot, "") for slot in (np.flatnonzero(flags) + 1).tolist())
        return tuple(lease_id for lease_id in found if lease_id)

    def close(self) -> None:
        """Unmaps the page. Idempotent."""
        if self.fd < 0:
            return
        self._slots.clear()
        self._flags = np.empty(0, dtype=np.uint8)
        self._map.close()
        os.close(self.fd)
        self.fd = -1
