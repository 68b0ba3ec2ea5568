"""A prompt that P computed, moved as named tensors, gives the same tokens at D as one engine alone."""

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, prompt_of
from tests.vllm.tensors.pairs import LONG, PART_TOKENS, TensorPair

LENGTHS = {
    "less_than_a_unit": 5,
    "a_block_and_one": BLOCK_TOKENS + 1,
    "a_part_and_one": PART_TOKENS + 1,
    "chunks": 4 * CHUNK_TOKENS + 77,
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_one_leg_after_the_other_gives_the_tokens_of_one_engine(pair: TensorPair, length: int) -> None:
    prompt = prompt_of(length, seed=1)
    expected, before = pair.expected(prompt), received(pair.d)
    assert pair.moved(prompt).tokens == expected
    assert received(pair.d) - before == length - 1


@pytest.mark.parametrize("first", ["P", "D"])
def test_both_legs_at_once_give_the_tokens_of_one_engine(pair: TensorPair, first: str) -> None:
    """The prompt is computed in several steps, and each part moves once it is computed."""
    prompt = prompt_of(LONG, seed=2)
    expected, before = pair.expected(prompt), received(pair.d)
    assert pair.both(prompt, first=first).tokens == expected
    assert received(pair.d) - before == len(prompt) - 1
