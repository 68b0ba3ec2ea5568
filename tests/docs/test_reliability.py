"""docs/reliability.md lists the simulator's rules and planted bugs."""

import re
from collections import Counter

from sim import Rule
from tests.docs.pages import DOCS, section, tables
from tests.scenarios.update import files, prose
from tests.sim.mutants import MUTANTS

PAGE = DOCS / "reliability.md"


def test_every_rule_says_when_it_is_broken() -> None:
    (rows,) = tables(section(PAGE, "### What is checked"))
    assert [row[0] for row in rows] == [rule.value for rule in Rule]


def test_the_planted_bugs_are_those_of_the_command() -> None:
    (rows,) = tables(section(PAGE, "### Does it find bugs?"))
    assert [(row[0], int(row[2]), row[3]) for row in rows] == [(m.what, m.seeds, m.rule.value) for m in MUTANTS]
    assert all(0 < int(row[1]) <= int(row[2]) for row in rows)


def test_scenarios_are_counted_by_the_rules_that_they_show() -> None:
    (rows,) = tables(section(PAGE, "## The rules"))
    said = [prose(path.read_text())["rules"] for path in files()]
    counts = Counter(rule for line in said for rule in re.findall(r"R\d+", line))
    counts["R10"] = len(said)  # R10 says that all of them end as before
    assert [(row[0], int(row[2])) for row in rows] == [(row[0], counts[row[0]]) for row in rows]


def test_planted_bugs_are_counted_by_the_rule_that_they_break() -> None:
    (rows,) = tables(section(PAGE, "## The rules"))
    counts = Counter(mutant.rule.value for mutant in MUTANTS)
    assert [(row[0], row[1]) for row in rows] == [
        (rule.value, str(counts[rule.value] or "—")) for rule in Rule if rule is not Rule.END
    ]
