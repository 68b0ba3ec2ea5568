"""Engines that prefill and decode for each other: all requests are answered, whichever engine waits for the other."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pytest

from tests.vllm.engines import MAX_TOKENS, PREFILL, Answer, Engine, Engines, Pair, prompt_of, wait_until

POOL = 400
PROMPT = 1_100
"""Tokens of a prompt; eleven such prompts leave too few blocks for a twelfth."""
FULL = 11
KEPT = {"kvgrpc_intent": {"firmTtl": "120s"}}
"""Params that keep P's hand-overs firm while it computes the others."""
REQUESTS = 32
PATIENCE = 3.0
"""Maximum time of both directions, as a multiple of the time of one."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def mutual_engines(engines: Engines) -> Iterator[Pair]:
    more = {"num_gpu_blocks_override": POOL, "enable_prefix_caching": False}
    with closing(Pair(engines, more=more, data_paths=["cma"], offer_ttl_s=600.0)) as pair:
        yield pair


@pytest.fixture
def mutual(mutual_engines: Pair) -> Iterator[Pair]:
    mutual_engines.start()
    yield mutual_engines
    mutual_engines.at_rest()


@dataclass
class Story:
    """A request that is prefilled at one engine, then decoded at the other."""

    source: Engine
    destination: Engine
    prompt: Sequence[int]
    line: int = 0
    decodes: bool = False
    answer: Answer | None = None

    @property
    def tokens(self) -> list[int]:
        assert self.answer is not None
        assert not self.answer.failed, self.answer
        return self.answer.tokens

    def begin(self) -> None:
        self.line = self.source.begin(self.prompt, PREFILL, 1)

    def go_on(self) -> None:
        """Reads the answer of the current leg, if it is there, and begins the next leg."""
        at = self.destination if self.decodes else self.source
        if self.answer is not None or not at.answered(self.line):
            return
        answer = at.answer(self.line)
        if self.decodes or answer.failed:
            self.answer = answer
        else:
            self.decodes, self.line = True, self.destination.begin(self.prompt, answer.params)


def play(stories: list[Story], within_s: float) -> float:
    """Runs all stories at once. Returns the time they took, in seconds."""
    began = time.monotonic()
    for story in stories:
        story.begin()
    while not all(story.answer for story in stories):
        for story in stories:
            story.go_on()
        done = sum(story.answer is not None for story in stories)
        assert time.monotonic() < began + within_s, f"{done} of {len(stories)} were answered in {within_s:.0f} s"
    return time.monotonic() - began


def test_engines_that_decode_for_each_other_answer_all_requests(mutual: Pair) -> None:
    one_way = [Story(mutual.p, mutual.d, prompt_of(PROMPT, seed)) for seed in range(REQUESTS)]
    one_way_s = play(one_way, 300.0)
    both_ways = [
        Story(*((mutual.p, mutual.d) if seed % 2 else (mutual.d, mutual.p)), prompt_of(PROMPT, seed))
        for seed in range(REQUESTS)
    ]
    both_ways_s = play(both_ways, PATIENCE * one_way_s)
    sys.stdout.write(f"one way {one_way_s:.1f} s, both ways {both_ways_s:.1f} s\n")
    # Tokens are not compared: the chunks of prompts computed together differ each time, and so does their rounding.
    assert {len(story.tokens) for story in one_way + both_ways} == {MAX_TOKENS}


def test_next_turns_and_first_turns_that_wait_for_each_other_are_all_answered(mutual: Pair) -> None:
    p, d = mutual.p, mutual.d
    earlier = [Story(p, d, prompt_of(PROMPT - 60, 100 + number)) for number in range(FULL)]
    play(earlier, 300.0)
    firsts = [prompt_of(PROMPT, 200 + number) for number in range(FULL)]
    handed_over = [p.ask(prompt, {**PREFILL, **KEPT}, 1).params for prompt in firsts]
    turns = []
    for story in earlier:
        turn = [*story.prompt, *story.tokens, *prompt_of(40, 300)]
        assert story.answer is not None
        turns.append(p.begin(turn, story.answer.params, 1))
    with d.lead() as lead:
        wait_until(lambda: lead.status().waiting_reader_count == FULL, lead.status)
    decodes = [d.begin(prompt, params) for prompt, params in zip(firsts, handed_over, strict=True)]
    wait_until(lambda: all(map(d.answered, decodes)), timeout_s=120.0)
    wait_until(lambda: all(map(p.answered, turns)), timeout_s=120.0)
    assert not any(d.answer(line).failed for line in decodes)
    assert not any(p.answer(line).failed for line in turns)
