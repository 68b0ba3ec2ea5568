"""The demo: two servers, two engines, a router, and one engine that does both, for comparison.

The start takes most of the time, so the tests share one set of processes. Every run begins with empty caches.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from examples.demo import run
from examples.demo.__main__ import app
from examples.demo.command import report
from examples.demo.processes import DemoFailed
from examples.demo.results import Left, Options, PromptResult, Result
from examples.demo.run import Stage, started

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 150.0
"""Timeout in seconds. An idle machine takes a few; the demo imports torch three times."""
PHASES = {"queue", "handshake", "open", "wire", "settle"}
PUSH = Options(push=True)
LAYERWISE = Options(push=True, layerwise=True)
NAMES = ["short", "two blocks", "ragged", "long", "prefix held"]
pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)
on_stage = pytest.mark.asyncio(loop_scope="module")
Capture = pytest.CaptureFixture[str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    async with started("auto") as found:
        yield found


def check_clean(said: dict[str, Any]) -> None:
    """Checks that nothing is left at either server, nor in either engine."""
    assert (said["leases_left"], said["pinned_blocks_left"], said["used_blocks_left"]) == (0, 0, 0)


def check_identical(said: dict[str, Any], code: int, data_path: str) -> None:
    """Checks that every token is that of one engine and nothing is left behind."""
    check_clean(said)
    served = said["prompts"] + said["chat"]["turns"]
    assert [one["error"] for one in served] == [""] * len(served)
    assert all(one["tokens_equal"] for one in served)
    assert {one["datapath"] for one in served} == {data_path}
    assert len(said["chat"]["turns"]) == 3
    assert said["identical"] is True
    assert code == 0


def check_chat(said: dict[str, Any]) -> None:
    """Checks that P takes what it lacks from D only after a long reply, and that D then lacks little."""
    first, second, third = said["chat"]["turns"]
    assert (first["offered_tokens"], first["pulled_tokens"], first["lease_renewals"]) == (0, 0, 0)
    for turn, before in ((second, first), (third, second)):
        lacking = turn["offered_tokens"] - turn["held_tokens"]
        pays_off = lacking >= turn["recompute_tokens"]
        assert lacking > 0
        assert turn["pulled_tokens"] == (lacking if pays_off else 0)
        assert before["prompt_tokens"] < turn["offered_tokens"] < turn["prompt_tokens"]
        assert turn["lease_renewals"] > 0
        # D has its own reply and everything before it, so only the rest moves.
        assert turn["blocks"] <= -(-turn["prompt_tokens"] // 16) - turn["offered_tokens"] // 16
    assert second["pulled_tokens"] > 0
    assert third["pulled_tokens"] == 0


def check_blocks(said: dict[str, Any]) -> None:
    """Checks that exactly the blocks which the destination lacked moved."""
    short, two_blocks, ragged, long, held = said["prompts"][:5]
    assert short["blocks"] == 1
    assert (two_blocks["prompt_tokens"], two_blocks["blocks"]) == (32, 2)
    assert ragged["blocks"] == -(-ragged["prompt_tokens"] // 16)
    assert long["bytes"] == long["blocks"] * two_blocks["bytes"] // 2
    # D already had most of it.
    assert held["prompt_tokens"] > long["prompt_tokens"]
    assert held["blocks"] < 5


def reported(result: Result, capsys: Capture) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the output of --json."""
    code = report(result, as_json=True)
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, said


def shown(result: Result, capsys: Capture) -> list[str]:
    """Returns the readable lines."""
    assert report(result, as_json=False) == 0
    return capsys.readouterr().out.splitlines()


@on_stage
async def test_pulled_kv_gives_the_tokens_of_one_engine(stage: Stage, capsys: Capture) -> None:
    result = await stage.run(Options())
    code, said = reported(result, capsys)
    check_identical(said, code, "shm")
    left = {"leases_left", "pinned_blocks_left", "used_blocks_left"}
    assert set(said) == {"identical", "mode", "layerwise", "prompts", "visible_ratio", "chat", "trace_id", *left}
    assert (said["mode"], said["layerwise"], said["visible_ratio"]) == ("pull", False, None)
    assert len(bytes.fromhex(said["trace_id"])) == 16
    assert [prompt["name"] for prompt in said["prompts"]] == NAMES
    for prompt in said["prompts"]:
        times = {"ms", "visible_ms", "whole_visible_ms"}
        assert set(prompt) == {"name", "tokens_equal", "prompt_tokens", "blocks", "bytes", "datapath", "error", *times}
        assert set(prompt["ms"]) == PHASES
        assert prompt["visible_ms"] > prompt["ms"]["wire"] > 0
        assert prompt["prompt_tokens"] > 0
    check_blocks(said)
    check_chat(said)
    check_shown(result, shown(result, capsys))


def check_shown(result: Result, lines: list[str]) -> None:
    """Checks that the readable output ends with the tree of one request: the router's span over both servers'."""
    assert lines[-1] == "identical: 8 of 8 prompts"
    tree = lines[lines.index(f"trace {result.trace_id}") + 1 : -2]
    names = ("request", "kvgrpc.send", "kvgrpc.receive", "kvgrpc.wire")
    depth = {text: line.index(text) for line in tree for text in names if f" {text} " in line}
    assert set(depth) == set(names)
    assert depth["request"] < depth["kvgrpc.send"] == depth["kvgrpc.receive"] < depth["kvgrpc.wire"]
    (receive,) = (line for line in tree if "kvgrpc.receive" in line)
    assert "at D" in receive
    assert "bytes over shm" in receive


@on_stage
async def test_pushed_kv_gives_the_tokens_of_one_engine(stage: Stage, capsys: Capture) -> None:
    code, said = reported(await stage.run(PUSH), capsys)
    check_identical(said, code, "shm")
    assert (said["mode"], said["layerwise"], said["visible_ratio"]) == ("push", False, None)
    assert [prompt["name"] for prompt in said["prompts"]] == NAMES
    for prompt in said["prompts"]:
        assert set(prompt["ms"]) == {"rendezvous", "queue", "wire", "settle"}
        assert prompt["visible_ms"] > prompt["ms"]["wire"] > 0
        assert prompt["whole_visible_ms"] is None
    check_blocks(said)
    check_chat(said)


@on_stage
async def test_layers_pushed_as_they_are_computed_give_the_same_tokens(stage: Stage, capsys: Capture) -> None:
    result = await stage.run(LAYERWISE)
    code, said = reported(result, capsys)
    check_identical(said, code, "shm")
    assert (said["mode"], said["layerwise"]) == ("push", True)
    assert said["visible_ratio"] > 0
    assert [prompt["name"] for prompt in said["prompts"]] == [*NAMES, "pages"]
    for prompt in said["prompts"]:
        assert min(prompt["visible_ms"], prompt["whole_visible_ms"]) > 0
    check_blocks(said)
    check_chat(said)
    # One line reports the gain, whether there is one or not.
    lines = shown(result, capsys)
    assert sum(line.startswith(("by layer ", "no gain by layer ")) for line in lines) == 1


@on_stage
@pytest.mark.parametrize("push", [False, True], ids=["pulled", "pushed"])
async def test_requests_with_swapped_grants_fail_without_a_token(stage: Stage, push: bool, capsys: Capture) -> None:
    """The router swaps grant and key together, so only the content shows whose KV it is."""
    code, said = reported(await stage.run(Options(push=push, swap_grants=True)), capsys)
    assert (code, said["identical"], len(said["prompts"])) == (1, False, 2)
    for prompt in said["prompts"]:
        assert prompt["error"].startswith("CONTENT_")
        assert (prompt["tokens_equal"], prompt["blocks"], prompt["bytes"]) == (False, 0, 0)
    check_clean(said)


@on_stage
async def test_a_line_says_what_was_done_when_it_was_done(stage: Stage) -> None:
    said: list[str] = []
    result = await stage.run(Options(), said.append)
    served = [*result.prompts, *(turn.served for turn in result.chat)]
    assert said[: len(served)] == [one.as_line() for one in served]
    assert said[0] == "short: 11 tokens, 1 block moved over shm, the same tokens as one engine"
    assert said[len(served)].startswith("waiting ")


def test_a_line_says_what_went_wrong() -> None:
    failed = PromptResult("p", 3, False, [], [], error="CONTENT_MISMATCH")
    assert failed.as_line() == "p: 3 tokens, failed: CONTENT_MISMATCH"
    assert PromptResult("p", 3, False, [1], [2]).as_line().endswith("NOT the tokens of one engine")


@on_stage
async def test_a_block_that_changed_on_its_way_shows_in_every_comparison(stage: Stage, capsys: Capture) -> None:
    code, said = reported(await stage.run(Options(corrupt=True)), capsys)
    assert (code, said["identical"]) == (1, False)
    assert not any(prompt["tokens_equal"] for prompt in said["prompts"])
    assert [prompt["error"] for prompt in said["prompts"]] == [""] * 5
    check_clean(said)


@on_stage
async def test_missing_spans_are_an_error_not_an_empty_tree(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SPANS", frozenset({"kvgrpc.send", "never sent"}))
    monkeypatch.setattr(run, "SPANS_TIMEOUT_S", 0.5)
    with pytest.raises(DemoFailed, match="never sent"):
        await stage.run(Options(swap_grants=True))


def test_the_ratio_is_that_of_medians_and_only_where_there_is_something_to_compare() -> None:
    def result(*times: tuple[float, float | None]) -> Result:
        prompts = [PromptResult("p", 1, True, [], [], visible_ms=a, whole_visible_ms=b) for a, b in times]
        return Result(LAYERWISE, prompts, [], Left(0, 0, 0), "", [])

    assert result((3.0, 6.0), (1.0, 2.0), (2.0, 90.0)).visible_ratio == 0.333
    assert result((3.0, None), (1.0, None)).visible_ratio is None


def test_layers_are_not_pulled() -> None:
    refused = CliRunner().invoke(app, ["--layerwise"])
    assert refused.exit_code == 2
    assert "--mode push" in " ".join(refused.output.replace("│", " ").split())


@pytest.mark.slow
@pytest.mark.parametrize("mode", [["--mode", "pull"], ["--mode", "push", "--layerwise"], ["--tls"]])
@pytest.mark.parametrize("data_path", ["shm", "cma", "nixl", "collective"])
def test_every_data_path_gives_the_same_tokens(data_path: str, mode: list[str]) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVGRPC_", "OTEL_"))}
    demo = [sys.executable, "-m", "examples.demo", "--json", "--datapath", data_path, *mode]
    done = subprocess.run(demo, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout, done.stderr
    assert done.stderr.startswith("starting two servers")
    assert "stopping all processes\n" in done.stderr
    check_identical(json.loads(done.stdout), done.returncode, data_path)
