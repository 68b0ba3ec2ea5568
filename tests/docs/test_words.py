"""docs/words.md: every name in it exists in the schema or the code, and its words are in use."""

import ast
import re
from functools import cache

from tests.docs.pages import DOCS, ROOT, tables

PAGE = DOCS / "words.md"
ROWS = [row for table in tables(PAGE.read_text()) for row in table]
PAGES = ("architecture.md", "protocol.md")
"""Pages that newcomers read beside the README."""


@cache
def known() -> set[str]:
    """Returns the names of the schema, and the classes, functions, annotated names and strings of the code."""
    found: set[str] = set()
    for path in (ROOT / "proto").rglob("*.proto"):
        lines = (line.partition("//")[0] for line in path.read_text().splitlines())
        found |= set(re.findall(r"\w+", re.sub(r'"[^"]*"', "", "\n".join(lines))))
    for path in [*(ROOT / "kvgrpc").rglob("*.py"), *(ROOT / "sim").rglob("*.py")]:
        if "_pb2" not in path.name:
            found |= _defined(ast.parse(path.read_text()))
    return found


def _defined(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found


@cache
def texts() -> str:
    """Returns all text that uses the words: the schema, the code and the pages about both."""
    folders = [*(ROOT / "proto").rglob("*.proto"), *(ROOT / "kvgrpc").rglob("*.py"), *(ROOT / "sim").rglob("*.py")]
    pages = [DOCS / page for page in (*PAGES, "reliability.md")]
    return "\n".join(path.read_text() for path in [*folders, *pages]).lower()


def test_each_name_of_a_row_exists_in_the_schema_or_the_code() -> None:
    names = [name for row in ROWS for cell in row for name in re.findall(r"`([^`]+)`", cell)]
    wrong = [
        name for name in names if (not (ROOT / name).exists() if "/" in name else not set(name.split(".")) <= known())
    ]
    assert wrong == []


def test_each_row_says_where_its_word_lives() -> None:
    assert [row[0] for row in ROWS if "`" not in row[2]] == []


def test_each_word_is_in_use() -> None:
    assert [row[0] for row in ROWS if not re.search(rf"\b{re.escape(row[0])}", texts())] == []


def test_each_word_has_one_row() -> None:
    words = [row[0] for row in ROWS]
    assert len(set(words)) == len(words)


def test_pages_for_newcomers_link_the_words() -> None:
    pages = [ROOT / "README.md", *(DOCS / page for page in PAGES)]
    assert [page for page in pages if "words.md" not in page.read_text()] == []
