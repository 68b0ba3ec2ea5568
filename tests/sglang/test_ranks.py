"""Engines with different numbers of tensor-parallel ranks."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sglang.servers import RANKS, Pair, Server, ids_of, prompt_of

pytestmark = pytest.mark.skipif(RANKS != 1, reason="SGLANG_RANKS: all engines have as many")
LENGTHS = (1, 16, 17, 300, 700)
TWO = ("--tp", "2")
ON_PROCESSORS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}


@pytest.fixture(scope="module")
def of_two(folder: Path) -> Iterator[tuple[Server, Server]]:
    """Yields prefill and decode of two ranks each."""
    with ExitStack() as stack:
        servers = (
            Server("P2", folder, "prefill", 16, TWO, **ON_PROCESSORS),
            Server("D2", folder, "decode", 16, TWO, **ON_PROCESSORS),
        )
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait()
        yield servers


def test_one_rank_prefills_for_two_and_two_for_one_with_the_tokens_of_one_engine(
    pair: Pair, of_two: tuple[Server, Server]
) -> None:
    p, d = of_two
    for unequal in (replace(pair, d=d), replace(pair, p=p)):
        for length in LENGTHS:
            prompt = prompt_of(length, seed=5000 + length)
            assert ids_of(unequal.generate(prompt, 12)) == ids_of(pair.of_one(prompt, 12)), length
        unequal.check_whole_memory(seed=5)
