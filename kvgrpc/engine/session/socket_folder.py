"""The folder of a lead's session socket. It goes with the engine that made it, however that ends.

The engine has a lock on its folder for as long as its process lives, and the kernel lets go of it then, so that a
folder that can be locked has no owner any more. The lead removes its own one in the end, if that is so; where both were
killed, the next engine of this user does, at its start.
"""

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX = "kvgrpc-lead-"
TRIES = 3
"""Another engine may take a folder for one that was left, before it is locked. Where nothing can be locked, nothing is
removed either.
"""


class Home:
    """A new folder of this process's, which no other user may enter."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            remove_if_left(left)
        self._maker = os.getpid()
        for _ in range(TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = _lock(self.path)
            if self._lock >= 0:
                break
        _all.add(self)

    def remove(self) -> None:
        """Idempotent. In a child that this process forked it does nothing: the folder is not the child's."""
        if self._maker == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Closes the lock's descriptor. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_if_left(path: Path) -> None:
    """Removes such a folder of this user's whose engine has ended."""
    lock = _lock(path) if path.name.startswith(PREFIX) else -1
    if lock >= 0:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: Path) -> int:
    """The descriptor of a lock on a folder of this user's; -1 where another process has it, or it is gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return -1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(path.lstat(), os.fstat(lock)) and path.lstat().st_uid == os.getuid():
            return lock
    except OSError:
        pass
    os.close(lock)
    return -1


_all: "weakref.WeakSet[Home]" = weakref.WeakSet()


def _let_go() -> None:
    """A copy in a child would keep the lock beyond the end of its engine."""
    for home in list(_all):
        home.let_go()


os.register_at_fork(after_in_child=_let_go)
