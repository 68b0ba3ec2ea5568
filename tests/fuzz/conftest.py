"""The number of fuzz inputs: 10,000 in a run of all tests, unless FUZZ_INPUTS says otherwise, for at most FUZZ_S
seconds.

Every run makes the same inputs; another FUZZ_SEED makes others. A failing test names the number of its input; with
FUZZ_ONLY a test makes only the input of that number.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from tests.fuzz import inside, weights
from tests.fuzz.inside import State
from tests.fuzz.target import LIMITS, Target
from tests.service.conftest import starting

RUN_S = 7 * 24 * 3600

Run = Callable[[Callable[[Random], None], float], None]
"""Calls a function with random choices once for each input of its share."""


@pytest.fixture
def run(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Run]:
    def inputs(take: Callable[[Random], None], share: float) -> None:
        count = max(1, round(share * int(os.environ.get("FUZZ_INPUTS", "10000"))))
        until = time.monotonic() + share * float(os.environ.get("FUZZ_S", RUN_S))
        seed, only = os.environ.get("FUZZ_SEED", "0"), os.environ.get("FUZZ_ONLY")
        taken = 0
        for number in range(count) if only is None else [int(only)]:
            if time.monotonic() > until:
                break
            try:
                taken += 1
                take(Random(f"{seed} {request.node.name} {number}"))
            except BaseException as error:  # also a timeout of the test
                error.add_note(f"at input {number} of this test: FUZZ_SEED={seed} FUZZ_ONLY={number}")
                record_property("inputs", taken)
                raise
        record_property("inputs", taken)

    yield inputs
    # Failed tests report their weights too.
    record_property("weights", weights.rows(weights.HEAVIEST))
    weights.HEAVIEST.clear()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Yields one server with a peer. Its IP address is its own, because inputs make it dial others."""
    folder = tmp_path_factory.mktemp("fuzz")
    with starting(folder) as start:
        where = ("--listen", "127.0.0.7:0")
        engine, peer = start(
            (*where, "--session-socket", str(folder / "session.sock")),
            where,
            settings=f'dial_allow = ["127.0.0.7"]\n{LIMITS}',
            **inside.ENVIRONMENT,
        )
        with closing(State(engine.process.pid)) as digest:
            made = Target(engine, peer, digest)
            yield made
            made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(RUN_S if "FUZZ_INPUTS" in os.environ else 240))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the number of inputs, their seed and their rate. Totals of several seeds add up."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    calls = [(report, dict(report.user_properties)) for report in reports if report.when == "call"]
    taken = [(report, properties["inputs"]) for report, properties in calls if "inputs" in properties]
    if taken:
        inputs, seed = sum(count for _, count in taken), os.environ.get("FUZZ_SEED", "0")
        seconds = max(report.stop for report, _ in taken) - min(report.start for report, _ in taken)
        rate = f"{inputs / seconds:,.0f} a second"
        terminalreporter.write_line(f"{inputs:,} inputs of seed {seed} in {seconds:,.0f} s, {rate}")
    reports += [report for outcome in ("", "error") for report in terminalreporter.getreports(outcome)]
    noted = [dict(report.user_properties) for report in reports if isinstance(report, pytest.TestReport)]
    weighed = [row for one in noted for row in cast("list[list[Any]]", one.get("weights", []))]
    for line in weights.table(weighed) if "FUZZ_INPUTS" in os.environ else ():
        terminalreporter.write_line(line)
