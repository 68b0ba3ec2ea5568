"""Access to the documentation for its tests: pages, tables and code."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
HOUSE = (ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
DOCS = ROOT / "docs"

_CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_RULE = re.compile(r"^\|(?:\s*:?-+:?\s*\|)+$")


def pages() -> list[Path]:
    """Returns every page of the documentation."""
    return [README, *HOUSE, *sorted(DOCS.rglob("*.md"))]


def section(page: Path, heading: str) -> str:
    """Returns the text below a heading, up to the next heading of its level or above."""
    text = page.read_text()
    level = len(heading.split(" ", maxsplit=1)[0])
    start = text.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"\n#{{1,{level}}} ", text[start:])
    return text[start:][: end.start() if end else None]


def code(text: str, language: str) -> list[str]:
    """Returns the code blocks of one language."""
    return [body for found, body in _CODE.findall(text) if found == language]


def tables(text: str) -> list[list[list[str]]]:
    """Returns every table as rows of cells, without the heading row."""
    found: list[list[list[str]]] = []
    below = False
    for line in text.splitlines():
        if _RULE.match(line):
            found.append([])
            below = True
        elif below and line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        else:
            below = False
    return found


def plain(cell: str) -> str:
    """Returns a cell without its code marks."""
    return cell.replace("`", "")
