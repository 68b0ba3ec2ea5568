"""The code that an engine on transformers adds to move its cache as named tensors fits in sixty lines."""

from pathlib import Path

from tests.examples.code_lines import code_lines

MOVING = Path(__file__).resolve().parents[2] / "examples" / "transformers" / "moving.py"
LINES_MAX = 60


def test_what_moves_a_cache_has_at_most_sixty_lines_of_code() -> None:
    assert 30 < len(code_lines(MOVING.read_text())) <= LINES_MAX
