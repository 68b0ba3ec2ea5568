"""`python -m bench ... --quick` runs and names its figures; the figures themselves are not checked."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.command import bench
from bench.geometries import NAMES as GEOMETRIES, geometry
from bench.measures.leases import Lead
from bench.plan import PUSH_PATHS, SOURCE_WRITES, WRITING_PATHS, YES, environment_of
from bench.results.between_hosts import BetweenHosts, targets_of
from kvgrpc.core.values.bridge import Bridge

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
"""Timeout in seconds. An idle machine takes a few: seven processes, four of which load NIXL."""
NAMES = {"name", "datapath", "layout", "mover", "base", "way"}
"""Fields of a case that are not figures."""
PULL_CASE = {
    "name",
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
PULL_DETAILS = {
    "processor_ms_source",
    "processor_ms_destination",
    "processor_ms_client",
    "kernel_ms_source",
    "kernel_ms_destination",
    "one_block_pull_empty_ms",
    "busy_5ms_one_block_pull_ms_p50",
    "rested_pull_ms_p50",
    "rate_processor_ms_client",
    "rate_processor_ms_source",
    "rate_processor_ms_destination",
    "polling_ratio_pulls_per_s",
    "polling_ratio_processor",
    "polling_ratio_one_block_pull",
}
PULL_FIGURES = {
    "one_block_pull_ms_p50",
    "one_block_pull_ms_p50_busy",
    "completion_to_waiter_ms_p50",
    "completion_to_waiter_ms_p50_busy",
    "coalescing_ratio",
    "renew_1000_ms",
    "lease_us",
    "lease_cost_ratio_100k",
    "tls_call_ratio",
    "tls_pull_ratio",
    "tls_rate_ratio",
    "authorization_us",
    "private_window_ratio_shm",
    "metrics_ratio",
    "tracing_off_ratio",
    "tracing_1_percent_ratio",
    "tracing_100_percent_ratio",
    "scrape_10000_ms",
    "unary_ratio_empty",
    "idle_core_percent",
    "rested_pull_ratio",
    "pulls_per_s",
}
BETWEEN_HOSTS = {"gloo_gbps", "ratio_gloo", "nixl_tcp_gbps", "ratio_nixl_tcp"}
"""Additional fields of a case over collective."""
PUSH_CASE = {
    "name",
    "datapath",
    "block_bytes",
    "blocks",
    "layout",
    "threads",
    "descriptors",
    "mover",
    "gbps",
    "control_ms",
    "base",
    "base_gbps",
    "ratio_base",
}
PUSH_FIGURES = {"one_block_push_ms_p50", "control_8192_ms", "waiting_cost_ratio"}
PUSH_DETAILS = {
    "control_contiguous_ms",
    "control_token_ids_ms",
    "control_1_ms",
    "core_push_us",
    "one_block_pull_ms_p50",
    "processor_ms_source",
    "processor_ms_destination",
    "processor_ms_client",
    "kernel_ms_source",
    "kernel_ms_destination",
    "session_one_block_push_ms_p50",
    "servers_1_ms",
    "servers_256_ms",
}
LAYERWISE_CASE = {
    "datapath",
    "layers",
    "block_bytes",
    "blocks",
    "layout",
    "layer_ms",
    "prefill_ms",
    "whole_ms",
    "visible_whole_ms",
    "visible_layerwise_ms",
    "visible_ratio",
    "part_ms_source",
    "part_ms_destination",
}

TENSOR_CASE = {"name", "datapath", "way", "tensor_bytes", "tensors", "gbps", "gloo_gbps", "ratio_gloo"}
GEOMETRY_CASE = {
    "name",
    "datapath",
    "pairs",
    "nbytes",
    "runs",
    "run_bytes",
    "gbps",
    "memcpy_gbps",
    "ratio_memcpy",
}


def is_measured(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def check_details(found: dict[str, Any]) -> None:
    """Checks that details are measured. The kernel's share is counted in ticks, so it may be 0 for little work."""
    for name, value in found.items():
        assert is_measured(value) or (value == 0 and name.startswith("kernel_")), found


def measure(command: str, *flags: str) -> Any:
    """Returns the JSON output of `python -m bench`, which has told of every step, up to their total."""
    program = [sys.executable, "-m", "bench", command, "--quick", "--json", "--repeats", "1", *flags]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    steps = [(int(step), int(total)) for step, total in re.findall(r"% step (\d+) of (\d+): ", done.stderr)]
    total = steps[-1][1]
    assert list(dict.fromkeys(steps)) == [(step, total) for step in range(1, total + 1)], done.stderr
    assert done.stderr.splitlines()[-1].startswith("100 % measured")
    said = json.loads(done.stdout)
    assert said["quick"] is True
    assert said["baselines"]
    return said


def check_case(case: dict[str, Any], fields: set[str]) -> None:
    assert case.keys() >= fields
    assert all(is_measured(case[name]) for name in fields - NAMES), case


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_every_figure_of_pulls_is_measured_and_named() -> None:
    said = measure("pull", "--data-paths", "nixl", "--layouts", "contiguous")
    (case,) = said["cases"]
    check_case(case, PULL_CASE)
    assert (case["datapath"], case["layout"]) == ("nixl", "contiguous")
    assert said.keys() >= PULL_FIGURES
    assert all(is_measured(said[name]) for name in PULL_FIGURES), said
    check_details({name: said["details"][name] for name in PULL_DETAILS})


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_pulls_with_checksums_are_measured_against_those_without_and_nothing_else() -> None:
    said = measure("pull", "--data-paths", "nixl", "--layouts", "contiguous", "--checksum")
    (case,) = said["cases"]
    check_case(case, PULL_CASE | {"ratio_without", "ratio_at_once"})
    assert all(said[name] is None for name in PULL_FIGURES), said


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_pulls_over_collective_are_measured_beside_raw_gloo_and_nixl_over_tcp() -> None:
    said = measure("pull", "--data-paths", "collective", "--layouts", "scattered", "--parts", "bandwidth")
    (case,) = said["cases"]
    check_case(case, PULL_CASE - {"ratio_raw_nixl"} | BETWEEN_HOSTS)
    assert (case["name"], case["ratio_raw_nixl"]) == ("collective 256 x 16 KB scattered", None)
    assert case["nixl_tcp_mode"].split()[0] in ("READ", "WRITE")


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_every_figure_of_pushes_is_measured_and_named() -> None:
    said = measure("push", "--data-paths", "shm,nixl,collective", "--profile")
    assert [case["datapath"] for case in said["cases"]] == ["shm", "nixl", "collective"]
    bases = [case["base"].split()[:2] for case in said["cases"]]
    assert bases == [["pull"], ["raw_nixl", "WRITE"], ["pull"]]
    check_case(said["cases"][-1], PUSH_CASE | BETWEEN_HOSTS)
    for case in said["cases"]:
        check_case(case, PUSH_CASE)
        assert case["mover"] in ("source", "destination")
    assert said.keys() >= PUSH_FIGURES
    assert all(is_measured(said[name]) for name in PUSH_FIGURES), said
    assert said["details"].keys() == PUSH_DETAILS
    check_details(said["details"])
    assert [line for line in said["profile"] if "kvgrpc/core/" in line]


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_every_figure_of_layer_wise_pushes_is_measured_and_named() -> None:
    said = measure("layerwise", "--data-paths", "shm")
    (case,) = said["cases"]
    check_case(case, LAYERWISE_CASE)
    assert case["prefill_ms"] > case["whole_ms"], "the prefill is to take longer than moving its blocks"
    assert 0 <= case["layers_early"] <= case["layers"]
    assert said["visible_ratio"] == case["visible_ratio"]


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_every_figure_of_geometries_is_measured_and_named_whatever_the_bytes() -> None:
    names = "tp 1 to 2", "head- to token-major"
    said = measure("geometry", "--cases", ",".join(names), "--pool-mb", "6")
    assert [(case["name"], case["repack"]) for case in said["cases"]] == list(zip(names, (False, True), strict=True))
    for case in said["cases"]:
        check_case(case, GEOMETRY_CASE)
        assert case["nbytes"] == 6 << 20
    assert is_measured(said["ratio_tp2_tp1"])
    assert said["planning_ms"].keys() == {"tp 2 to 2", "tp 1 to 2", "token-major tp 1 to 2"}
    assert all(map(is_measured, said["planning_ms"].values()))


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_every_figure_of_named_tensors_is_measured_and_named() -> None:
    said = measure("tensors", "--data-paths", "shm")
    ways = ("put_async", "put_in_place", "get", "put")
    assert [case["name"] for case in said["cases"]] == [f"shm {way} 256 KB" for way in ways]
    for case in said["cases"]:
        check_case(case, TENSOR_CASE)
        assert (case["tensors"], case["tensor_bytes"]) == (16, 256 << 10)
    assert said["full_ratio"].keys() == {"shm"}
    assert is_measured(said["full_ratio"]["shm"])


def test_engines_of_every_geometry_that_the_measure_wants_are_there() -> None:
    found = {name: geometry(name, 128) for name in GEOMETRIES}
    repacked = {name for name, pair in found.items() if Bridge(pair.source, pair.destination).repacked}
    assert repacked == {"head- to token-major", "token-major tp 1 to 2"}
    ranks = {name: (pair.source.ranks, pair.destination.ranks) for name, pair in found.items()}
    assert set(ranks.values()) == {(1, 1), (2, 2), (1, 2), (2, 1)}
    (windowed,) = found["window"].source.pool.groups
    assert 0 < windowed.blocks_of(128) < windowed.blocks
    assert found["aliased groups"].source.pool.spaces == (0, 0)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("pull", ("--data-paths", "pigeon")),
        ("pull", ("--data-paths", "nixl-tcp")),
        ("pull", ("--sizes", "5")),
        ("pull", ("--pool-mb", "0")),
        ("pull", ("--pool-mb", "-4")),
        ("pull", ("--layouts", "")),
        ("pull", ("--parts", "all")),
        ("pull", ("--parts", "latency", "--checksum")),
        ("pull", ("--tls", "--parts", "latency")),
        ("push", ("--data-paths", "pigeon")),
        ("push", ("--sizes", "5")),
        ("layerwise", ("--pool-mb", "0")),
        ("layerwise", ("--sizes", "192")),
        ("geometry", ("--pool-mb", "0")),
        ("geometry", ("--cases", "tp 3 to 5")),
        ("tensors", ("--data-paths", "nixl-tcp")),
        ("tensors", ("--sizes", "192")),
    ],
)
def test_a_choice_that_is_none_is_refused_before_anything_starts(command: str, flags: tuple[str, ...]) -> None:
    result = CliRunner().invoke(bench, [command, "--quick", *flags])
    assert result.exit_code == 2
    assert flags[0] in result.stderr
    assert result.stdout == ""


def test_collective_is_to_reach_most_of_raw_gloo_and_to_be_faster_than_nixl_over_tcp() -> None:
    for block_bytes, bound in ((4 << 20, 0.9), (64 << 10, 0.7)):
        figures = BetweenHosts(ratio_gloo=bound, ratio_nixl_tcp=0.99)
        found = {target.name: (target.bound, target.met) for target in targets_of(figures, block_bytes)}
        assert found == {"ratio_gloo": (bound, True), "ratio_nixl_tcp": (1.0, False)}


@pytest.mark.parametrize("data_path", [*PUSH_PATHS, *WRITING_PATHS])
def test_sources_write_over_the_paths_that_say_so_and_over_no_others(data_path: str) -> None:
    assert (environment_of(data_path)[SOURCE_WRITES] == YES) is (data_path in WRITING_PATHS)


def test_the_lead_whose_leases_are_timed_keeps_more_than_a_caller_may_by_default() -> None:
    assert Lead(13_000).cycles(1) > 0
