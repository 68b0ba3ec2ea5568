"""Rules for every page: links lead somewhere, named files and functions exist, and lines are not too long."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT, pages

LINE_MAX = 120

# `kvgrpc/core/node.py`: `Node.handle`, `Node.check`
_NAMED = re.compile(
    r"`((?:kvgrpc|examples)/[\w/]+\.py)`"
    r"(?:(?::|,| and)\s+((?:`[A-Za-z_][\w.]*`(?:,\s+(?=`[A-Za-z_])| and (?=`[A-Z]))?)+))?"
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:kvgrpc|proto|tests|scripts|clients|docs|examples)/[\w./-]*)`")


def test_links_lead_to_a_file_or_heading() -> None:
    broken = []
    for page, target in found(_LINK):
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        known = not heading or heading in headings(file)
        if not target.startswith("https://") and not (file.exists() and known):
            broken.append(f"{page}: {target}")
    assert broken == []


def test_named_files_exist() -> None:
    assert [(page, path) for page, path in found(_PATH) if not (ROOT / path).exists()] == []


def test_named_functions_are_in_the_named_file() -> None:
    names = {name for page in pages() for name in named(page.read_text())}
    assert [f"{file}: {name}" for file, name in sorted(names) if name not in definitions(file)] == []


def test_the_pattern_sees_every_function_that_is_named() -> None:
    text = "`kvgrpc/a/b.py`: `C.d`, `e` and `F`; then `kvgrpc/g.py` alone, `kvgrpc/h.py`:\n   `I.j`."
    assert list(named(text)) == [
        ("kvgrpc/a/b.py", "C.d"),
        ("kvgrpc/a/b.py", "e"),
        ("kvgrpc/a/b.py", "F"),
        ("kvgrpc/h.py", "I.j"),
    ]


def test_lines_of_prose_are_not_too_long() -> None:
    """Tables, code and pictures cannot be wrapped."""
    prose = [re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in pages()]
    lines = [line for text in prose for line in text.splitlines() if not line.startswith(("|", "!["))]
    assert [line for line in lines if len(line) > LINE_MAX] == []


def found(pattern: re.Pattern[str]) -> Iterator[tuple[Path, str]]:
    """Yields every page with each match of a pattern in it."""
    for page in pages():
        for text in pattern.findall(page.read_text()):
            yield page, text


def named(text: str) -> Iterator[tuple[str, str]]:
    """Yields every (file, function, class or constant) that a text names."""
    for file, names in _NAMED.findall(text):
        for name in re.findall(r"`([\w.]+)`", names):
            yield file, name


@cache
def headings(page: Path) -> set[str]:
    """Returns the anchors of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE) if page.suffix == ".md" else []
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@cache
def definitions(file: str) -> set[str]:
    """Returns the functions, the classes with their members, and the constants of a module."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name} | {f"{node.name}.{name}" for part in node.body for name in names_of(part)}
        else:
            found |= set(names_of(node))
    return found


def names_of(node: ast.stmt) -> list[str]:
    """Returns the names that a statement defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []
