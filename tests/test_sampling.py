"""A sample of the tests is the same for everybody with its seed, fits its budget, and leaves no file out for ever."""

from tests.sampling import ALWAYS, SHORT_S, sample

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
