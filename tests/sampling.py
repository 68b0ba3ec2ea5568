"""A sample of the tests for `make test`: every short file, and of the long ones as many as fit, by a seed of the day.
Of a family of tests that are alike, marked `family(name)`, one is in it.

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
ALWAYS = {"tests/sim/test_mutants.py": 120.0}
"""Files in every sample -> seconds that one test of each of their families takes: the planted bugs."""


def sample(files: Iterable[str], seconds: Mapping[str, float], budget_s: float, seed: str) -> set[str]:
    """The files of a sample. Long files are taken in the seed's order, each one that still fits the budget."""
    known = {name: ALWAYS.get(name, seconds.get(name, UNKNOWN_S)) for name in files}
    chosen = {name for name, took_s in known.items() if took_s <= SHORT_S or name in ALWAYS}
    left_s = budget_s - sum(known[name] for name in chosen)
    others = sorted(known.keys() - chosen)
    random.Random(seed).shuffle(others)
    for name in others:
        if known[name] <= left_s:
            chosen.add(name)
            left_s -= known[name]
    return chosen


def one_of_each_family(items: Iterable[pytest.Item], seed: str) -> set[pytest.Item]:
    """Returns the tests without a family, and of each family of a file the one that the seed chooses."""
    families: dict[tuple[Path, str], list[pytest.Item]] = {}
    kept: set[pytest.Item] = set()
    for item in items:
        family = next(item.iter_markers("family"), None)
        if family is None:
            kept.add(item)
        else:
            families.setdefault((item.path, family.args[0]), []).append(item)
    for (path, name), members in families.items():
        kept.add(random.Random(f"{seed} {path.name} {name}").choice(sorted(members, key=lambda item: item.nodeid)))
    return kept


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    group = parser.getgroup("sampling")
    group.addoption("--sample", type=float, metavar="S", help="run short files, and long ones that take S seconds")
    group.addoption("--sample-seed", default="", metavar="TEXT", help="chooses the long files; default: today's date")
    group.addoption("--record-durations", type=Path, metavar="FILE", help="write what each file took")


class Sampling:
    """Leaves out the tests that are not in the sample."""

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
        kept = one_of_each_family([item for item in items if names[item] in chosen], self._seed)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


class Durations:
    """Adds up what the tests of each file took, set-up and teardown included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        if not isinstance(report, pytest.SubtestReport):  # its test reports the same time
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
