"""Engines with different numbers of tensor-parallel ranks."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.sglang.servers import NO_TOKENIZER, RANKS, Pair, Server, ids_of, prompt_of

pytestmark = pytest.mark.skipif(RANKS != 1, reason="SGLANG_RANKS: all engines have as many")
LENGTHS = (1, 15, 16, 17, 33, 200, 300, 700)
FLAGS = (*NO_TOKENIZER, "--dtype", "float32")
"""With a type in which sums of two ranks change no token."""
TWO = ("--tp", "2")
ON_PROCESSORS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}


@pytest.fixture(scope="module")
def unequal(folder: Path) -> Iterator[tuple[Pair, Pair]]:
    """Yields a pair whose decode has two ranks, and one whose prefill has, beside an engine that does both."""
    with ExitStack() as stack:
        p, d, one = (
            Server(f"fp32-{name}", folder, mode, 16, FLAGS)
            for name, mode in (("P", "prefill"), ("D", "decode"), ("one", ""))
        )
        p2 = Server("P2", folder, "prefill", 16, (*FLAGS, *TWO), **ON_PROCESSORS)
        d2 = Server("D2", folder, "decode", 16, (*FLAGS, *TWO), **ON_PROCESSORS)
        for server in (p, d, one, p2, d2):
            stack.callback(server.stop)
            server.start()
        for server in (p, d, one, p2, d2):
            server.wait()
        yield Pair(p, d2, one), Pair(p2, d, one)


@pytest.mark.parametrize("number", [0, 1], ids=["one-to-two", "two-to-one"])
def test_engines_with_other_numbers_of_ranks_answer_with_the_tokens_of_one_engine(
    unequal: tuple[Pair, Pair], number: int
) -> None:
    pair = unequal[number]
    for length in LENGTHS:
        prompt = prompt_of(length, seed=5000 + length)
        assert ids_of(pair.generate(prompt, 12)) == ids_of(pair.of_one(prompt, 12)), length
    pair.check_whole_memory(seed=5)
