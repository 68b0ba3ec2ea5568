"""`kvgrpc demo` as a process: two servers, two engines, a router, and one engine that does both to compare with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 150.0
"""Seconds on an idle machine; it imports torch three times."""
PHASES = {"queue", "handshake", "open", "wire", "settle"}
pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


def demo(*flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and what it said."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVGRPC_", "OTEL_"))}
    done = subprocess.run(
        [sys.executable, "-m", "kvgrpc", "demo", "--json", *flags],
        cwd=ROOT, env=clean, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, said


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


def test_the_tokens_are_those_of_one_engine_and_nothing_is_left_behind() -> None:
    code, said = demo()
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


@pytest.mark.slow
def test_swapped_grants_give_nobody_any_token() -> None:
    """The router swaps grant and key together: only the content tells whose KV it is."""
    code, said = demo("--swap-grants")
    assert code == 1
    assert said["identical"] is False
    assert len(said["prompts"]) == 2
    for prompt in said["prompts"]:
        assert "CONTENT_MISMATCH" in prompt["error"]
        assert (prompt["tokens_equal"], prompt["blocks"], prompt["bytes"]) == (False, 0, 0)
    check_clean(said)


@pytest.mark.slow
def test_a_corrupted_block_makes_the_comparison_fail() -> None:
    code, said = demo("--corrupt-block")
    assert code == 1
    assert said["identical"] is False
    assert not any(prompt["tokens_equal"] for prompt in said["prompts"])
    assert [prompt["error"] for prompt in said["prompts"]] == [""] * 5
    check_clean(said)


@pytest.mark.slow
@pytest.mark.parametrize("data_path", ["cma", "nixl"])
def test_every_data_path_gives_the_same_tokens(data_path: str) -> None:
    code, said = demo("--datapath", data_path)
    check_identical(said, code, data_path)
