"""A prompt that P computed gives the same tokens at D as one engine alone: by pull, by push, and at any length."""

import pytest

from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, Pair, prompt_of

LENGTHS = {
    "less_than_a_unit": 5,
    "less_than_a_block": BLOCK_TOKENS - 1,
    "a_block": BLOCK_TOKENS,
    "a_block_and_one": BLOCK_TOKENS + 1,
    "blocks": 3 * BLOCK_TOKENS,
    "a_chunk": CHUNK_TOKENS,
    "a_chunk_and_one": CHUNK_TOKENS + 1,
    "chunks": 4 * CHUNK_TOKENS + 77,
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_pull_gives_the_tokens_of_one_engine(pair: Pair, length: int) -> None:
    prompt = prompt_of(length, seed=1)
    expected, before = pair.expected(prompt), pair.d.counts()
    assert pair.pull(prompt).tokens == expected
    assert moved(pair, before) == (1, length)


@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_push_gives_the_tokens_of_one_engine_whichever_side_begins(pair: Pair, length: int, first: str) -> None:
    prompt = prompt_of(length, seed=2)
    expected, before = pair.expected(prompt), pair.d.counts()
    assert pair.push(prompt, first=first).tokens == expected
    assert moved(pair, before) == (1, length)


def test_the_tokens_tell_one_prompt_from_another(pair: Pair) -> None:
    """Otherwise the other tests here would prove nothing."""
    base = prompt_of(200, seed=1)
    others = [[*base[:1], 9, *base[2:]], [*base[:100], 9, *base[101:]], [*prompt_of(199, seed=5), base[-1]]]
    found = [pair.expected(prompt) for prompt in (base, *others)]
    assert len({tuple(tokens) for tokens in found}) == len(found)


def moved(pair: Pair, before: dict[str, int]) -> tuple[int, int]:
    """Returns the requests and tokens that D received since, by vLLM's own count and by the connector's."""
    after = pair.d.counts()
    grown = {
        name: after.get(name, 0) - before.get(name, 0) for name in ("received", "received_tokens", "external_hits")
    }
    assert grown["received_tokens"] == grown["external_hits"]
    return grown["received"], grown["received_tokens"]
