"""The code that an engine adds to serve over kvgrpc fits in a hundred lines."""

from pathlib import Path

from tests.examples.code_lines import code_lines

ENGINE = Path(__file__).resolve().parents[2] / "examples" / "minimal_engine" / "engine.py"
LINES_MAX = 100


def test_the_minimal_engine_has_at_most_a_hundred_lines_of_code() -> None:
    lines = code_lines(ENGINE.read_text())
    assert 50 < len(lines) <= LINES_MAX


def test_only_code_is_counted() -> None:
    source = '"""Doc\n\nof two."""\n\n# why\nx = """a\nb"""  # c\n\n\ndef f() -> None:\n    """Doc."""\n    return\n'
    assert code_lines(source) == {6, 7, 10, 12}
