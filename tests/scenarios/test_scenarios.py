"""Every scenario still ends as its file says. After an intended change run `python -m tests.scenarios.update`."""

import re
from pathlib import Path

import pytest

from sim.script import replay
from tests.scenarios.update import INDEX, files, fresh, prose
from tests.sim.mutants import MUTANTS, Mutant, planted


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_it_ends_as_its_file_says(path: Path) -> None:
    text = path.read_text()
    assert replay(text) == text


def test_each_says_what_was_suffered_what_must_happen_and_which_rules_it_shows(subtests: pytest.Subtests) -> None:
    for path in files():
        with subtests.test(path.stem):
            assert all(len(words) > 1 for words in prose(path.read_text()).values())


UNSCRIPTED = {
    "a send is waited for without an end",
    "checksums are waited for without an end",
    "a lease that ended is found",
    "a renewal comes before what was due",
    "a queue is waited for without an end",
    "every rank reads the first heads of its source",
    "what one pair of ranks has moved all of a rank have",
    "stages exchange with those of their own number",
    "every layer is read from the first stage",
}
"""Bugs that only random worlds find. No script silences a rank, renews at a stopped lead, or fills a lead with work. No
script has engines with different numbers of ranks or stages, leads that lie, strangers, mirrors, engines that wait
for each other, or offers that are findable.
"""
SCRIPTED = [m for m in MUTANTS if not (m.liars or m.mirrors or m.rings or m.strangers) and m.what not in UNSCRIPTED]


@pytest.mark.parametrize("mutant", SCRIPTED, ids=[mutant.what for mutant in SCRIPTED])
def test_a_planted_bug_is_seen_in_a_scenario(mutant: Mutant) -> None:
    with planted(mutant):
        assert any(differs(path.read_text()) for path in files())


def differs(text: str) -> bool:
    """Checks that a scenario ends differently or breaks a rule."""
    try:
        return replay(text) != text
    except (AssertionError, KeyError):
        return True


def test_every_scenario_is_listed_under_what_was_suffered() -> None:
    _, _, section = INDEX.read_text().partition("## What was suffered")
    table = section.partition("\n## ")[0]
    linked = re.findall(r"\[([^]]+)\]\(([^)]+)\)", table)
    assert {Path(target).stem for _, target in linked if target.endswith(".txt")} == {path.stem for path in files()}
    assert all((INDEX.parent / target).exists() for _, target in linked)
    assert all(Path(target).stem == name for name, target in linked if target.endswith(".txt"))


def test_the_page_of_scenarios_is_that_of_the_files_and_commands() -> None:
    page = INDEX.read_text()
    assert fresh(page) == page
