"""A failing world is shrunk to a smaller one whose short trace shows what went wrong."""

import pytest

from sim import Outcome, Rule, drawn, run
from sim.seeds.setup import Setup
from sim.seeds.shrink import shrink
from sim.world.trace import Trace
from tests.sim.mutants import STEPS, named, planted

SEVERAL = 3
"""Seed whose world takes more than one request to break the rule."""


def test_a_smaller_world_breaks_the_same_rule_and_its_trace_tells_how() -> None:
    with planted(named("two postings write into one block")):
        setup = drawn(SEVERAL, STEPS)
        (violation,) = run(setup).violations
        assert violation.rule is Rule.R1
        smaller, found = shrink(setup, violation)
        seen = Trace()
        (again,) = run(smaller, seen).violations
    assert again == found
    assert found.rule is Rule.R1
    assert found.step <= violation.step
    assert smaller.steps < setup.steps / 4
    assert smaller.left_out
    assert not any(vars(smaller.mishaps).values())
    lines = seen.lines(found.about)
    assert len(lines) <= 30
    assert sum("> Post(" in line for line in lines) == 2
    assert any("PullBlocks" in line or "ReserveBlocks" in line for line in lines)


def test_what_breaks_no_rule_stays_as_it_is() -> None:
    with planted(named("two postings write into one block")):
        setup = drawn(0, STEPS)
        (violation,) = run(setup).violations
    assert shrink(setup, violation, runs=4) == (setup, violation)


def test_a_search_without_time_left_gives_the_smallest_found_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Setup] = []

    def tries(setup: Setup) -> Outcome:
        tried.append(setup)
        return run(setup)

    monkeypatch.setattr("sim.seeds.shrink.run", tries)
    with planted(named("two postings write into one block")):
        setup = drawn(0, STEPS)
        (violation,) = run(setup).violations
        smaller, found = shrink(setup, violation, enough=lambda: len(tried) >= 2)
        assert run(smaller).violations == [found]
    assert smaller in tried
    assert smaller.steps < setup.steps
    assert len(tried) == 2
    assert shrink(setup, violation, enough=lambda: True) == (setup, violation)
