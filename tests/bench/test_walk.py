"""The code that a reader walks through does not grow: the ceilings are today's counts, and go down with them."""

import pytest

from bench.walk.house import docstring_openings, own_lines
from bench.walk.walks import ROOT, Walk, main

CALLS = {"hand_over": 170, "pull": 765, "put_tensor": 1_280}
FILES = {"hand_over": 41, "pull": 65, "put_tensor": 96}
OWN_LINES = 74_060
DEPENDENT_OPENINGS = 0


@pytest.fixture(scope="module")
def walked() -> dict[str, Walk]:
    return main()


def test_a_request_enters_no_more_calls_and_files_than_the_ceiling(walked: dict[str, Walk]) -> None:
    assert {name: walk.calls for name, walk in walked.items() if walk.calls > CALLS[name]} == {}
    assert {name: len(walk.by_file) for name, walk in walked.items() if len(walk.by_file) > FILES[name]} == {}


def test_the_package_has_no_more_lines_than_the_ceiling() -> None:
    assert own_lines(ROOT) <= OWN_LINES


def test_no_more_docstrings_begin_with_a_dependent_word_than_the_ceiling() -> None:
    assert docstring_openings(ROOT)["dependent"] <= DEPENDENT_OPENINGS
