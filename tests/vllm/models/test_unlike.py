"""Engines with different numbers of ranks exchange KV: the tokens are those of one engine."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import CHUNK_TOKENS, START_S, Engine, Engines, Pair, prompt_of, write_model
from tests.vllm.models.splits import ONE, STAGES, TWO

pytestmark = pytest.mark.timeout(START_S)

PROMPTS = {length: prompt_of(length, seed=5) for length in (20, 200, 2 * CHUNK_TOKENS + 77)}
PAIRS = {
    "one-to-two": {"P": ONE, "D": TWO},
    "two-to-one": {"P": TWO, "D": ONE},
    "stages-to-one": {"P": STAGES, "D": ONE},
    "one-to-stages": {"P": ONE, "D": STAGES},
    "stages-to-two": {"P": STAGES, "D": TWO},
}


@dataclass
class Unlike:
    """Both engines, and the tokens that an engine of one rank gives for the prompts."""

    pair: Pair
    expected: dict[int, list[int]]


@pytest.fixture(scope="module")
def expected(engines: Engines) -> dict[int, list[int]]:
    """Returns the tokens in float32: bfloat16 would round differently on two ranks and give other tokens."""
    write_model(engines.folder / "unlike")
    one = Engine("one", 0, engines, extra={}, on_loss="fail", more=model_of(engines))
    one.ready()
    found = {length: one.ask(prompt).tokens for length, prompt in PROMPTS.items()}
    one.stop()
    return found


@pytest.fixture(scope="module", params=PAIRS)
def unlike(request: pytest.FixtureRequest, engines: Engines, expected: dict[int, list[int]]) -> Iterator[Unlike]:
    with closing(Pair(engines, more=model_of(engines), each=PAIRS[request.param], data_paths=["cma"])) as pair:
        pair.start()
        yield Unlike(pair, expected)


def model_of(engines: Engines) -> dict[str, Any]:
    return {"model": str(engines.folder / "unlike"), "dtype": "float32"}


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_engines_that_split_the_kv_in_other_ways_give_the_tokens_of_one(unlike: Unlike, mode: str, length: int) -> None:
    pair = unlike.pair
    before = received(pair.d)
    answer = pair.pull(PROMPTS[length]) if mode == "pull" else pair.push(PROMPTS[length])
    assert answer.tokens == unlike.expected[length], answer
    assert received(pair.d) - before == length
    pair.at_rest()
