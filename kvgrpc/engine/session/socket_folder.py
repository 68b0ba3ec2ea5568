"""The folder of a lead's session socket, which goes with the engine that made it, however that ends.

An engine has a lock on its folder while its process lives, and the kernel releases it then: a folder that can be locked
has no owner any more. A lead that ends removes its own folder if it has no owner. If both were killed, the next engine
of this user removes the folder at its start.
"""

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX = "kvgrpc-lead-"
TRIES = 3
"""Maximum number of folders that are tried: another engine may take a new folder, before it is locked, for a left one.
Folders that cannot be locked are not removed either.
"""


class Home:
    """A new folder of this process, which no other user may enter."""

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
        """Removes the folder. Idempotent. In a forked child it removes nothing: the folder is not the child's."""
        if self._maker == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Closes the lock's descriptor. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_if_left(path: Path) -> None:
    """Removes a socket folder of this user whose engine has ended."""
    lock = _lock(path) if path.name.startswith(PREFIX) else -1
    if lock >= 0:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: Path) -> int:
    """Returns the descriptor of a lock on this user's folder; -1 if another process has it, or the folder is gone."""
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
    """Closes the locks of a forked child, which would outlive their engine."""
    for home in list(_all):
        home.let_go()


os.register_at_fork(after_in_child=_let_go)
