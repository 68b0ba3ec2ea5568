"""docs/architecture.md has the state diagrams and packages of the code. `test_pages` checks the named functions."""

import re
import tomllib

from tests.docs import diagrams
from tests.docs.pages import DOCS, ROOT, plain, section, tables

PAGE = DOCS / "architecture.md"


def test_state_diagrams_are_those_of_the_tables() -> None:
    page = PAGE.read_text()
    assert page == diagrams.renewed(page), "run .venv/bin/python -m tests.docs.diagrams"


def test_every_table_has_its_diagram() -> None:
    assert sorted(diagrams.names(PAGE.read_text())) == sorted(diagrams.TABLES)


def test_the_packages_are_those_of_the_import_contracts() -> None:
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in rules if contract["type"] == "layers")
    contracted = set(re.findall(r"\w+", " ".join(layers))) - {"__main__"}
    (rows,) = tables(section(PAGE, "## The packages"))
    assert {name for row in rows for name in plain(row[0]).split(", ")} == contracted


def test_packages_import_only_what_is_above_them() -> None:
    (rows,) = tables(section(PAGE, "## The packages"))
    seen: set[str] = set()
    for name, _, imports in rows:
        assert set(re.findall(r"`(\w+)`", imports)) <= seen, name
        seen |= set(plain(name).split(", "))
