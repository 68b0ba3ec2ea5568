"""Worlds whose engines have memory that no data path reaches: every rule holds.

For many more seeds: `python -m sim --mirrors`. `test_mutants` shows the bugs of copies in the wrong order.
"""

from typing import Any

import pytest

from sim import Outcome, drawn, run

FIRST = 9_500
SEEDS = 10
STEPS = 1_500


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [{}, {"unlike": True}, {"liars": True}], ids=["alike", "unlike", "with a liar"])
def test_every_rule_holds_between_engines_with_mirrors(kind: dict[str, Any]) -> None:
    total, mirrored = Outcome(), set()
    for seed in range(FIRST, FIRST + SEEDS):
        setup = drawn(seed, STEPS, mirrors=True, **kind)
        mirrored.add(setup.mirrored == setup.engines)
        total.add(run(setup))
    assert total.violations == []
    assert total.ends["receive succeeded"] > 5 * SEEDS
    assert total.faults["break_copy"] > 0
    assert mirrored == {True, False}
