"""Hooks of mkdocs (mkdocs.yml): the pages of the repository as a site, built by `make site`.

Pages are written for a reader of the repository. The hooks add the pages outside of docs/, lead links between pages to
the site and other links to the repository, and put in the blank lines that Python-Markdown needs and others do not.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
HOUSE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "clients/README.md": "clients/index.md",
    "examples/router-go/README.md": "examples/router-go.md",
    **{
        path.relative_to(ROOT).as_posix(): f"clients/{path.parent.name}.md"
        for path in sorted(ROOT.glob("clients/*/README.md"))
    },
}
"""Pages outside of docs/: path in the repository -> path in the site."""
FOLDERS = {
    "docs/api": "api.md",
    "docs/decisions": "decisions/README.md",
    "clients/conformance": "clients/conformance.md",
}
"""What stands for a folder that a page links."""
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LIST = re.compile(r"^ *(?:[-*]|\d+\.) ")
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(([^)\s]+)\)")


class TwoSpaces(Extension):
    """Nested blocks are indented by two spaces or more, as everywhere else."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the interface
        """Must come before all other extensions, since it makes the parser anew."""
        md.tab_length = 2
        md.build_parser()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Completes the navigation by what is listed by its folder."""
    config.markdown_extensions.insert(0, TwoSpaces())
    config.nav = [_expanded(row) for row in config.nav or []]
    return config


def _expanded(row: Any) -> Any:
    if isinstance(row, dict):
        return {title: _expanded(rows) for title, rows in row.items()}
    if isinstance(row, list):
        return [found for one in row for found in _pages(one)]
    return row


def _pages(row: Any) -> list[Any]:
    """`decisions/*` is every page of that folder that is not its index."""
    if not isinstance(row, str) or not row.endswith("/*"):
        return [_expanded(row)]
    folder = row.removesuffix("/*")
    inside = [f"{folder}/{path.name}" for path in sorted((ROOT / "docs" / folder).glob("[!RT]*.md"))]
    outside = [page for page in HOUSE.values() if page.startswith(f"{folder}/") and page != f"{folder}/index.md"]
    return [page for page in inside + outside if page != f"{folder}/template.md"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside of docs/."""
    for source, page in HOUSE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """Mends links and blank lines, outside of code."""
    site_path = page.file.src_uri
    sources = {target: source for source, target in HOUSE.items()}
    source = sources.get(site_path, f"docs/{site_path}")
    parts = _FENCED.split(markdown)  # text and code in turn
    parts[::2] = [
        _spaced(_LINK.sub(lambda m: _link(m[1], m[2], source, site_path, config), text)) for text in parts[::2]
    ]
    return "".join(parts)


def _spaced(text: str) -> str:
    lines: list[str] = []
    for line in text.split("\n"):
        if lines and lines[-1].strip() and _begins(line, lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _begins(line: str, before: str) -> bool:
    """Whether a list or table begins behind a line that is none of it."""
    if line.startswith("|"):
        return not before.startswith("|")
    return bool(_LIST.match(line)) and not _LIST.match(before) and not before.startswith(" ")


def _link(text: str, target: str, source: str, site_path: str, config: MkDocsConfig) -> str:
    path, mark, heading = target.partition("#")
    if not path or "://" in path:
        return f"{text}({target})"
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    site = HOUSE.get(inside) or FOLDERS.get(inside)
    if site is None and inside.startswith("docs/") and (ROOT / inside).is_file():
        site = inside.removeprefix("docs/")
    if site is not None:
        return f"{text}({posixpath.relpath(site, posixpath.dirname(site_path) or '.')}{mark}{heading})"
    if not (ROOT / inside).exists():
        return f"{text}({target})"  # mkdocs says so
    if config.repo_url:
        return f"{text}({config.repo_url.rstrip('/')}/blob/{os.environ.get('SITE_BRANCH', 'main')}/{inside})"
    return text.strip("![]")
