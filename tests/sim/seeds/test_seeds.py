"""Worlds from seeds, as `python -m sim` runs them: every rule holds in them, although many faults happen.

For many more seeds: `make sim-long`.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sim import Outcome, drawn, run
from sim.seeds import chaos
from sim.world import faults
from sim.world.trace import Trace
from tests.sim.seeds.digests import digest

ROOT = Path(__file__).parents[3]
FIRST = 1_000
SEEDS = 48
STEPS = 1_500
OF_MIRRORS = {"break_copy"}
"""Faults that happen only in worlds whose engines have mirrors."""


@pytest.fixture(scope="module")
def seen() -> Outcome:
    """Returns the summed outcome of all worlds of this file."""
    total = Outcome()
    for seed in range(FIRST, FIRST + SEEDS):
        total.add(run(drawn(seed, STEPS)))
    return total


def test_every_rule_holds(seen: Outcome) -> None:
    assert seen.violations == []
    assert seen.steps >= SEEDS * STEPS


def test_everything_goes_wrong_that_may(seen: Outcome) -> None:
    everywhere = {*faults.KINDS, *chaos.KINDS, "mistake", "rekey_by_itself"} - OF_MIRRORS
    assert everywhere <= set(seen.faults)
    assert set(seen.ends) == {
        f"{direction} {state}" for direction in ("send", "receive") for state in ("succeeded", "failed", "cancelled")
    }
    assert seen.ends["receive succeeded"] > 10 * SEEDS
    assert set(seen.reasons) >= {
        "CANCELLED", "CONTENT_MISMATCH", "DATA_PATH_FAILED", "ENGINE_LOST", "GRANT_INVALID", "INCARNATION_CHANGED",
        "LEASE_EXPIRED", "LEASE_RELEASED", "LEASE_VOIDED", "NO_DATA_PATH", "PEER_LOST", "PEER_UNREACHABLE",
        "REGISTRATION_TIMEOUT", "SETTLE_TIMEOUT", "SOURCE_FAILED", "TRANSFER_TIMEOUT",
    }  # fmt: skip


def test_the_same_setup_gives_the_same_run() -> None:
    for seed in range(8):
        assert digest(seed) == digest(seed)


def test_another_seed_gives_another_run() -> None:
    assert len({digest(seed) for seed in range(8)}) == 8


def test_a_trace_changes_nothing() -> None:
    trace = Trace()
    assert run(drawn(3, 500), trace) == run(drawn(3, 500))


def test_a_request_that_is_left_out_leaves_the_others_as_they_are() -> None:
    calm = next(seed for seed in range(100) if drawn(seed, 0).faults == faults.Faults() and drawn(seed, 0).blocks == 48)
    whole, less = (Trace(), Trace())
    run(drawn(calm, 300), whole)
    run(replace(drawn(calm, 300), left_out=frozenset({2})), less)
    assert any(" r1" in line for line in whole.lines((), 10_000))
    assert any("request_id r2" in line for line in whole.lines((), 10_000))
    assert not any("request_id r2," in line or "request_id r2)" in line for line in less.lines((), 10_000))
    assert any("request_id r3" in line for line in less.lines((), 10_000))


def test_the_order_of_sets_in_a_process_changes_nothing() -> None:
    """Runs worlds in processes with different hash seeds. In the world of seed 48 several lives may write at once."""
    script = "from tests.sim.seeds.digests import digest; print(*map(digest, range(4)), digest(48, 3_000))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True,
        ).stdout
        for number in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1
