"""`make router-test` before real servers: every request is answered with one engine's tokens, and its KV comes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ROUTERS = ("vllm-router", "examples/router, push")
RUN_S = 600.0


@pytest.fixture(scope="module", params=["auto", "tensors"])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the output of the run, with engines of one mode."""
    folder = tmp_path_factory.mktemp("routers")
    command = [sys.executable, "-m", "bench.routers", "--json", "--folder", str(folder)]
    asked = ["--routers", *ROUTERS, "--modes", request.param]
    done = subprocess.run(
        command + asked, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False, env=None
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(RUN_S)
def test_every_request_behind_a_router_is_answered_as_by_one_engine_and_its_kv_comes(result: dict[str, Any]) -> None:
    assert [row["router"] for row in result["rows"]] == list(ROUTERS)
    for row in result["rows"]:
        assert row["answers"] == row["sent"] > 0, row
        assert (row["wrong"], row["errors"], row["loaded"]) == (0, 0, 1.0), row
        assert row["refused"] == "2 of 2", row
        assert not row["held"], row
