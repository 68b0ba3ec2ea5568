"""Worlds in which one lead lies to the others: no lead raises, and every rule holds for all honest leads.

For many more seeds: `python -m sim --liars`. `test_mutants` shows the bugs of leads that trust their peers.
"""

import pytest

from sim import Outcome, drawn, run
from sim.world.trace import Digest

FIRST = 5_000
SEEDS = 32
STEPS = 1_500


@pytest.fixture(scope="module")
def seen() -> Outcome:
    """Returns the summed outcome of all worlds of this file."""
    total = Outcome()
    for seed in range(FIRST, FIRST + SEEDS):
        total.add(run(drawn(seed, STEPS, liars=True)))
    return total


@pytest.mark.timeout(300)
def test_every_rule_holds_for_all_others(seen: Outcome) -> None:
    assert seen.violations == []
    assert seen.steps >= SEEDS * STEPS


@pytest.mark.timeout(300)
def test_much_that_is_said_is_false_and_much_goes_on_all_the_same(seen: Outcome) -> None:
    for kind in ("false_request", "false_answer", "invented", "said_again", "meddled", "other_life"):
        assert seen.faults[kind] > SEEDS, kind
    assert seen.faults["false_checksums"] > 0
    assert seen.ends["receive succeeded"] > 10 * SEEDS
    assert set(seen.reasons) >= {
        "ACCESS_CLOSED", "BLOCK_DUPLICATE", "CHECKSUM_MISMATCH", "CONTENT_MISMATCH", "GRANT_INVALID",
        "GROUP_MISMATCH", "INCOMPATIBLE_POOLS", "INVALID_FIELD", "MEMORY_CHANGED", "PEER_FAILED", "WRONG_ENGINE",
    }  # fmt: skip


def digest(seed: int, *, liars: bool) -> int:
    trace = Digest()
    run(drawn(seed, 500, liars=liars), trace)
    return trace.value


def test_the_same_setup_gives_the_same_run_and_a_liar_makes_it_another() -> None:
    for seed in range(4):
        lying = digest(seed, liars=True)
        assert lying == digest(seed, liars=True) != digest(seed, liars=False)
