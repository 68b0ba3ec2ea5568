"""What a process holds of the machine: threads, descriptors, memory. After all work it is as before."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POOL_THREADS_MAX = (os.cpu_count() or 1) + 4
"""What asyncio makes for calls that block, as it needs them; they stay."""

IDLE_SOCKETS_MAX = 4
"""Connections of peers, which they close when they like: not one for each of hundreds of lives."""


@dataclass(frozen=True)
class Footprint:
    """What of a process must be as before."""

    threads: int
    descriptors: Counter[str]
    """By kind."""

    def same(self, before: "Footprint") -> bool:
        """Whether no descriptor is left, no thread is gone, and none is left but those of a pool."""
        return self.no_more_than(before) and self.threads >= before.threads

    def no_more_than(self, before: "Footprint") -> bool:
        """The same where threads may have gone, as those of a peer that was there before do."""
        left = self.descriptors - before.descriptors - Counter({"socket:": IDLE_SOCKETS_MAX})
        return not left and self.threads - before.threads <= POOL_THREADS_MAX


def footprint(pid: int) -> Footprint:
    """Of a process as it is now."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            kinds[str(link.readlink()).partition("[")[0]] += 1
    return Footprint(len(list(Path(f"/proc/{pid}/task").iterdir())), kinds)


def resident_bytes(pid: int) -> int:
    """Memory of a process's own: without the pool, which it shares."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024
