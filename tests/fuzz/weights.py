"""Weight of an input: the memory that its server keeps afterwards, the peak meanwhile, and the stall of its loop.

The machine runs other processes, and an allocator returns memory at its own pace. So an input that seems too heavy is
repeated several times: real leaks and real stalls repeat each time.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.inside import State

KEPT_BYTES_MAX = 4 << 20
"""Maximum memory that may stay after any one message, or after AGAIN of them that were refused, in bytes."""
STALL_S_MAX = 0.5
SMALL_BYTES = 64 << 10
SMALL_STALL_S_MAX = 0.1
"""Maximum stall for a message below SMALL_BYTES, in seconds."""
AGAIN = 6
"""Number of repetitions of an input that seems too heavy."""
ROUNDS = 3
"""Number of rounds of repetitions, so that memory the allocator got in the first round does not count."""
LET_GO_S = 4.0
"""Time to wait for memory to go, in seconds: longer than given-up connections let calls finish."""
SUSPECT_BYTES = 1 << 20
"""Growth above the highest memory so far from which an input is examined, in bytes."""
SUSPECT_STALL = 0.5
"""Share of the stall bound from which an input is examined; the machine's noise stays below it."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RESET_PEAK = b"5"


@dataclass
class Heaviest:
    """Maximum figures over all inputs of one kind, each with the size of its message in bytes."""

    inputs: int = 0
    kept_bytes: tuple[int, int] = (0, 0)
    peak_bytes: tuple[int, int] = (0, 0)
    stall_s: tuple[float, int] = (0.0, 0)
    small_stall_s: tuple[float, int] = (0.0, 0)


HEAVIEST: dict[str, Heaviest] = {}
"""Maximum figures of all servers that this process weighs, by the kind of input, until they are reported."""


class Scales:
    """Weighs the inputs of one server, whose state is read after each input."""

    def __init__(self, pid: int, state: State) -> None:
        self._pid, self._state = pid, state
        self._statm = os.open(f"/proc/{pid}/statm", os.O_RDONLY)
        self._clear = os.open(f"/proc/{pid}/clear_refs", os.O_WRONLY)
        self._before = self._given = 0
        self._highest = self._resident()

    def close(self) -> None:
        os.close(self._statm)
        os.close(self._clear)

    def begin(self) -> None:
        """Begins an input."""
        os.write(self._clear, _RESET_PEAK)
        self._state.stall_s = 0.0
        self._before = self._resident()

    def end(self, kind: str, nbytes: int, again: Callable[[], bool], *, own: bool = False) -> bool:
        """Weighs an input that was answered, after the state was read. Fails if it is too heavy. `again` repeats the
        input and returns True if it was refused. `own` means that the server's own engine sent it, which may ask for
        any amount of work. Returns True if the input was repeated.
        """
        given = self._given
        seen = HEAVIEST.setdefault(kind, Heaviest())
        seen.inputs += 1
        seen.peak_bytes = max(seen.peak_bytes, (self._peak() - self._before, nbytes))
        self._check_stall(seen, nbytes, again, own)
        self._check_kept(seen, nbytes, again)
        return self._given > given

    def _check_stall(self, seen: Heaviest, nbytes: int, again: Callable[[], bool], own: bool) -> None:
        most, stall_s = (SMALL_STALL_S_MAX if nbytes < SMALL_BYTES else STALL_S_MAX), self._state.stall_s
        for _ in range(AGAIN if stall_s > most * SUSPECT_STALL and not own else 0):
            self._state.stall_s = 0.0
            self._give(again)
            stall_s = min(stall_s, self._state.stall_s)
        if nbytes < SMALL_BYTES:
            seen.small_stall_s = max(seen.small_stall_s, (stall_s, nbytes))
        else:
            seen.stall_s = max(seen.stall_s, (stall_s, nbytes))
        assert own or stall_s <= most, f"it held up the loop for {stall_s:.2f} s with {nbytes:,} bytes"

    def _check_kept(self, seen: Heaviest, nbytes: int, again: Callable[[], bool]) -> None:
        if self._resident() <= self._highest + SUSPECT_BYTES:
            return
        self._state.trim()
        if self._resident() > self._highest + SUSPECT_BYTES:
            kept, bound = self._keeps(again)
            for _ in range(ROUNDS - 1):
                if kept > bound:
                    kept, bound = self._keeps(again)
            seen.kept_bytes = max(seen.kept_bytes, (kept // AGAIN, nbytes))
            assert kept <= bound, f"{AGAIN} of it, of {nbytes:,} bytes each, keep {kept / 2**20:.1f} MiB"
        self._highest = self._resident()

    def _keeps(self, again: Callable[[], bool]) -> tuple[int, int]:
        """Returns the memory that AGAIN repetitions keep, and their bound, in bytes."""
        before = self._resident()
        refused = [self._give(again) for _ in range(AGAIN)]
        bound, until = KEPT_BYTES_MAX * (1 if all(refused) else AGAIN), time.monotonic() + LET_GO_S
        while True:
            self._state.trim()
            kept = self._resident() - before
            if kept <= bound or time.monotonic() > until:
                return kept, bound
            time.sleep(0.1)

    def _give(self, again: Callable[[], bool]) -> bool:
        self._given += 1
        refused = again()
        self._state()
        return refused

    def _resident(self) -> int:
        """Returns the server's own memory in bytes, without the pools, which are shared."""
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES

    def _peak(self) -> int:
        """Returns the peak memory since the input began, without what is shared now, in bytes."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
        return peak - int(os.pread(self._statm, 128, 0).split()[2]) * _PAGE_BYTES


def rows(heaviest: dict[str, Heaviest]) -> list[list[Any]]:
    """Returns rows that a report can carry."""
    return [
        [kind, seen.inputs, list(seen.kept_bytes), list(seen.peak_bytes), list(seen.stall_s), list(seen.small_stall_s)]
        for kind, seen in heaviest.items()
    ]


def table(reported: Iterable[list[Any]]) -> Iterable[str]:
    """Yields a readable table of the heaviest inputs of all reports, by kind."""
    whole: dict[str, Heaviest] = {}
    for kind, inputs, *figures in reported:
        seen, (kept, peak, stall, small) = whole.setdefault(kind, Heaviest()), map(tuple, figures)
        seen.inputs += inputs
        seen.kept_bytes, seen.peak_bytes = max(seen.kept_bytes, kept), max(seen.peak_bytes, peak)
        seen.stall_s, seen.small_stall_s = max(seen.stall_s, stall), max(seen.small_stall_s, small)
    yield f"{'kept':>10} {'held':>10} {'of bytes':>10} {'stall':>8} {'of bytes':>10} {'< 64 KB':>8} {'inputs':>8}"
    for kind, seen in sorted(whole.items(), key=lambda row: (-row[1].stall_s[0], row[0])):
        held_bytes, held_of = seen.peak_bytes
        stall_s, stall_of = seen.stall_s
        yield (
            f"{seen.kept_bytes[0] / 2**20:6.1f} MiB {held_bytes / 2**20:6.1f} MiB {held_of:>10,} "
            f"{stall_s * 1e3:5.0f} ms {stall_of:>10,} {seen.small_stall_s[0] * 1e3:5.0f} ms {seen.inputs:>8,} {kind}"
        )
