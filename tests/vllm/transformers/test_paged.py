"""examples/transformers: engines on continuous batching move blocks, say the tokens of one, and keep their promises."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.testing import PROMISES, Counterpart, play

ROOT = Path(__file__).resolve().parents[3]
MISSING = "transformers is in the environment of engines only: make vllm"


@pytest.mark.timeout(300)
def test_two_paged_engines_say_the_tokens_of_one() -> None:
    pytest.importorskip("transformers", reason=MISSING)
    program = [sys.executable, "-m", "examples.transformers.blocks"]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("the same\n") == 3


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[Any, Counterpart]]:
    pytest.importorskip("transformers", reason=MISSING)
    from tests.vllm.transformers.paged_adapter import PagedAdapter

    with PagedAdapter() as engine, Counterpart(engine.engine) as other:
        yield engine, other


@pytest.mark.parametrize("promise", PROMISES)
def test_the_paged_engine_keeps_its_promises(promise: str, played: tuple[Any, Counterpart]) -> None:
    play(promise, *played)
