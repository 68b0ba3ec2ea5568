"""Models with sliding windows in all or some layers: the tokens are those of one engine, and KV outside a window does
not move.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from tests.vllm.counts import moved, moved_since, received
from tests.vllm.engines import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    MAX_TOKENS,
    START_S,
    Engines,
    Pair,
    prompt_of,
    wait_until,
)
from tests.vllm.models.splits import ONE, STAGES, TWO
from tests.vllm.models.windows import MODELS, WINDOW, Model, write_model

pytestmark = pytest.mark.timeout(START_S)

LENGTHS = [20, WINDOW + 2 * BLOCK_TOKENS - 1, 2 * CHUNK_TOKENS + 77]
"""Lengths of prompts, in tokens. For the second one only the last token reads the window's first block."""
BLOCK_BYTES = 2 * 4 * BLOCK_TOKENS * 32 * 4
"""Bytes of a block of one layer, in float32."""


@dataclass(frozen=True)
class Windows:
    """Engines with such a model."""

    model: Model
    pair: Pair


@pytest.fixture(scope="module", params=MODELS)
def windows(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Windows]:
    model = MODELS[request.param]
    folder = engines.folder / f"windows-{request.param}"
    write_model(folder, model)
    more = {"model": str(folder), "dtype": "float32", "disable_hybrid_kv_cache_manager": False}
    with closing(Pair(engines, more=more, data_paths=[model.path], layers_per_part=1, offer_ttl_s=60.0)) as pair:
        pair.start()
        yield Windows(model, pair)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_is_read_of_each_window_moves_and_the_tokens_are_those_of_one_engine(
    windows: Windows, mode: str, length: int
) -> None:
    pair, prompt = windows.pair, prompt_of(length, seed=21)
    expected, before, known = pair.expected(prompt), received(pair.d), moved(pair.d)
    answer = pair.pull(prompt) if mode == "pull" else pair.push(prompt)
    assert answer.tokens == expected, answer
    assert received(pair.d) - before == length
    assert moved_since(pair.d, known) == [windows.model.blocks(length) * BLOCK_BYTES]
    pair.at_rest()


def test_what_decode_has_of_a_prompt_does_not_come_again(windows: Windows) -> None:
    """It has the window at the end of the first prompt, and so the window of the common prefix."""
    pair, shared = windows.pair, prompt_of(11 * BLOCK_TOKENS, seed=40)
    prompts = [shared + prompt_of(count, seed=41 + count) for count in (6, 70)]
    expected = [pair.expected(prompt) for prompt in prompts]
    came = []
    for prompt, tokens in zip(prompts, expected, strict=True):
        before = pair.d.counts().get("external_hits", 0)
        assert pair.pull(prompt).tokens == tokens
        came.append(pair.d.counts()["external_hits"] - before)
    assert came == [len(prompts[0]), 70]
    pair.at_rest()


@pytest.mark.parametrize("length", [5 * BLOCK_TOKENS, WINDOW + BLOCK_TOKENS - MAX_TOKENS])
def test_the_next_turn_takes_its_history_from_the_engine_that_decoded(windows: Windows, length: int) -> None:
    """This includes a history after whose end the next token reads one block less of the window."""
    pair, prompt = windows.pair, prompt_of(length, seed=60)
    expected = pair.expected(prompt)
    turn = [*prompt, *expected, *prompt_of(40, seed=61)]
    expected_then = pair.expected(turn)
    answer = pair.pull(prompt)
    assert answer.tokens == expected
    wait_until(pair.p.rests)
    before = pair.p.counts().get("external_hits", 0)
    relayed = pair.p.ask(turn, answer.params, 1)
    history = len(prompt) + len(expected) - 1  # the last token of an answer was never computed
    assert pair.p.counts()["external_hits"] - before == history
    assert pair.d.ask(turn, relayed.params).tokens == expected_then
    pair.at_rest()


def test_hand_overs_that_nobody_comes_for_are_taken_back_where_blocks_lack(engines: Engines) -> None:
    folder, model = engines.folder / "windows-small", MODELS["alternating"]
    write_model(folder, model)
    more = {"model": str(folder), "dtype": "float32", "disable_hybrid_kv_cache_manager": False}
    more |= {"max_model_len": 512, "num_gpu_blocks_override": 40, "enable_prefix_caching": False}
    with closing(Pair(engines, more=more, data_paths=[model.path], ttl_s=600.0, firm_ttl_s=0.3)) as pair:
        pair.start()
        for seed in range(5):
            pair.prefilled(prompt_of(10 * BLOCK_TOKENS, seed=80 + seed))  # its client hangs up: nobody comes
        prompt = prompt_of(10 * BLOCK_TOKENS, seed=90)
        answer = pair.pull(prompt)
        assert answer.tokens == pair.p.ask(prompt).tokens
        assert pair.p.counts().get("preempted", 0) == 0
        pair.at_rest()


@pytest.mark.parametrize(
    "each",
    [{"P": ONE, "D": TWO}, {"P": TWO, "D": ONE}, {"P": TWO, "D": TWO}, {"P": STAGES, "D": ONE}],
    ids=["one-to-two", "two-to-one", "two-to-two", "stages-to-one"],
)
def test_engines_with_several_ranks_take_what_is_read_of_each_window(engines: Engines, each: Any) -> None:
    folder, model = engines.folder / "windows-unlike", MODELS["alternating"]
    write_model(folder, model)
    more = {"model": str(folder), "dtype": "float32", "disable_hybrid_kv_cache_manager": False}
    with closing(Pair(engines, more=more, each=each, data_paths=[model.path], layers_per_part=1)) as pair:
        pair.start()
        for length in LENGTHS:
            prompt = prompt_of(length, seed=95)
            expected, before = pair.expected(prompt), received(pair.d)
            assert pair.pull(prompt).tokens == expected
            assert pair.d.forgets()
            assert pair.push(prompt).tokens == expected
            assert received(pair.d) - before == 2 * length
            pair.at_rest()


def test_engines_whose_blocks_are_no_multiple_of_each_other_exchange_nothing(engines: Engines) -> None:
    folder, model = engines.folder / "windows-unlike", MODELS["alternating"]
    write_model(folder, model)
    more = {"model": str(folder), "dtype": "float32", "disable_hybrid_kv_cache_manager": False}
    each = {"P": {"block_size": 64}, "D": {"block_size": 96}}
    with closing(Pair(engines, more=more, each=each, data_paths=[model.path])) as pair:
        pair.start()
        assert pair.pull(prompt_of(LENGTHS[-1], seed=95)).failed
        assert "got no KV: INCOMPATIBLE_POOLS" in pair.d.log()
        assert "choose sizes of which one is a multiple of the other" in pair.d.log()
        assert received(pair.d) == 0
        pair.at_rest()
