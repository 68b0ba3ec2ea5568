"""Stored results are compared and drawn, and unusable files are refused before anything is measured."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from bench.command import bench
from bench.plan import LAYERWISE_QUICK, PULL_QUICK
from bench.results.comparison import compare
from bench.results.drawing import draw
from bench.results.stored import read
from bench.results.wording import number
from bench.told import Told

MEASURED = Path(__file__).resolve().parents[2] / "bench" / "results" / "measured" / "pull.json"


def slower(factor: float) -> dict[str, Any]:
    result = read(MEASURED)
    for case in result["cases"]:
        case["gbps"] /= factor
    return result


def test_a_change_beyond_the_spread_of_repeats_is_marked_and_a_smaller_one_is_not() -> None:
    result, changed = read(MEASURED), slower(100)
    assert {change.verdict for change in compare(result, result)} == {"same"}
    found = {change.name: change for change in compare(result, changed)}
    for name, change in found.items():
        assert change.verdict == ("worse" if name.endswith(": gbps") else "same")


def test_a_comparison_fails_only_above_the_wanted_factor(tmp_path: Path) -> None:
    other = tmp_path / "b.json"
    other.write_text(json.dumps(slower(2)))
    for flags, code in (((), 0), (("--fail-above", "3"), 0), (("--fail-above", "1.5"), 1)):
        result = CliRunner().invoke(bench, ["compare", str(MEASURED), str(other), "--json", *flags])
        assert result.exit_code == code
        assert json.loads(result.stdout)["rows"]


def test_a_picture_is_well_formed_names_its_series_and_is_the_same_each_time(tmp_path: Path) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    for path in (one, other):
        draw(read(MEASURED), path)
    text = one.read_text()
    assert text == other.read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    for name in ("kvgrpc", "memcpy", "raw NIXL", "raw Gloo", "GB/s", "python -m bench pull"):
        assert name in text


@pytest.mark.parametrize(
    "flags", [("--output", "/nonexistent/x"), ("--plot", "x.gif"), ("--plot", "/nonexistent/x.svg"), ("--repeats", "0")]
)
@pytest.mark.parametrize("command", ["pull", "push", "layerwise", "geometry", "tensors"])
def test_what_cannot_be_done_is_refused_before_anything_is_measured(command: str, flags: tuple[str, str]) -> None:
    result = CliRunner().invoke(bench, [command, *flags])
    assert (result.exit_code, result.stdout) == (2, "")
    assert flags[0] in result.stderr


@pytest.mark.parametrize("steps", [PULL_QUICK.steps(), LAYERWISE_QUICK.steps()])
def test_progress_grows_and_ends_at_a_hundred_percent(steps: int) -> None:
    seen = []
    with Told(steps, quiet=True) as told:
        for step in range(steps):
            told(f"step {step}")
            seen.append(told.percent)
    assert seen == sorted(seen)
    assert seen[-1] < 100
    assert told.percent == 100


@pytest.mark.parametrize(("value", "text"), [(1280.4, "1,280"), (13.42, "13.4"), (0.5, "0.50"), (0.0123, "0.0123")])
def test_a_figure_has_no_exponent(value: float, text: str) -> None:
    assert number(value) == text
