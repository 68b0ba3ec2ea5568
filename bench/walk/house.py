"""The size of the code: lines that were written by hand, and docstrings that begin with a dependent word."""

import ast
from collections.abc import Iterator
from pathlib import Path

_WORDS = "What Of How Whether Those As By So That Who Whom Whose Where Which With"
DEPENDENT = frozenset(_WORDS.split())
"""Words that make a docstring's beginning depend on what follows: it has no subject, and must be read twice."""


def sources(package: Path) -> Iterator[Path]:
    """Yields the files of a package that were written by hand."""
    for path in sorted(package.rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            yield path


def own_lines(package: Path) -> int:
    """Returns the number of lines of a package that were written by hand."""
    return sum(len(path.read_text().splitlines()) for path in sources(package))


def docstring_openings(package: Path) -> dict[str, int]:
    """Returns the number of all docstrings, and of those that begin with a dependent word."""
    texts = [text for path in sources(package) for text in _docstrings(ast.parse(path.read_text()))]
    return {"all": len(texts), "dependent": sum(text.split()[0].strip(":,") in DEPENDENT for text in texts)}


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yields the texts of modules, classes and functions, and of the names that they follow."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                        yield text
