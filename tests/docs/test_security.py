"""docs/security.md has the core's table of rights."""

from kvgrpc.core.values.owners import RIGHTS
from tests.docs.pages import DOCS, section, tables


def test_the_table_of_rights_is_that_of_the_core() -> None:
    rows = {(kind.value, verb.value): {ground.value for ground in grounds} for (kind, verb), grounds in RIGHTS.items()}
    (shown,) = tables(section(DOCS / "security.md", "## Who may do what"))
    assert {(row[0], row[1]): set(row[2].split(", ")) for row in shown} == rows
