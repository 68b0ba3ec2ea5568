"""`kvgrpc demo`: two servers, two engines, a router, and one engine that does both to compare with.

Starting all of it is what takes time, so the runs that every change needs share one set of processes. They come in an
order: what a run leaves at D, the next one finds there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.cli.demo import report
from kvgrpc.demo import run as demo_run
from kvgrpc.demo.processes import DemoFailed
from kvgrpc.demo.run import Options, Result, Stage, started

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 150.0
"""Seconds on an idle machine; it imports torch three times."""
PHASES = {"queue", "handshake", "open", "wire", "settle"}
pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)
Capture = pytest.CaptureFixture[str]


def check_clean(said: dict[str, Any]) -> None:
    """Nothing is left at either server."""
    assert (said["leases_left"], said["pinned_blocks_left"]) == (0, 0)


def check_identical(said: dict[str, Any], code: int, data_path: str) -> None:
    check_clean(said)
    assert [prompt["error"] for prompt in said["prompts"]] == [""] * 5
    assert all(prompt["tokens_equal"] for prompt in said["prompts"])
    assert {prompt["datapath"] for prompt in said["prompts"]} == {data_path}
    assert said["identical"] is True
    assert code == 0


def reported(result: Result, capsys: Capture) -> tuple[int, dict[str, Any]]:
    """Exit code and what is said with --json."""
    code = report(result, as_json=True)
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, said


def check_swapped(result: Result, capsys: Capture) -> None:
    """The router swapped grant and key together: only the content tells whose KV it is. Nobody gets any token."""
    code, said = reported(result, capsys)
    assert (code, said["identical"], len(said["prompts"])) == (1, False, 2)
    for prompt in said["prompts"]:
        assert "CONTENT_MISMATCH" in prompt["error"]
        assert (prompt["tokens_equal"], prompt["blocks"], prompt["bytes"]) == (False, 0, 0)
    check_clean(said)


def check_plain(result: Result, capsys: Capture) -> None:
    """The tokens are those of one engine, every number is said, and nothing is left behind."""
    code, said = reported(result, capsys)
    check_identical(said, code, "shm")
    assert set(said) == {"identical", "prompts", "leases_left", "pinned_blocks_left", "trace_id"}
    assert len(bytes.fromhex(said["trace_id"])) == 16
    for prompt in said["prompts"]:
        assert set(prompt) == {
            "name", "tokens_equal", "prompt_tokens", "blocks", "bytes", "datapath", "ms", "error",
        }  # fmt: skip
        assert set(prompt["ms"]) == PHASES
        assert prompt["ms"]["wire"] > 0
        assert prompt["prompt_tokens"] > 0
    shorter_than_a_block, two_blocks, ragged, long, held = said["prompts"]
    assert shorter_than_a_block["blocks"] == 1
    assert (two_blocks["prompt_tokens"], two_blocks["blocks"]) == (32, 2)
    assert ragged["blocks"] == -(-ragged["prompt_tokens"] // 16)
    assert long["bytes"] == long["blocks"] * two_blocks["bytes"] // 2
    # Most of it was at D already.
    assert held["prompt_tokens"] > long["prompt_tokens"]
    assert held["blocks"] < 5


def check_shown(result: Result, capsys: Capture) -> None:
    """For people it ends with the tree of one request: the router's span, under it both servers' and their phases."""
    assert report(result, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "identical: 5 of 5 prompts"
    tree = lines[lines.index(f"trace {result.trace_id}") + 1 : -2]
    depth = {text: line.index(text) for line in tree for text in NAMES if f" {text} " in line}
    assert set(depth) == set(NAMES)
    assert depth["request"] < depth["kvgrpc.send"] == depth["kvgrpc.receive"] < depth["wire"]
    (receive,) = (line for line in tree if "kvgrpc.receive" in line)
    assert "at D" in receive
    assert "bytes over shm" in receive


NAMES = ("request", "kvgrpc.send", "kvgrpc.receive", "wire")


def check_corrupted(result: Result, capsys: Capture) -> None:
    """A block that changed on its way makes every comparison fail."""
    code, said = reported(result, capsys)
    assert (code, said["identical"]) == (1, False)
    assert not any(prompt["tokens_equal"] for prompt in said["prompts"])
    assert [prompt["error"] for prompt in said["prompts"]] == [""] * 5
    check_clean(said)


async def check_no_trace(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that do not come are an error, not an empty tree."""
    monkeypatch.setattr(demo_run, "SPANS", frozenset({"kvgrpc.send", "never sent"}))
    monkeypatch.setattr(demo_run, "SPANS_TIMEOUT_S", 0.5)
    with pytest.raises(DemoFailed, match="never sent"):
        await stage.run(Options(swap_grants=True))


async def test_equal_tokens_prove_that_the_right_kv_came_unchanged_and_nothing_else_gives_them(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started("auto") as stage:
        check_swapped(await stage.run(Options(swap_grants=True)), capsys)
        plain = await stage.run(Options())
        check_plain(plain, capsys)
        check_shown(plain, capsys)
        check_corrupted(await stage.run(Options(corrupt=True)), capsys)
        await check_no_trace(stage, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("data_path", ["shm", "cma", "nixl"])
def test_every_data_path_gives_the_same_tokens(data_path: str) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVGRPC_", "OTEL_"))}
    done = subprocess.run(
        [sys.executable, "-m", "kvgrpc", "demo", "--json", "--datapath", data_path],
        cwd=ROOT, env=clean, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    check_identical(json.loads(done.stdout), done.returncode, data_path)
