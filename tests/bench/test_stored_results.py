"""Stored results are compared and drawn, and unusable files are refused before anything is measured."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.command import bench
from bench.outputs import repeatable
from bench.plan import LAYERWISE_QUICK, PULL_QUICK
from bench.results.comparison import compare
from bench.results.drawing import draw, picture
from bench.results.pulls import PullResult
from bench.results.pushes import LayerwiseResult, PushResult
from bench.results.stored import read, rows
from bench.results.tensors import TensorCase, TensorResult
from bench.results.wording import number, verdict, words
from bench.told import Told, left_s

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "results" / "measured"
MEASURED = FOLDER / "pull.json"
SERIES = {
    "pull": ("kvgrpc", "memcpy", "raw NIXL", "raw Gloo", "raw NIXL over TCP", "GB/s"),
    "push": ("kvgrpc", "pull or raw NIXL", "raw Gloo", "GB/s"),
    "layerwise": ("pushed whole", "layer by layer", "ms (less is better)"),
    "geometry": ("kvgrpc", "memcpy", "tp 1 to 2", "GB/s"),
    "tensors": ("kvgrpc", "raw Gloo", "put in place", "GB/s"),
}
"""Texts of the picture of each kind of result."""


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


@pytest.mark.parametrize("kind", SERIES)
def test_a_picture_is_well_formed_names_its_series_and_is_the_same_each_time(kind: str, tmp_path: Path) -> None:
    result = read(FOLDER / f"{kind}.json")
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    for path in (one, other):
        draw(result, path)
    text = one.read_text()
    assert text == other.read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    for name in (*SERIES[kind], f"python -m bench {kind}"):
        assert name in text


@pytest.mark.parametrize("kind", SERIES)
def test_a_picture_shows_every_point(kind: str) -> None:
    figure = picture(read(FOLDER / f"{kind}.json"))
    for axis in figure.axes:
        tops = [float(y) for line in axis.get_lines() for y in np.asarray(line.get_ydata())]
        assert axis.get_ylim()[0] == 0
        assert axis.get_ylim()[1] >= max(tops)


@pytest.mark.parametrize("kind", SERIES)
def test_a_stored_result_has_quartiles_of_what_is_drawn_and_no_path_of_a_private_folder(kind: str) -> None:
    text = (FOLDER / f"{kind}.json").read_text()
    assert not [folder for folder in ("/tmp/", "/home/", "/work/", "/root/", "--output", "--plot") if folder in text]
    result = json.loads(text)
    assert result["kind"] == kind
    for case in result["cases"]:
        assert case["quartiles"].keys() >= {name for name, value in case.items() if name.endswith("gbps") and value}
        for name, (low, high) in case["quartiles"].items():
            assert low <= case[name] <= high


@pytest.mark.parametrize(
    "places", [["--output", "x.json"], ["--plot=/a b/x.svg"], ["--json"], ["--plot", "--json", "--output=x"]]
)
def test_a_stored_command_says_what_was_measured_and_not_where_it_went(places: list[str]) -> None:
    measured = ["python", "-m", "bench", "pull", "--sizes", "64"]
    assert repeatable([*measured[:4], *places, *measured[4:]]) == repeatable([*measured, *places]) == measured


def test_a_verdict_names_the_worst_and_the_best_case_of_each_path() -> None:
    def case(path: str, gbps: float, ratio: float) -> TensorCase:
        return TensorCase("", path, "put", 1, 1, gbps, 1.0, ratio)

    cases = [case("shm", 4.0, 1.5), case("shm", 2.0, 0.5), case("collective", 1.0, 0.25)]
    assert list(verdict(TensorResult(False, 1, {}, {}, {}, cases))) == [
        "shm, 2 cases, worst to best: 2.00 to 4.00 GB/s, 0.50 to 1.50 x raw Gloo",
        "collective, one case: 1.00 GB/s, 0.25 x raw Gloo",
    ]


def test_every_single_figure_has_words_of_its_own() -> None:
    runs = [PullResult(False, 1, {}, {}, {}), PushResult(False, 1, {}, {}, {}), LayerwiseResult(False, 1, {}, {}, {})]
    named = [target.name for run in runs for target in run.targets()]
    stored = [name for kind in SERIES for name in rows(read(FOLDER / f"{kind}.json")) if ": " not in name]
    assert not [name for name in (*named, *stored) if "_" in words(name) or words(name) == name.replace("_", " ")]


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
    with Told(steps) as told:
        for step in range(steps):
            told(f"pool {step}")
            told.note("something that is no step")
            seen.append(told.percent)
    assert seen == sorted(seen)
    assert seen[-1] < 100
    assert (told.begun, told.percent) == (steps, 100)


def test_the_time_left_is_that_of_the_steps_left_at_their_mean_length_so_far() -> None:
    assert left_s(4, 0, 0.0, 3.0) is None
    assert left_s(4, 2, 20.0, 20.0) == 20.0
    assert left_s(4, 2, 20.0, 25.0) == 15.0
    assert left_s(4, 2, 20.0, 60.0) == 20.0, "a step that takes long makes those after it long"
    assert left_s(4, 4, 40.0, 40.0) == 0.0


@pytest.mark.parametrize(("value", "text"), [(1280.4, "1,280"), (13.42, "13.4"), (0.5, "0.50"), (0.0123, "0.0123")])
def test_a_figure_has_no_exponent(value: float, text: str) -> None:
    assert number(value) == text
