"""MLA: each token has one latent vector for all heads, and every rank has it."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import BLOCK_TOKENS, MAX_TOKENS, START_S, Engines, Pair, prompt_of
from tests.vllm.models.latents import write_model

pytestmark = pytest.mark.timeout(START_S)

LENGTHS = [20, 5 * BLOCK_TOKENS, 333]


PAIRS: dict[str, dict[str, dict[str, Any]]] = {
    "one-rank": {},
    "two-ranks": {name: {"tensor_parallel_size": 2} for name in "PD"},
    "blocks-of-64-to-32": {"P": {"block_size": 64}, "D": {"block_size": 32}},
    "blocks-of-32-to-64": {"P": {"block_size": 32}, "D": {"block_size": 64}},
}
"""Pairs with equal numbers of ranks only: with others this model's tokens differ in vLLM itself."""


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    folder = engines.folder / "latents"
    if not folder.exists():
        write_model(folder)
    more: dict[str, Any] = {"model": str(folder), "dtype": "float32", "max_num_batched_tokens": 2048}
    more["attention_config"] = {"backend": "CPU_MLA"}
    with closing(Pair(engines, more=more, each=PAIRS[request.param], layers_per_part=1)) as pair:
        pair.start()
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_latents_give_the_tokens_of_one_engine(pair: Pair, mode: str, length: int) -> None:
    """vLLM's prefill and decode kernels for processors do not agree, and an engine that takes the KV decodes the last
    token of its prompt. So the prompt ends with a token that the other engine decoded.
    """
    prompt = prompt_of(length - 1, seed=31)
    decoded, *expected = pair.p.ask(prompt, None, 1 + MAX_TOKENS).tokens
    before = received(pair.d)
    prompt.append(decoded)
    answer = pair.pull(prompt) if mode == "pull" else pair.push(prompt)
    assert answer.tokens == expected, answer
    assert received(pair.d) - before == length
    pair.at_rest()
