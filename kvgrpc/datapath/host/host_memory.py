"""The memory that this process may still take: the least of what the host and its cgroups have left.

This is checked before a pool is made, because the kernel answers a pool that does not fit by killing processes. The
number is an estimate: others take memory too, so making the pool can still fail.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvgrpc.errors import Exhausted, Reason

# A version 1 cgroup without a limit states a number near 2**63.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Available:
    """The tightest limit."""

    nbytes: int
    limited_by: str
    """Source of the limit, as text."""


def available(root: Path = Path("/")) -> Available | None:
    """Returns the bytes that can still be taken, and what limits them; None if the kernel does not say.

    `root` holds `proc` and `sys`.
    """
    found = [*_host(root), *_cgroups(root)]
    return min(found, key=lambda limit: limit.nbytes, default=None)


def _host(root: Path) -> Iterator[Available]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield Available(int(value.split()[0]) * 1024, "MemAvailable of the host")


def _cgroups(root: Path) -> Iterator[Available]:
    """Yields limits of this process's memory cgroup and of all its parents, version 1 and 2.

    In a container the path may be the host's, where only the mount's top exists. All parents are tried, and missing
    ones set no limit.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(root, "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _limits(root, "sys/fs/cgroup/memory", path, *names)


def _limits(root: Path, mount: str, path: str, limit: str, used: str) -> Iterator[Available]:
    top = root / mount
    here = top / path.lstrip("/")
    for folder in [here, *here.parents]:
        if not folder.is_relative_to(top):
            return
        maximum, current = _number(folder / limit), _number(folder / used)
        if maximum is None or current is None or maximum >= _UNLIMITED:
            continue
        # The kernel drops inactive file cache before it kills anything.
        left = maximum - current + _reclaimable(folder / "memory.stat")
        yield Available(max(left, 0), f"{limit} of cgroup {_name(folder, top)}")


def _name(folder: Path, top: Path) -> str:
    return "/" if folder == top else f"/{folder.relative_to(top)}"


def _reclaimable(stat: Path) -> int:
    values = dict(line.split(maxsplit=1) for line in _lines(stat))
    # Version 1 counts the cgroups below only in the total_ lines; version 2 always does.
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _number(path: Path) -> int | None:
    for line in _lines(path):
        return int(line) if line.isdecimal() else None
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def check_room(what: str, nbytes: int) -> None:
    """Raises Exhausted if there is no memory for `nbytes` of something."""
    left = available()
    if left is not None and nbytes > left.nbytes:
        raise Exhausted(
            Reason.POOL_EXHAUSTED, f"{what}, {nbytes}, does not fit: {left.nbytes} bytes are left ({left.limited_by})"
        )
