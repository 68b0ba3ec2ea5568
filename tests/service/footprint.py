"""System resources that a process holds: threads, descriptors, memory. After all work they must be as before."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POOL_THREADS_MAX = (os.cpu_count() or 1) + 4
"""Maximum number of threads that asyncio starts for blocking calls. They stay."""

IDLE_SOCKETS_MAX = 4
"""Maximum number of idle connections of peers, which close at any time. Hundreds of lives must not leave one each."""


@dataclass(frozen=True)
class Footprint:
    """The resources of a process that must return to their earlier values."""

    threads: int
    descriptors: Counter[str]
    """Number of descriptors by kind."""

    def same(self, before: "Footprint") -> bool:
        """Returns whether no descriptor is left, no thread is gone, and no more threads are left than a pool's."""
        return self.no_more_than(before) and self.threads >= before.threads

    def no_more_than(self, before: "Footprint") -> bool:
        """Returns the same as `same`, but threads may have gone, like those of an earlier peer."""
        left = self.descriptors - before.descriptors - Counter({"socket:": IDLE_SOCKETS_MAX})
        return not left and self.threads - before.threads <= POOL_THREADS_MAX


def footprint(pid: int) -> Footprint:
    """Returns a process's footprint now."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            kinds[str(link.readlink()).partition("[")[0]] += 1
    return Footprint(len(list(Path(f"/proc/{pid}/task").iterdir())), kinds)


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process in bytes, without the pool, which it shares."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024
