"""`kvgrpc bench pull --quick`: that it runs and what it says, not how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvgrpc.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
"""Seconds on an idle machine: seven processes, four of which load NIXL."""
CASE = {
    "datapath",
    "block_bytes",
    "blocks",
    "layout",
    "threads",
    "gbps",
    "control_ms",
    "ratio_memcpy",
    "ratio_raw_nixl",
}
DETAILS = {
    "processor_ms_source",
    "processor_ms_destination",
    "processor_ms_client",
    "one_block_pull_empty_ms",
    "busy_5ms_one_block_pull_ms_p50",
}
FIGURES = {
    "one_block_pull_ms_p50",
    "one_block_pull_ms_p50_busy",
    "completion_to_waiter_ms_p50",
    "completion_to_waiter_ms_p50_busy",
    "coalescing_ratio",
    "renew_1000_ms",
    "lease_us",
    "lease_cost_ratio_100k",
    "unary_ratio_empty",
    "idle_core_percent",
}


def is_measured(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_every_figure_is_measured_and_named() -> None:
    flags = ["--quick", "--json", "--data-paths", "nixl", "--layouts", "contiguous", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "kvgrpc", "bench", "pull", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    (case,) = said["cases"]
    assert case.keys() >= CASE
    assert (case["datapath"], case["layout"]) == ("nixl", "contiguous")
    assert all(is_measured(case[name]) for name in CASE - {"datapath", "layout"}), case
    assert said.keys() >= FIGURES
    assert all(is_measured(said[name]) for name in FIGURES), said
    assert all(is_measured(said["details"][name]) for name in DETAILS), said["details"]
    assert said["quick"] is True


@pytest.mark.parametrize(
    "flags",
    [
        ("--data-paths", "pigeon"),
        ("--sizes", "5"),
        ("--pool-mb", "0"),
        ("--pool-mb", "-4"),
        ("--layouts", ""),
        ("--parts", "all"),
    ],
)
def test_a_choice_that_is_none_is_refused_before_anything_starts(flags: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["bench", "pull", "--quick", *flags])
    assert result.exit_code == 2
    assert flags[0] in result.stderr
    assert result.stdout == ""
