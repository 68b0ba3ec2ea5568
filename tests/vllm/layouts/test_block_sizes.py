"""Engines with different block sizes exchange KV: the tokens are those of one engine."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import CHUNK_TOKENS, MAX_TOKENS, START_S, Engines, Pair, prompt_of, wait_until, write_model
from tests.vllm.models.splits import STAGES, TWO
from tests.vllm.models.windows import MODELS, write_model as write_windows

pytestmark = pytest.mark.timeout(START_S)

LENGTHS = [20, 97, 2 * CHUNK_TOKENS + 77]
PAIRS: dict[str, dict[str, dict[str, Any]]] = {
    "128-to-32": {"P": {"block_size": 128}, "D": {"block_size": 32}},
    "32-to-96": {"P": {"block_size": 32}, "D": {"block_size": 96}},
    "two-ranks-of-64-to-32": {"P": {**TWO, "block_size": 64}, "D": {"block_size": 32}},
    "32-to-stages-of-64": {"P": {"block_size": 32}, "D": {**STAGES, "block_size": 64}},
}


@pytest.fixture(scope="module", params=PAIRS)
def unlike(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    """Yields engines in float32: bfloat16 would round differently on two ranks and give other tokens."""
    folder = engines.folder / "sizes"
    if not folder.exists():
        write_model(folder)
    more = {"model": str(folder), "dtype": "float32"}
    each = PAIRS[request.param]
    with closing(Pair(engines, more=more, each=each, data_paths=["cma"], layers_per_part=1, offer_ttl_s=60.0)) as pair:
        pair.start()
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_blocks_of_other_sizes_give_the_tokens_of_one_engine(unlike: Pair, mode: str, length: int) -> None:
    prompt = prompt_of(length, seed=7)
    expected, before = unlike.expected(prompt), received(unlike.d)
    answer = unlike.pull(prompt) if mode == "pull" else unlike.push(prompt)
    assert answer.tokens == expected, answer
    assert received(unlike.d) - before == length
    unlike.at_rest()


def test_a_prefix_that_decode_has_does_not_come_again_and_the_next_turn_goes_back(unlike: Pair) -> None:
    shared = prompt_of(300, seed=8)
    prompt = [*shared, *prompt_of(50, seed=9)]
    tokens = unlike.expected(prompt)
    turn = [*prompt, *tokens, *prompt_of(30, seed=10)]
    expected = [unlike.expected(some) for some in (shared, prompt, turn)]
    assert unlike.pull(shared).tokens == expected[0]
    before = received(unlike.d)
    answer = unlike.pull(prompt)
    assert answer.tokens == expected[1]
    assert 50 <= received(unlike.d) - before < 50 + 128, "but what whole blocks of decode hold"
    wait_until(unlike.p.rests)
    before = received(unlike.p)
    params = unlike.p.ask(turn, answer.params, 1).params
    assert received(unlike.p) - before == len(prompt) + MAX_TOKENS - 1
    assert unlike.d.ask(turn, params).tokens == expected[2]
    unlike.at_rest()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_windows_in_blocks_of_other_sizes_give_the_tokens_of_one_engine(engines: Engines, mode: str) -> None:
    folder, model = engines.folder / f"sizes-windows-{mode}", MODELS["alternating"]
    write_windows(folder, model)
    more = {"model": str(folder), "dtype": "float32", "disable_hybrid_kv_cache_manager": False}
    each = {"P": {"block_size": 64 if mode == "pull" else 32}, "D": {"block_size": 32 if mode == "pull" else 64}}
    with closing(Pair(engines, more=more, each=each, data_paths=["cma"])) as pair:
        pair.start()
        for length in (20, 191, 589):
            prompt = prompt_of(length, seed=91)
            expected, before = pair.expected(prompt), received(pair.d)
            answer = pair.pull(prompt) if mode == "pull" else pair.push(prompt)
            assert answer.tokens == expected, answer
            assert received(pair.d) - before == length
            pair.at_rest()


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "auto"])
def test_blocks_of_small_elements_give_the_tokens_of_one_engine(engines: Engines, cache_dtype: str) -> None:
    each = {"P": {"block_size": 96}, "D": {"block_size": 32}}
    more = {"kv_cache_dtype": cache_dtype}
    with closing(Pair(engines, more=more, each=each, data_paths=["nixl"])) as pair:
        pair.start()
        prompt = prompt_of(589, seed=92)
        expected, before = pair.expected(prompt), received(pair.d)
        assert pair.pull(prompt).tokens == expected
        pair.at_rest()  # nothing of it stays cached
        assert pair.push(prompt).tokens == expected
        assert received(pair.d) - before == 2 * len(prompt)
        pair.at_rest()
