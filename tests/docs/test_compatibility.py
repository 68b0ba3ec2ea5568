"""docs/compatibility.md: the tests that its lines name exist."""

import ast
import re

from tests.docs.pages import DOCS, ROOT, section, tables

PAGE = DOCS / "compatibility.md"
COMPARED = (
    "## Pull",
    "## Push",
    "## Next turns",
    "## Failures",
    "## Named tensors",
    "## Metrics and traces",
    "## Lives",
)
NOT_OURS = "—"


def names() -> set[str]:
    """Returns the names of all tests."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_line_is_shown_by_tests_that_exist() -> None:
    known = names()
    for heading in COMPARED:
        (rows,) = tables(section(PAGE, heading))
        assert rows
        for theirs, ours, tests in rows:
            assert theirs
            assert ours
            found = re.findall(r"`(test_\w+)`", tests)
            assert found or tests == NOT_OURS, f"nothing shows: {theirs}"
            assert not set(found) - known
