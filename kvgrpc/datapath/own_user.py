"""Finds whether a user that the kernel names is the one of this process.

The kernel translates a user into the user namespace of the process that asks. Uid 0 of another namespace has its number
outside, such as 100000, and so differs from uid 0 here. A user without a number here is shown as the overflow uid,
65534, which many containers also run as. That number then says nothing about who it is.
"""

import os
from pathlib import Path

_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
_MAP = Path("/proc/self/uid_map")
_USERS = (1 << 32) - 1
"""Number of users that there are."""


def is_own_user(uid: int) -> bool:
    """Returns True if `uid`, as the kernel shows it to this process, is the user of this process and of no other."""
    return uid == os.geteuid() and (uid != _overflow() or maps_all(_MAP.read_text()))


def maps_all(uid_map: str) -> bool:
    """Returns True if every user has a number of its own in a user namespace with this map."""
    return sum(int(line.split()[2]) for line in uid_map.splitlines()) == _USERS


def _overflow() -> int:
    return int(_OVERFLOW.read_text())
