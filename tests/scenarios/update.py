"""Writes the outcome of scenarios into their files, and the index: `python -m tests.scenarios.update [FILE ...]`.

Read the difference before you keep it: it is what users would see change.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sim.script import VERBS, replay

HERE = Path(__file__).parent
INDEX = HERE.parent.parent / "docs" / "scenarios.md"


def files() -> list[Path]:
    return sorted(HERE.glob("*.txt"))


def prose(text: str) -> dict[str, str]:
    """Returns the opening paragraphs of a scenario: what was `suffered`, what must happen `here`, and which `rules`."""
    lines = [line[1:].strip() for line in text.partition("\n\n")[0].splitlines()]
    suffered, here, rules = (" ".join(part.split()) for part in "\n".join(lines).split("\n\n"))
    assert here.startswith("Here: ")
    assert re.fullmatch(r"Rules: R\d+(, R\d+)*\.", rules), rules
    return {"suffered": suffered, "here": here.removeprefix("Here: "), "rules": rules[7:-1]}


def index() -> Iterator[str]:
    """Yields the table of scenarios."""
    yield "| Scenario | What is promised | Rules |"
    yield "|---|---|---|"
    for path in files():
        found = prose(path.read_text())
        promise = found["here"][0].upper() + found["here"][1:]
        yield f"| [{path.stem}](../tests/scenarios/{path.name}) | {promise} | {found['rules']} |"


def language() -> Iterator[str]:
    """Yields the table of commands, from their docstrings."""
    yield "| Command | What it does |"
    yield "|---|---|"
    for verb in VERBS.values():
        said = " ".join((verb.__doc__ or "").split()).replace("|", "\\|")
        form, _, what = said.partition(": ")
        yield f"| {form} | {what} |"


def fresh(page: str) -> str:
    """Returns the page with current tables."""
    for source, rows in (("tests/scenarios", index()), ("sim.script", language())):
        head, begin, rest = page.partition(f"<!-- from {source} -->")
        page = "\n".join([head + begin, *rows, "<!-- end -->"]) + rest.partition("<!-- end -->")[2]
    return page


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or files():
        path.write_text(replay(path.read_text()))
    INDEX.write_text(fresh(INDEX.read_text()))
