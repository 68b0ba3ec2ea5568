"""How many inputs: 10,000 in a run of all tests, unless FUZZ_INPUTS says otherwise, for FUZZ_S seconds at most.

The same inputs in every run; another FUZZ_SEED makes other ones.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition

from tests.fuzz.target import LIMITS, Target
from tests.service.conftest import starting

ROUND_INPUTS = 5_000
"""Of one run of Hypothesis, which keeps all that it has tried."""
RUN_S = 7 * 24 * 3600

Run = Callable[[Callable[[Random], None], float], None]
"""Gives its share of all inputs to a function that makes each from random choices."""


class _Enough(BaseException):
    """Hypothesis tries more than it is asked for. No Exception, which it would look into."""


@pytest.fixture
def run(record_property: Callable[[str, object], None]) -> Run:
    def rounds(take: Callable[[Random], None], share: float) -> None:
        inputs = max(1, round(share * int(os.environ.get("FUZZ_INPUTS", "10000"))))
        until = time.monotonic() + share * float(os.environ.get("FUZZ_S", RUN_S))
        done = 0

        def enough() -> bool:
            return done == inputs or time.monotonic() > until

        def one(random: Random) -> None:
            nonlocal done
            if enough():
                raise _Enough
            done += 1
            take(random)

        first = int(os.environ.get("FUZZ_SEED", "0"))
        for number, start in enumerate(range(0, inputs, ROUND_INPUTS)):
            limits = settings(
                max_examples=min(ROUND_INPUTS, inputs - start),
                database=None,
                deadline=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            try:
                seed(f"{first} {number}")(limits(given(st.randoms(use_true_random=False))(one)))()
            except (_Enough, FlakyStrategyDefinition):  # that it did not get what it tried again
                if not enough():
                    raise
                break
        record_property("inputs", done)

    return rounds


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One server for all tests of a process, with a peer. On an address of their own: inputs name others to dial."""
    with starting(tmp_path_factory.mktemp("fuzz")) as start:
        where = ("--listen", "127.0.0.7:0")
        engine, peer = start(where, where, settings=f'dial_allow = ["127.0.0.7"]\n{LIMITS}')
        made = Target(engine, peer)
        yield made
        made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(RUN_S if "FUZZ_INPUTS" in os.environ else 240))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed")
    inputs = sum(value for report in reports for name, value in report.user_properties if name == "inputs")
    if inputs:
        terminalreporter.write_line(f"{inputs:,} inputs")
