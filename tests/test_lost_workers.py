"""Runs of a few tests whose worker dies in the middle end, with every other test run once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE = """
import os, pytest

@pytest.mark.parametrize("number", range({tests}))
def test_it(number):
    with open({ran!r}, "a") as ran:
        ran.write(f"{name} {{number}}\\n")
    if ({name!r}, number) in {deadly!r}:
        os.kill(os.getpid(), {signal})
"""
TESTS = 4
"""Number of tests of a file."""
Deadly = list[tuple[str, int]]
DEADLY: list[Deadly] = [[("a", 0)], [("f", 3)], [("b", 3), ("e", 1), ("e", 3)]]
"""Tests that kill their worker."""


@pytest.mark.parametrize("deadly", DEADLY, ids=str)
def test_a_run_whose_workers_die_ends_and_runs_every_test_once(tmp_path: Path, deadly: Deadly) -> None:
    ran = tmp_path / "ran"
    for name in "abcdef":
        text = FILE.format(tests=TESTS, ran=str(ran), name=name, deadly=deadly, signal=int(signal.SIGSEGV))
        (tmp_path / f"test_{name}.py").write_text(text)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-n2", "--dist", "loadfile", "--no-loadscope-reorder",
            "-c", os.devnull, "-p", "no:cacheprovider", "-p", "tests.lost_workers", "--rootdir", str(tmp_path),
            str(tmp_path),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert sorted(ran.read_text().splitlines()) == [f"{name} {number}" for name in "abcdef" for number in range(TESTS)]
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert f"{len(deadly)} failed, {6 * TESTS - len(deadly)} passed" in done.stdout
    assert done.stderr.count("Fatal Python error") == done.stderr.count("most recent call first") == len(deadly)
    for name, number in deadly:
        assert f"test_{name}.py::test_it[{number}]" in done.stdout
