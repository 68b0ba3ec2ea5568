"""What an engine adds to serve over kvgrpc fits in a hundred lines of code."""

import ast
import io
import tokenize
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "examples" / "minimal_engine" / "engine.py"
LINES_MAX = 100
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> set[int]:
    """Lines with code: not blank, not a comment, not a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node) is not None and first is not None:
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    return found - docstrings


def test_the_minimal_engine_has_at_most_a_hundred_lines_of_code() -> None:
    lines = code_lines(ENGINE.read_text())
    assert 50 < len(lines) <= LINES_MAX


def test_only_code_is_counted() -> None:
    source = '"""Doc\n\nof two."""\n\n# why\nx = """a\nb"""  # c\n\n\ndef f() -> None:\n    """Doc."""\n    return\n'
    assert code_lines(source) == {6, 7, 10, 12}
