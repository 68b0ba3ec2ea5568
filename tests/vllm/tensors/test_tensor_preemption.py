"""Engines with few blocks, which preempt, and without a prefix cache, so that a preempted request begins anew."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.vllm.engines import BLOCK_TOKENS, Engine, Engines, prompt_of, wait_until
from tests.vllm.tensors.pairs import TensorPair, stored

GROWING, GROWS_BY = 8, 150
"""Number of growing requests, and their final tokens: each alone is small, all together take every block."""
LONG = 28 * BLOCK_TOKENS + 5
"""Tokens of a prompt that fits beside them only while they are short."""


@pytest.fixture(scope="module")
def small_engines(engines: Engines) -> Iterator[TensorPair]:
    more = {"num_gpu_blocks_override": 48, "max_num_batched_tokens": 24, "max_model_len": 1024}
    more["enable_prefix_caching"] = False
    with closing(
        TensorPair(engines, "put_async", more=more, part_tokens=2 * BLOCK_TOKENS, store_bytes=8 << 20)
    ) as pair:
        yield pair


@pytest.fixture
def small(small_engines: TensorPair) -> Iterator[TensorPair]:
    small_engines.start()
    yield small_engines
    small_engines.at_rest()


def crowded(engine: Engine) -> list[int]:
    """Begins requests that grow, and waits until all are under way."""
    before = engine.counts().get("new_tokens", 0)
    lines = [engine.begin(prompt_of(20, 300 + seed), None, GROWS_BY) for seed in range(GROWING)]
    wait_until(lambda: engine.counts()["new_tokens"] - before >= GROWING)
    return lines


def test_a_preempted_prefill_puts_what_it_had_not_put(small: TensorPair) -> None:
    prompt = prompt_of(LONG, seed=310)
    expected, before = small.expected(prompt), small.p.counts().get("preempted_prefills", 0)
    growing = crowded(small.p)
    legs = small.begin_both(prompt)
    wait_until(lambda: stored(small.d)["tensors"] > 0)
    assert small.d.answer(legs["D"]).tokens == expected
    assert small.p.counts()["preempted_prefills"] > before
    assert not small.p.answer(legs["P"]).failed
    assert [len(small.p.answer(line).tokens) for line in growing] == [GROWS_BY] * GROWING


def test_an_answer_that_is_preempted_after_its_load_has_the_tokens_of_one_engine(small: TensorPair) -> None:
    prompt, before = prompt_of(20 * BLOCK_TOKENS, seed=320), small.d.counts().get("preempted", 0)
    expected = small.p.ask(prompt, None, GROWS_BY).tokens
    growing = crowded(small.d)
    legs = small.begin_both(prompt, max_tokens=GROWS_BY)
    assert small.d.answer(legs["D"]).tokens == expected
    assert not small.p.answer(legs["P"]).failed
    assert small.d.counts()["preempted"] > before
    assert [len(small.d.answer(line).tokens) for line in growing] == [GROWS_BY] * GROWING
