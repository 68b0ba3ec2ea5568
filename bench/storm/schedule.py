"""The requests of a storm, and their times: pure data from a seed.

Every request is drawn from its own generator, in the same order for all options. So the prompts of a seed stay the same
with other hang-ups, kills or connectors, and a longer storm begins like a shorter one.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.vllm.engines import BLOCK_TOKENS, VOCABULARY

PREFIXES = 8
"""Number of prefixes; each prompt begins with one."""
PREFIX_BLOCKS_MAX, TAIL_BLOCKS_MAX = 6, 4
ANSWER_TOKENS_MAX = 24
PROMPT_TOKENS_MAX = (PREFIX_BLOCKS_MAX + TAIL_BLOCKS_MAX) * BLOCK_TOKENS + 2
"""Maximum prompt length: a prefix and a tail, each one token past its last border."""
AGAIN = 0.15
"""Share of prompts that came before."""
BURST_MAX = 10
PAUSE_S_MAX = 0.8
"""Maximum pause between two bursts, in seconds."""
HANG_UP_S_MIN, HANG_UP_S_MAX = 0.001, 2.0
"""Range of the time from sending to hanging up, in seconds."""
STREAMED = 0.5
MISSED = 10
"""Number of requests that find D dead. Then the storm waits until it serves again."""


@dataclass(frozen=True)
class StormRequest:
    """One completion."""

    number: int
    prompt: tuple[int, ...]
    answer_tokens: int
    streams: bool
    pause_s: float
    """Pause after the previous request, in seconds; 0 within a burst."""
    hang_up_s: float | None
    """Time from sending until its client hangs up, in seconds; None if it stays. The answer may come before."""


@dataclass(frozen=True)
class Schedule:
    """All requests of one storm."""

    requests: tuple[StormRequest, ...]
    kills: tuple[int, ...]
    """Requests after whose sending D is killed."""


def schedule(seed: int, requests: int, hang_ups: float, kills: int) -> Schedule:
    """Returns a schedule. `hang_ups` is the share of requests whose clients hang up, 0 to 1. The `kills` are spread
    evenly.
    """
    prefixes = [_tokens(_of(seed, f"prefix {number}"), PREFIX_BLOCKS_MAX) for number in range(PREFIXES)]
    found: list[StormRequest] = []
    for number, pause_s in zip(range(requests), _pauses(seed), strict=False):
        draw = _of(seed, f"request {number}")
        prompt = draw.choice(prefixes) + _tokens(draw, TAIL_BLOCKS_MAX)
        again, which = draw.random() < AGAIN, draw.random()
        if again and found:
            prompt = found[int(which * len(found))].prompt
        answer_tokens, streams = draw.randint(1, ANSWER_TOKENS_MAX), draw.random() < STREAMED
        hangs_up, moment_s = draw.random() < hang_ups, _moment(draw)
        found.append(StormRequest(number, prompt, answer_tokens, streams, pause_s, moment_s if hangs_up else None))
    return Schedule(tuple(found), tuple(requests * (kill + 1) // (kills + 1) for kill in range(kills)))


def _of(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed} {name}")  # noqa: S311 - the same in every run


def _tokens(draw: random.Random, blocks_max: int) -> tuple[int, ...]:
    """Returns random tokens: one less than some blocks, exactly those, one more, or any number up to that."""
    count = draw.randint(1, blocks_max) * BLOCK_TOKENS + draw.randint(-1, 1)
    if draw.random() < 0.25:
        count = draw.randint(1, count)
    return tuple(draw.choices(range(3, VOCABULARY), k=count))


def _moment(draw: random.Random) -> float:
    """Returns a time to hang up: every order of magnitude equally often, for idle engines, or every moment, for busy
    ones.
    """
    if draw.random() < 0.5:
        return draw.uniform(HANG_UP_S_MIN, HANG_UP_S_MAX)
    return HANG_UP_S_MIN * float((HANG_UP_S_MAX / HANG_UP_S_MIN) ** draw.random())


def _pauses(seed: int) -> Iterator[float]:
    """Yields the pauses before the requests, one after the other."""
    draw = _of(seed, "bursts")
    while True:
        yield draw.uniform(0, PAUSE_S_MAX)
        yield from [0.0] * draw.randrange(BURST_MAX)
