"""docs/reliability.md against the simulator: the rules that are checked, the bugs that are planted."""

from kvgrpc.sim import Rule
from tests.docs.pages import DOCS, section, tables
from tests.sim.mutants import MUTANTS

PAGE = DOCS / "reliability.md"


def test_every_rule_says_when_it_is_broken() -> None:
    (rows,) = tables(section(PAGE, "### What is checked"))
    assert [row[0] for row in rows] == [rule.value for rule in Rule]


def test_the_planted_bugs_are_those_of_the_command() -> None:
    (rows,) = tables(section(PAGE, "### Does it find bugs?"))
    assert [(row[0], int(row[2])) for row in rows] == [(mutant.what, mutant.seeds) for mutant in MUTANTS]
    assert all(0 < int(row[1]) <= int(row[2]) for row in rows)
