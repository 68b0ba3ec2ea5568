"""What an input weighs: memory that its server keeps after it, the most that it held meanwhile, and how long its loop
stood still.

The machine runs other things, and an allocator gives memory back when it likes. So an input that seems to weigh too
much is given several times more: what it keeps, it keeps each time; what it holds up, it holds up each time.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.inside import State

KEPT_BYTES_MAX = 4 << 20
"""After any message, and after several of them that were refused."""
STALL_S_MAX = 0.5
SMALL_BYTES = 64 << 10
SMALL_STALL_S_MAX = 0.1
"""Of a message that is small."""
AGAIN = 6
"""So often is given what seems to weigh too much."""
ROUNDS = 3
"""And again as often, so that what the allocator got for the first ones does not count."""
LET_GO_S = 4.0
"""Longer than connections that are given up let calls finish."""
SUSPECT_BYTES = 1 << 20
"""What a server has more than ever before is looked at."""
SUSPECT_STALL = 0.5
"""Of the bound: what the machine's noise does not reach."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RESET_PEAK = b"5"


@dataclass
class Heaviest:
    """The most of all inputs of one kind: of each figure, with the size of the message that it is of."""

    inputs: int = 0
    kept_bytes: tuple[int, int] = (0, 0)
    peak_bytes: tuple[int, int] = (0, 0)
    stall_s: tuple[float, int] = (0.0, 0)
    small_stall_s: tuple[float, int] = (0.0, 0)


HEAVIEST: dict[str, Heaviest] = {}
"""Of all servers that this process weighs inputs of, by the kind of the input, until it was reported."""


class Scales:
    """Weighs the inputs of one server, whose state is asked for after each."""

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
        """An input comes next."""
        os.write(self._clear, _RESET_PEAK)
        self._state.stall_s = 0.0
        self._before = self._resident()

    def end(self, kind: str, nbytes: int, again: Callable[[], bool], *, own: bool = False) -> bool:
        """The input was answered, and the state asked for. `again` gives it once more, and says whether it was refused.
        `own`: the server's own engine sent it, which may ask for as much work as it likes.

        Whether it was given again. Fails when it weighs too much.
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
        """What several of it keep, and how much they may."""
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
        """Memory of the server's own: without the pools, which are shared."""
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES

    def _peak(self) -> int:
        """The most that it had since an input began, and what it shares now."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
        return peak - int(os.pread(self._statm, 128, 0).split()[2]) * _PAGE_BYTES


def rows(heaviest: dict[str, Heaviest]) -> list[list[Any]]:
    """As a report can carry it."""
    return [
        [kind, seen.inputs, list(seen.kept_bytes), list(seen.peak_bytes), list(seen.stall_s), list(seen.small_stall_s)]
        for kind, seen in heaviest.items()
    ]


def table(reported: Iterable[list[Any]]) -> Iterable[str]:
    """The heaviest of all reports, by kind: lines for people."""
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
