"""What the tests of the documentation read: pages, their tables, their code."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
HOUSE = (ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
DOCS = ROOT / "docs"

_CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_RULE = re.compile(r"^\|(?:\s*:?-+:?\s*\|)+$")


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [README, *HOUSE, *sorted(DOCS.rglob("*.md"))]


def section(page: Path, heading: str) -> str:
    """The text below one heading, up to the next of its level or above."""
    text = page.read_text()
    level = len(heading.split(" ", maxsplit=1)[0])
    start = text.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"\n#{{1,{level}}} ", text[start:])
    return text[start:][: end.start() if end else None]


def code(text: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return [body for found, body in _CODE.findall(text) if found == language]


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, the heading's row left out."""
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
    """A cell without the marks of code."""
    return cell.replace("`", "")
