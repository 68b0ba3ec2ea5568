"""examples/transformers: a cache that was moved as named tensors, while it was computed, gives the same tokens."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(300)
def test_two_processes_say_the_tokens_of_one() -> None:
    pytest.importorskip("transformers", reason="transformers is in the environment of engines only: make vllm")
    program = [sys.executable, "-m", "examples.transformers"]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("the same\n")
