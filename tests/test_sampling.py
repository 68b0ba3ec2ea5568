"""A sample of the tests is the same for everybody with its seed, fits its budget, and leaves no file out for ever."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tests.sampling import ALWAYS, SHORT_S, one_of_each_family, sample

SHORT = {f"tests/short_{number}.py": SHORT_S / 2 for number in range(10)}
LONG = {f"tests/long_{number}.py": 10.0 + number for number in range(10)}
SECONDS = SHORT | LONG | dict.fromkeys(ALWAYS, 100.0)
BUDGET_S = 150.0


def test_a_seed_chooses_the_same_files_every_time_whatever_their_order() -> None:
    assert sample(SECONDS, SECONDS, BUDGET_S, "a") == sample(reversed(SECONDS), SECONDS, BUDGET_S, "a")


def test_short_files_and_the_planted_bugs_are_in_every_sample() -> None:
    assert SHORT.keys() | set(ALWAYS) <= sample(SECONDS, SECONDS, 0.0, "a")


def test_long_files_fit_the_budget() -> None:
    for seed in range(100):
        chosen = sample(SECONDS, SECONDS, BUDGET_S, str(seed))
        assert chosen & LONG.keys()
        assert sum(SECONDS[name] for name in chosen) <= BUDGET_S


def test_every_file_is_in_some_sample() -> None:
    chosen = [sample(SECONDS, SECONDS, BUDGET_S, str(seed)) for seed in range(100)]
    assert set.union(*chosen) == SECONDS.keys()
    assert len({frozenset(files) for files in chosen}) > 1


def test_a_file_without_a_record_counts_as_a_long_one() -> None:
    files = {*SECONDS, "tests/new.py"}
    assert any("tests/new.py" in sample(files, SECONDS, BUDGET_S, str(seed)) for seed in range(100))
    assert "tests/new.py" not in sample(files, SECONDS, 0.0, "a")


@dataclass(frozen=True)
class Collected:
    """A collected test, as far as the sample looks at it."""

    file: str
    name: str
    family: str = ""

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def nodeid(self) -> str:
        return f"{self.file}::{self.name}"

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        if self.family and name == "family":
            yield pytest.mark.family(self.family).mark


LONERS = [Collected("tests/a.py", f"test_{number}") for number in range(3)]
FAMILY = [Collected("tests/a.py", f"test_bug[{number}]", "bugs") for number in range(5)]
OTHERS = [Collected("tests/a.py", f"test_path[{number}]", "paths") for number in range(5)]
ELSEWHERE = [Collected("tests/b.py", f"test_bug[{number}]", "bugs") for number in range(5)]
EVERY = [*LONERS, *FAMILY, *OTHERS, *ELSEWHERE]


def chosen(seed: str, tests: list[Collected] = EVERY) -> set[Collected]:
    return cast(set[Collected], one_of_each_family(cast(list[pytest.Item], tests), seed))


def test_a_sample_has_every_test_without_a_family_and_one_of_each_family_of_each_file() -> None:
    for seed in range(20):
        found = chosen(str(seed))
        assert set(LONERS) <= found
        assert [len(found.intersection(family)) for family in (FAMILY, OTHERS, ELSEWHERE)] == [1, 1, 1]
        assert len(found) == len(LONERS) + 3


def test_a_seed_chooses_the_same_of_each_family_whatever_their_order() -> None:
    assert chosen("a") == chosen("a", EVERY[::-1])


def test_every_test_of_a_family_is_in_some_sample_and_families_do_not_choose_alike() -> None:
    found = [chosen(str(seed)) for seed in range(100)]
    assert set.union(*found) == set(EVERY)
    numbers = [[FAMILY.index(test) for test in of & set(FAMILY)] for of in found]
    others = [[OTHERS.index(test) for test in of & set(OTHERS)] for of in found]
    assert numbers != others
