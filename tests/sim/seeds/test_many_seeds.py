"""A million steps of `python -m sim`, about two minutes, in every run of all tests. `make sim-long` runs for hours."""

import pytest

from sim import Outcome, drawn, run

FIRST = 2_000
SHARES = 8
SEEDS = 25
STEPS = 5_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(FIRST, FIRST + SHARES * SEEDS, SEEDS))
def test_no_rule_breaks_in_a_million_steps(first: int) -> None:
    total = Outcome()
    for seed in range(first, first + SEEDS):
        total.add(run(drawn(seed, STEPS)))
    assert total.violations == []
    assert total.steps >= SEEDS * STEPS
