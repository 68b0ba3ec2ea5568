"""Engines of two ranks, each with a store and its share of the heads, and engines with latents instead of heads."""

from contextlib import closing

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import MAX_TOKENS, START_S, Engines, prompt_of
from tests.vllm.models.latents import write_model
from tests.vllm.tensors.pairs import LONG, TensorPair

pytestmark = pytest.mark.timeout(START_S)


def test_every_rank_takes_its_share_and_the_tokens_are_those_of_one_engine(engines: Engines) -> None:
    more = {"tensor_parallel_size": 2, "dtype": "float32"}
    with closing(TensorPair(engines, "get", more=more, store_bytes=8 << 20)) as pair:
        pair.start()
        for length in (20, LONG):
            prompt = prompt_of(length, seed=3)
            expected, before = pair.expected(prompt), received(pair.d)
            assert pair.moved(prompt).tokens == expected
            assert received(pair.d) - before == length - 1
        pair.at_rest()


def test_latents_give_the_tokens_of_one_engine(engines: Engines) -> None:
    """The prompt ends with a token that the other engine decoded: see models/test_latents.py."""
    folder = engines.folder / "latents"
    if not folder.exists():
        write_model(folder)
    more = {"model": str(folder), "dtype": "float32", "attention_config": {"backend": "CPU_MLA"}}
    with closing(TensorPair(engines, "put_async", more=more, store_bytes=8 << 20)) as pair:
        pair.start()
        for length in (20, 160):
            prompt = prompt_of(length - 1, seed=31)
            decoded, *expected = pair.p.ask(prompt, None, 1 + MAX_TOKENS).tokens
            prompt.append(decoded)
            before = received(pair.d)
            assert pair.both(prompt).tokens == expected
            assert received(pair.d) - before == length - 1
        pair.at_rest()
