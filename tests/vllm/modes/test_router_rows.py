"""`make router-test`, for two routers: what it asks is answered as one engine answers it, with the KV of prefill."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.routers.kinds import AUTO, TENSORS
from tests.vllm.engines import ROOT

START_S = 600.0
"""Three servers start, two of them at once."""
ROUTERS = ("vllm-router", "examples/router, push")


@pytest.mark.timeout(START_S)
@pytest.mark.parametrize("mode", [AUTO, TENSORS])
def test_whatever_is_asked_through_a_router_has_the_kv_of_prefill_and_leaves_nothing(tmp_path: Path, mode: str) -> None:
    command = [
        sys.executable, "-m", "bench.routers", "--json", "--routers", *ROUTERS, "--modes", mode,
        "--folder", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["router"] for row in rows] == list(ROUTERS)
    for row in rows:
        found = row["answers"], row["wrong"], row["errors"], row["loaded"], row["refused"], row["held"]
        assert found == (row["sent"], 0, 0, 1.0, "2 of 2", {}), done.stderr
