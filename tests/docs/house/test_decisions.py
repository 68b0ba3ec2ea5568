"""The records in docs/decisions have one form and a status each, and the index lists them all."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, section, tables

FOLDER = DOCS / "decisions"
INDEX = FOLDER / "README.md"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
ALL = [*RECORDS, FOLDER / "template.md"]
_STATUS = re.compile(
    r"^\*\*Status\.\*\* (?P<said>Accepted|(?:Superseded|Partly superseded) by \[\d+\]\(\S+\)(?: and \[\d+\]\(\S+\))*)"
    r"(?P<why>: .+)?\.$",
    re.DOTALL,
)


def status(record: Path) -> tuple[str, str]:
    """Returns the status of a record, and the reason that it gives."""
    line = record.read_text().split("\n\n")[1].replace("\n", " ")
    found = _STATUS.match(line)
    assert found, f"{record.name}: {line}"
    return found["said"], found["why"] or ""


def test_a_record_says_status_context_decision_why_and_consequence() -> None:
    parts = ["Status", "Context", "Decision", "Why", "Consequence"]
    said = {record.name: re.findall(rf"^\*\*({'|'.join(parts)})", record.read_text(), re.MULTILINE) for record in ALL}
    assert [name for name, found in said.items() if found != parts] == []


def test_records_are_numbered_without_a_gap() -> None:
    for number, record in enumerate(RECORDS, 1):
        assert record.name.startswith(f"{number:04}-")
        assert record.read_text().startswith(f"# {number}. ")


def test_a_status_has_one_of_three_forms_and_names_what_came_later(subtests: pytest.Subtests) -> None:
    for record in ALL:
        with subtests.test(record.name):
            said, why = status(record)
            for number, link in re.findall(r"\[(\d+)\]\((\S+)\)", said):
                later = FOLDER / link
                assert later in RECORDS
                assert int(number) == int(later.name[:4]) > int(record.name[:4])
            assert bool(why) == said.startswith("Partly"), "what no longer holds is said where a part no longer holds"


def test_every_record_is_in_the_index_with_its_title_and_status() -> None:
    (rows,) = tables(section(INDEX, "## Records"))
    titles = {record: record.read_text().splitlines()[0].removeprefix("# ").partition(". ") for record in RECORDS}
    assert rows == [
        [number, f"[{title}]({record.name})", status(record)[0]] for record, (number, _, title) in titles.items()
    ]
