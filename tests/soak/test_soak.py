"""Two engines move blocks for a long time and change their minds; afterwards nothing of it is left.

A run of all tests makes 1,200 transfers; SOAK_TRANSFERS sets another number, and SOAK_PATH the data path. A fraction of
them runs again where the source writes pushes, and where checksums are compared: see `CHANGES`.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import PATHS
from tests.engine.support import Lead
from tests.service.footprint import Footprint, footprint, resident_bytes
from tests.soak.traffic import Traffic, leads

TRANSFERS = int(os.environ.get("SOAK_TRANSFERS", "1200"))
PATH = os.environ.get("SOAK_PATH", "shm")
SEED = int(os.environ.get("SOAK_SEED", "1"))
CHANGES = {"-writes": "--source-writes", "-compares": "--checksums"}
"""Flags, by the ending of the path's name."""
FEW = max(200, TRANSFERS // 50)
CASES = [(PATH, TRANSFERS), ("nixl-tcp-writes", FEW), ("cma-compares", FEW)]
if PATH.endswith(tuple(CHANGES)):
    del CASES[1:]
WARM_UP_SHARE = 5
"""Divisor of the transfers: after a fifth of them all tables that keep something for a while are full."""
MIB = 1 << 20
GROWTH_BYTES_MAX, SHORT_GROWTH_BYTES_MAX, SHORT = 5 * MIB, 12 * MIB, 50_000
"""Maximum growth of a server's memory after the warm-up, in bytes. The allocator has not seen all after a short one."""
RUN_S = 6 * 3600
DEFECTS = ("INTERNAL", "DATA_PATH_FAILED", "PEER_FAILED", "PEER_LOST", "CHECKSUM_MISMATCH")
"""Reasons that no transfer may fail with here: nobody died, nothing broke, and all bytes arrived intact."""
Pair = tuple[Lead, Lead]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Held:
    """Resources that a server holds."""

    footprint: Footprint
    resident_bytes: int

    @classmethod
    def of(cls, lead: Lead) -> "Held":
        return cls(footprint(lead.process.pid), resident_bytes(lead.process.pid))


@pytest.fixture
def pair(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Returns two leads with this data path, and with the flags for the ending of its name."""
    name, change = next(((path.removesuffix(end), [CHANGES[end]]) for end in CHANGES if path.endswith(end)), (path, []))
    flags, environment = PATHS[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with leads(tmp_path, *flags, *change) as started:
        yield started


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Say:
    """Returns a function that keeps lines for the summary."""
    return partial(record_property, "figures")


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize(("path", "transfers"), CASES)
def test_no_block_is_lost_and_nothing_grows(pair: Pair, say: Say, path: str, transfers: int) -> None:
    warm_up, most = transfers // WARM_UP_SHARE, GROWTH_BYTES_MAX if transfers >= SHORT else SHORT_GROWTH_BYTES_MAX
    traffic = Traffic(pair, SEED)
    try:
        traffic.run(warm_up)
        before = [Held.of(lead) for lead in pair]
        traffic.run(transfers - warm_up)
        traffic.check_whole()
        traffic.check_arrived()
        after = [Held.of(lead) for lead in pair]
    finally:
        traffic.close()
    say(f"{traffic.begun:,} transfers over {path}: {dict(traffic.ends.most_common())}")
    for then, now in zip(before, after, strict=True):
        grown = now.resident_bytes - then.resident_bytes
        say(
            f"a server: {then.resident_bytes / MIB:.1f} MiB of its own after {warm_up:,} transfers, {grown / MIB:+.1f} "
            f"MiB after all; {then.footprint.threads} threads, then {now.footprint.threads}; "
            f"{then.footprint.descriptors.total()} descriptors, then {now.footprint.descriptors.total()}",
        )
        assert now.footprint.same(then.footprint), (then, now)
        assert grown <= most
    assert not {f"failed {reason}" for reason in DEFECTS} & traffic.ends.keys()
