"""Engines with few blocks, which preempt, and without a prefix cache, so that a preempted request begins anew.

They push layer by layer, and compute a prompt in many small steps.
"""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import BLOCK_TOKENS, DATA_PATHS, PREFILL, Engine, Engines, Pair, prompt_of, wait_until

BLOCKS = 48
GROWING, GROWS_BY = 8, 150
"""Number of growing requests, and their final tokens: each alone is small, all together take every block."""
LONG = 28 * BLOCK_TOKENS + 5
"""Tokens of a prompt that fits beside them only while they are short."""


@pytest.fixture(scope="module", params=DATA_PATHS)
def small_engines(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    more = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 24, "max_model_len": 1024}
    more["enable_prefix_caching"] = False
    with closing(Pair(engines, more=more, data_paths=[request.param], offer_ttl_s=60.0, layers_per_part=1)) as pair:
        yield pair


@pytest.fixture
def small(small_engines: Pair) -> Iterator[Pair]:
    small_engines.start()
    yield small_engines
    small_engines.at_rest()


def crowded(engine: Engine) -> list[int]:
    """Begins requests that grow, and waits until all are under way."""
    before = engine.counts().get("new_tokens", 0)
    lines = [engine.begin(prompt_of(20, 300 + seed), None, GROWS_BY) for seed in range(GROWING)]
    wait_until(lambda: engine.counts()["new_tokens"] - before >= GROWING)
    return lines


def preemptions(engine: Engine) -> int:
    return engine.counts().get("preempted", 0)


@pytest.mark.parametrize("first", ["P", "D"])
def test_a_push_whose_prefill_is_preempted_gives_the_tokens_of_one_engine(small: Pair, first: str) -> None:
    prompt = prompt_of(LONG, seed=310)
    expected, before = small.expected(prompt), small.p.counts().get("preempted_prefills", 0)
    growing = crowded(small.p)
    legs = small.begin_push(prompt, first=first)
    wait_until(lambda: "pinned_block_count" in small.p.held(), small.p.held)  # its first part is handed over
    assert small.d.answer(legs["D"]).tokens == expected
    assert small.p.counts()["preempted_prefills"] > before
    assert not small.p.answer(legs["P"]).failed
    assert [len(small.p.answer(line).tokens) for line in growing] == [GROWS_BY] * GROWING


@pytest.mark.parametrize("push", [True, False])
def test_an_answer_that_is_preempted_after_its_kv_came_has_the_tokens_of_one_engine(small: Pair, push: bool) -> None:
    prompt, before = prompt_of(20 * BLOCK_TOKENS, seed=320), preemptions(small.d)
    expected = small.p.ask(prompt, None, GROWS_BY).tokens
    growing = crowded(small.d)
    if push:
        legs = small.begin_push(prompt, max_tokens=GROWS_BY)
        assert not small.p.answer(legs["P"]).failed
        answer = small.d.answer(legs["D"])
    else:
        answer = small.d.ask(prompt, small.prefilled(prompt), GROWS_BY)
    assert answer.tokens == expected
    assert preemptions(small.d) > before
    assert [len(small.d.answer(line).tokens) for line in growing] == [GROWS_BY] * GROWING


@pytest.mark.parametrize("length", [5, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1, 300])
@pytest.mark.parametrize("push", [True, False])
def test_without_a_prefix_cache_and_by_layers_tokens_are_the_same(small: Pair, length: int, push: bool) -> None:
    prompt = prompt_of(length, seed=330)
    expected, before = small.expected(prompt), received(small.d)
    answer = small.push(prompt) if push else small.pull(prompt)
    assert answer.tokens == expected
    assert received(small.d) - before == length


def test_without_a_prefix_cache_the_next_turn_takes_its_history_from_the_engine_that_decoded(small: Pair) -> None:
    prompt = prompt_of(5 * BLOCK_TOKENS, seed=340)
    expected = small.expected(prompt)
    turn = [*prompt, *expected, *prompt_of(40, seed=341)]
    expected_then = small.expected(turn)
    answer, before = small.pull(prompt), small.p.counts().get("external_hits", 0)
    relayed = small.p.ask(turn, {**PREFILL, **answer.params}, 1)
    assert small.p.counts()["external_hits"] - before == len(prompt) + len(expected) - 1
    assert small.d.ask(turn, relayed.params).tokens == expected_then
