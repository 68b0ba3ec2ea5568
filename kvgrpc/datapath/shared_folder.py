"""The folder in which ranks of one host meet whose network namespaces differ, such as those of two pods.

An abstract name of a unix socket ends at the network namespace. A socket that is a file is found by whoever mounts the
same folder, wherever it is mounted. A rank listens at both under one random name. A peer states the name alone, never a
path, and looks it up in its own mount of the folder. So a peer can lead nobody out of the folder.

A file in the folder is used only if it is a socket of this process's user. It is looked at without being opened, and
what was looked at is what is connected to: not a symlink, nor what takes its place meanwhile. The kernel states the
user of the process that listens, as for an abstract name.

The folder itself proves nothing. That both ranks see one memory is proved by the descriptor that comes through the
socket, which only one kernel can pass, and by the nonce that is read through it.
"""

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import weakref
from collections.abc import Iterator

from kvgrpc.datapath.own_user import is_own_user
from kvgrpc.errors import FieldViolation, InvalidRequest, Reason, note

SETTING = "shared_dir"
VARIABLE = "KVGRPC_SHARED_DIR"
_NAME = re.compile(r"kvgrpc-(window-)?[0-9a-f]{32}")
_UNFINISHED = re.compile(_NAME.pattern + r"\.new")
"""Pattern of the names that sockets have until they listen."""
_MODE = 0o600
_TRIES = 3


class SharedFolder:
    """A folder that is opened once, so that it stays the one that was checked."""

    def __init__(self, path: str) -> None:
        """Opens the folder, and removes sockets of this user at which nobody listens. Raises InvalidRequest."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _unusable(f"{path!r} cannot be opened: {error}") from error
        self._close = weakref.finalize(self, os.close, self._fd)
        self._check()
        self._sweep()

    def listen(self, name: str, backlog: int) -> socket.socket:
        """Returns a socket of that name on which only this user connects. Raises OSError."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):  # a sweep took it before it listened
                return self._listen(name, backlog)
        raise FileNotFoundError(errno.ENOENT, "the socket is removed as soon as it is made", self.path)

    @contextlib.contextmanager
    def place(self, name: str) -> Iterator[str | None]:
        """Yields the address of the socket of that name for as long as the context lasts; None: there is no such file.
        Raises OSError for a file that is no socket of this user.
        """
        fd = -1
        if _NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)  # opens nothing
        if fd < 0:
            yield None
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                raise OSError(errno.ENOTSOCK, f"{name} in {self.path} is no socket")
            if not is_own_user(status.st_uid):
                raise OSError(errno.EACCES, f"{name} in {self.path} belongs to user {status.st_uid}")
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Removes a socket's file. Idempotent."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Closes the folder. Idempotent."""
        self._close()

    def _listen(self, name: str, backlog: int) -> socket.socket:
        """Makes a socket. It gets its name when it listens: a socket of that name that nobody listens at is left over.
        Raises FileNotFoundError if it was removed before.
        """
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unfinished = f"{name}.new"
        try:
            os.fchmod(made.fileno(), _MODE)  # bind() gives it to the file, which so never has another
            made.bind(f"/proc/self/fd/{self._fd}/{unfinished}")
            made.listen(backlog)
            os.rename(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            made.close()
            self.remove(unfinished)
            raise
        return made

    def _check(self) -> None:
        """Raises InvalidRequest for a folder in which another user could put something in a socket's place."""
        status = os.fstat(self._fd)
        if status.st_uid and not is_own_user(status.st_uid):
            raise _unusable(f"{self.path} belongs to user {status.st_uid}, neither to root nor to this process's")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
            raise _unusable(f"{self.path} can be written by others and is not sticky: make it mode 1777 or 0700")
        if not os.access(f"/proc/self/fd/{self._fd}", os.W_OK | os.X_OK, effective_ids=True):
            raise _unusable(f"{self.path} cannot be written by user {os.geteuid()}")

    def _sweep(self) -> None:
        """Removes what processes that were killed have left."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._fd):  # noqa: PTH208 - the folder that is open, whatever has its path now
                if (_NAME.fullmatch(name) or _UNFINISHED.fullmatch(name)) and self._left_over(name):
                    self.remove(name)

    def _left_over(self, name: str) -> bool:
        """Returns True if this user's socket of that name has no listener. One with a full queue has one."""
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if not stat.S_ISSOCK(status.st_mode) or not is_own_user(status.st_uid):
                return False
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
                asking.setblocking(False)
                return asking.connect_ex(f"/proc/self/fd/{self._fd}/{name}") == errno.ECONNREFUSED
        return False


def new_name(kind: str = "") -> str:
    """Returns a random name for a socket."""
    return f"kvgrpc-{kind}{secrets.token_hex(16)}"


@contextlib.contextmanager
def place_of(name: str, folder: SharedFolder | None) -> Iterator[str]:
    """Yields the address to connect to for a name that a peer states: of the file in the folder, if it is there, else
    the abstract one. Raises OSError.
    """
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(folder.place(name)) if folder is not None else None
        yield found or f"\0{name}"


def elsewhere(folder: SharedFolder | None) -> str:
    """Returns what to do about a socket that is not found, as the end of a reason."""
    if folder is None:
        return f"; in another network namespace it is found only through a {SETTING}, and this rank has none"
    return f"; {folder.path} has it neither"


def folder_of(path: str) -> SharedFolder | None:
    """Returns the folder that a setting names, if it names one. Raises InvalidRequest."""
    return SharedFolder(path) if path else None


def _unusable(why: str) -> InvalidRequest:
    violation = FieldViolation(SETTING, note(why))
    return InvalidRequest(Reason.INVALID_FIELD, violation.description, violations=(violation,))
