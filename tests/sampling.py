"""A sample of the tests for `make test`: every short file, and of the long ones as many as fit, by a seed of the day.

    pytest --record-durations tests/durations.json      # after a run of everything: what each file took
    pytest --sample 480 --sample-seed 2026-11-28        # files that take 480 s of all workers together

The controller and its workers choose alike: the choice depends on the seed, the budget and the recorded durations only.
"""

import datetime
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
SHORT_S = 1.0
"""Duration up to which a file is in every sample, in seconds of one worker."""
UNKNOWN_S = 2.0
"""Duration assumed for a file that has no record, in seconds."""
ALWAYS = ("tests/sim/test_mutants.py",)
"""Files in every sample, whatever they take: the planted bugs."""


def sample(files: Iterable[str], seconds: Mapping[str, float], budget_s: float, seed: str) -> set[str]:
    """The files of a sample. Long files are taken in the seed's order, each one that still fits the budget."""
    known = {name: seconds.get(name, UNKNOWN_S) for name in files}
    chosen = {name for name, took_s in known.items() if took_s <= SHORT_S or name in ALWAYS}
    left_s = budget_s - sum(known[name] for name in chosen)
    others = sorted(known.keys() - chosen)
    random.Random(seed).shuffle(others)
    for name in others:
        if known[name] <= left_s:
            chosen.add(name)
            left_s -= known[name]
    return chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    group = parser.getgroup("sampling")
    group.addoption("--sample", type=float, metavar="S", help="run short files, and long ones that take S seconds")
    group.addoption("--sample-seed", default="", metavar="TEXT", help="chooses the long files; default: today's date")
    group.addoption("--record-durations", type=Path, metavar="FILE", help="write what each file took")


class Sampling:
    """Leaves out what is not in the sample."""

    def __init__(self, budget_s: float, seed: str) -> None:
        self._budget_s = budget_s
        self._seed = seed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says how to run the same sample again, or everything."""
        terminalreporter.write_line(
            f"sample {self._seed}, of files that take {self._budget_s:g} s: TEST_SEED={self._seed} repeats it, "
            "make test-all runs all files"
        )

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keeps the tests of the chosen files."""
        root = config.rootpath
        names = {item: item.path.relative_to(root).as_posix() for item in items}
        chosen = sample(set(names.values()), json.loads(DURATIONS.read_text()), self._budget_s, self._seed)
        left_out = [item for item in items if names[item] not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if names[item] in chosen]


class Durations:
    """Adds up what the tests of each file took, set-up and teardown included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        """Writes the record; what another run recorded of other files stays."""
        kept: dict[str, float] = json.loads(self._path.read_text()) if self._path.exists() else {}
        kept |= {name: round(seconds, 2) for name, seconds in self._seconds.items()}
        there = {name: seconds for name, seconds in sorted(kept.items()) if Path(name).exists()}
        self._path.write_text(json.dumps(there, indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Registers what the options ask for."""
    if (budget_s := config.getoption("--sample")) is not None:
        seed = config.getoption("--sample-seed") or datetime.datetime.now(datetime.UTC).date().isoformat()
        config.option.sample_seed = seed  # the workers' own, whatever the day is there
        config.pluginmanager.register(Sampling(budget_s, seed), "kvgrpc-sampling")
    if (path := config.getoption("--record-durations")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(path), "kvgrpc-durations")
