"""Engines of two ranks, which share the heads or both have the only one, give the tokens of an engine of one rank."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import (
    CHUNK_TOKENS,
    PREFILL,
    START_S,
    WORKER,
    Engine,
    Engines,
    Pair,
    prompt_of,
    wait_until,
    write_model,
)
from tests.vllm.processes import runs

pytestmark = pytest.mark.timeout(START_S)

PROMPTS = {length: prompt_of(length, seed=3) for length in (20, 200, 2 * CHUNK_TOKENS + 77)}
IDENTITY = re.compile(r"KV is exchanged with engines of (\S+),")
"""Line in the log of an engine."""
DATA_PATHS = {4: "cma", 1: "nixl"}
"""Data path by the number of KV heads. With one head, both ranks have the same."""


@dataclass
class Ranks:
    """Engines of two ranks, and the tokens that an engine of one rank gives for the prompts."""

    pair: Pair
    expected: dict[int, list[int]]
    identity: str


@pytest.fixture(scope="module", params=DATA_PATHS, ids="{}-heads".format)
def ranks(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Ranks]:
    """Yields engines in float32: bfloat16 would round differently on two ranks and give other tokens."""
    folder = engines.folder / f"heads-{request.param}"
    write_model(folder, request.param)
    more = {"model": str(folder), "dtype": "float32"}
    one = Engine("one", 0, engines, extra={}, on_loss="fail", more=more)
    paths, two = [DATA_PATHS[request.param]], {**more, "tensor_parallel_size": 2}
    with closing(Pair(engines, more=two, data_paths=paths, layers_per_part=2)) as pair:
        one.ready()
        expected = {length: one.ask(prompt).tokens for length, prompt in PROMPTS.items()}
        one.stop()
        pair.start()
        yield Ranks(pair, expected, identity_of(one))


def identity_of(engine: Engine) -> str:
    found = IDENTITY.search(engine.log())
    assert found, engine.log()[-4000:]
    return found[1]


def test_the_number_of_ranks_is_no_part_of_what_kv_is_of(ranks: Ranks) -> None:
    assert {identity_of(ranks.pair.p), identity_of(ranks.pair.d)} == {ranks.identity}


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_every_rank_gets_its_share_and_the_tokens_are_those_of_one_rank(ranks: Ranks, mode: str, length: int) -> None:
    pair, before = ranks.pair, received(ranks.pair.d)
    answer = pair.pull(PROMPTS[length]) if mode == "pull" else pair.push(PROMPTS[length])
    assert answer.tokens == ranks.expected[length], answer
    assert received(pair.d) - before == length
    pair.at_rest()


def test_a_worker_that_dies_within_a_load_ends_its_engine_and_the_source_has_its_blocks_back(ranks: Ranks) -> None:
    """vLLM ends the whole engine, and its other workers, when a worker dies."""
    pair, prompt = ranks.pair, prompt_of(300, seed=4)
    params = pair.p.ask(prompt, {**PREFILL, "kvgrpc_intent": {"ttl": "600s"}}, 1).params
    tree, workers = pair.d.tree(), pair.d.tree(WORKER)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGSTOP)  # otherwise it would read everything in a millisecond
    line = pair.d.begin(prompt, params)
    wait_until(lambda: "open_access_count" in pair.p.held(), pair.p.held)
    os.kill(workers[1], signal.SIGKILL)
    assert pair.d.answer(line).failed
    wait_until(lambda: not any(map(runs, tree[1:])), lambda: [pid for pid in tree if runs(pid)])
    wait_until(lambda: pair.p.held() == {}, pair.p.held)
    wait_until(pair.p.rests)
    pair.d.kill()
