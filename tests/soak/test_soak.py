"""Two engines move blocks for a long time, and change their minds; afterwards nothing of it is left.

1,200 transfers in a run of all tests; SOAK_TRANSFERS says how many else, over SOAK_PATH.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import PATHS
from tests.engine.support import Lead
from tests.service.footprint import Footprint, footprint, resident_bytes
from tests.soak.traffic import Traffic, leads

TRANSFERS = int(os.environ.get("SOAK_TRANSFERS", "1200"))
PATH = os.environ.get("SOAK_PATH", "shm")
SEED = int(os.environ.get("SOAK_SEED", "1"))
WARM_UP = TRANSFERS // 5
"""After these the tables are full that keep something for a while."""
MIB = 1 << 20
GROWTH_BYTES_MAX = 5 * MIB if TRANSFERS >= 50_000 else 12 * MIB
"""Of a server's own memory, after the warm-up. After a short one the allocator has not seen all yet."""
RUN_S = 6 * 3600
DEFECTS = ("INTERNAL", "DATA_PATH_FAILED", "PEER_FAILED", "PEER_LOST")
"""Why a transfer never fails here: nobody died, and nothing broke."""


@dataclass(frozen=True)
class Held:
    """What a server holds."""

    footprint: Footprint
    resident_bytes: int

    @classmethod
    def of(cls, lead: Lead) -> "Held":
        return cls(footprint(lead.process.pid), resident_bytes(lead.process.pid))


@pytest.mark.timeout(RUN_S)
def test_after_many_transfers_no_block_is_lost_and_nothing_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    flags, environment = PATHS[PATH]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with leads(tmp_path, *flags) as pair:
        traffic = Traffic(pair, SEED)
        try:
            traffic.run(WARM_UP)
            before = [Held.of(lead) for lead in pair]
            traffic.run(TRANSFERS - WARM_UP)
            traffic.check_whole()
            traffic.check_arrived()
            after = [Held.of(lead) for lead in pair]
        finally:
            traffic.close()
    record_property("figures", f"{traffic.begun:,} transfers over {PATH}: {dict(traffic.ends.most_common())}")
    for then, now in zip(before, after, strict=True):
        grown = now.resident_bytes - then.resident_bytes
        record_property(
            "figures",
            f"a server: {then.resident_bytes / MIB:.1f} MiB of its own after {WARM_UP:,} transfers, {grown / MIB:+.1f} "
            f"MiB after all; {then.footprint.threads} threads, then {now.footprint.threads}; "
            f"{then.footprint.descriptors.total()} descriptors, then {now.footprint.descriptors.total()}",
        )
        assert now.footprint.same(then.footprint), (then, now)
        assert grown <= GROWTH_BYTES_MAX
    assert not {f"failed {reason}" for reason in DEFECTS} & traffic.ends.keys()
