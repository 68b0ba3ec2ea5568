"""The result of `make bench-vllm` has exact names that others read. tests/vllm shows that it runs."""

import json
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

from bench.result import HEAD, KVGRPC, NIXL, Case, line, show

CASE = Case("first_token", 900, 8, 40, 12.5, 20.0, 25.0, 30.0, ratio_nixl_connector=0.5, ratio_worst=1.6)
HOOKS = {KVGRPC: {"all": 40.0, "scheduler": 30.0, "worker": 10.0}, NIXL: {"all": 60, "scheduler": 40, "worker": 20}}
CASE_KEYS = {
    "measure", "prompt_tokens", "concurrency", "requests", "ms_p50", "ms_worst", "nixl_connector_ms_p50",
    "nixl_connector_ms_worst", "ratio_nixl_connector", "ratio_worst",
}  # fmt: skip
KEYS = {"cases", "hooks_us_p50", "hooks_us", "missed", "data_paths", "spinning", "repeats", "machine", "versions"}


def shown(capsys: pytest.CaptureFixture[str], *cases: Case, hooks: Any = HOOKS, as_json: bool = True) -> str:
    options = Namespace(json=as_json, data_paths=["cma", "nixl"], spinning="own", repeats=15)
    show(options, {"cores": 2}, cases, hooks)
    return capsys.readouterr().out


def test_the_result_has_exactly_these_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, CASE))
    assert found.keys() == KEYS
    (case,) = found["cases"]
    assert case.keys() == CASE_KEYS
    said = {"measure": "first_token", "prompt_tokens": 900, "concurrency": 8, "ms_p50": 12.5, "ms_worst": 20.0}
    assert case.items() >= (said | {"ratio_nixl_connector": 0.5}).items()
    assert (found["hooks_us_p50"], found["missed"]) == (40.0, [])


def test_hooks_that_were_not_measured_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(shown(capsys, CASE, hooks={}))["hooks_us_p50"] is None


def test_what_is_not_as_wanted_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(CASE, ratio_nixl_connector=1.2), replace(CASE, measure="router", ratio_worst=3.0)
    found = json.loads(shown(capsys, CASE, *slow, hooks={KVGRPC: {"all": 140.0}}))["missed"]
    assert [text.partition(" ")[0] for text in found] == ["first_token", "router", "hooks:"]


def test_a_person_gets_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, CASE, as_json=False).splitlines()
    assert lines[:2] == [HEAD, line(CASE)]
    assert "everything is as wanted" in lines
