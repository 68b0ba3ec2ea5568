"""The code that a router adds to speak kvgrpc is at most 150 lines."""

from pathlib import Path

ROUTER = Path(__file__).resolve().parents[2] / "examples" / "router"
LINES_MAX = 150


def test_the_router_has_at_most_150_lines() -> None:
    lines = sum(len(file.read_text().splitlines()) for file in ROUTER.rglob("*.py"))
    assert 0 < lines <= LINES_MAX
