"""Worlds whose engines split one model's heads over different numbers of ranks: every rule holds.

For many more seeds: `python -m sim --unlike`. `test_mutants` shows the bugs of wrong bridges.
"""

import pytest

from sim import Outcome, drawn, run

FIRST = 9_000
SEEDS = 16
STEPS = 1_500


@pytest.mark.timeout(300)
def test_every_rule_holds_between_engines_that_split_their_heads_in_other_ways() -> None:
    total, kinds = Outcome(), set()
    for seed in range(FIRST, FIRST + SEEDS):
        setup = drawn(seed, STEPS, unlike=True)
        kinds.add((len(set(setup.unlike)) > 1, setup.head_dim))
        total.add(run(setup))
    assert total.violations == []
    assert total.steps >= SEEDS * STEPS
    assert total.ends["receive succeeded"] > 10 * SEEDS
    assert total.faults["lose_rank"] > 0
    assert {(True, 1), (True, 32)} <= kinds
