"""A short storm of `make storm`: bursts, hang-ups, and pools that are too small for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engines import ROOT

START_S = 480.0
"""Timeout in seconds. Three servers start, two of them at once."""


@pytest.mark.timeout(START_S)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_storm_gives_no_wrong_token_and_leaves_no_block_held(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-m", "bench.storm", "--json", "--requests", "30", "--seed", "3", "--mode", mode]
    command += ["--connector", "kvgrpc", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["kvgrpc"]
    assert (found["sent"], found["wrong"], found["held"]) == (30, 0, 0), found
    assert found["statuses"].keys() <= {"200", "hung up"}, found
    assert found["answers"] >= 10, found
