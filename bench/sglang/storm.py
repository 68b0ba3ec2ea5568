"""A storm over a pair behind SGLang's own router: bursts, hang-ups at any moment, and deaths of both engines."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.sglang.engines import server, started
from tests.sglang.servers import Pair, asked, free_port, prompt_of, sampled, wait_until

AT_ONCE = 12
LENGTHS = (15, 16, 17, 60, 250, 600, 1200)
PROMPTS = 24
TOKENS_MAX = 12
REST_S = 120.0
"""Maximum time after which nothing may be held any more, in seconds."""
READY_S = 120.0
ANSWER_S = 120.0
WAIT_S = 30
"""Time that prefill waits for a decode that was killed before it registered. The router answers once both legs have,
and by default prefill waits for 300 s, longer than a client of this storm.
"""


@contextmanager
def router(pair: Pair, log: Path) -> Iterator[int]:
    """Runs sglang-router, and yields its port."""
    port = free_port()
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1",
        "--port", str(port), "--prefill", f"http://127.0.0.1:{pair.p.port}", str(pair.p.lead_port),
        "--decode", f"http://127.0.0.1:{pair.d.port}", "--policy", "random", "--disable-retries",
        "--health-check-interval-secs", "2", "--disable-circuit-breaker", "--prometheus-port", str(free_port()),
        "--prometheus-host", "127.0.0.1",
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield port
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


class Storm:
    """The requests, and what became of them."""

    def __init__(self, pair: Pair, through: int, seed: int) -> None:
        self._pair, self._through, self._source = pair, through, random.Random(seed)  # noqa: S311 - no secret
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._prompts = [prompt_of(LENGTHS[number % len(LENGTHS)], seed=seed + number) for number in range(PROMPTS)]
        self._expected = [self._alone(prompt) for prompt in self._prompts]

    def _alone(self, prompt: list[int]) -> list[int]:
        return list(self._pair.of_one(prompt, TOKENS_MAX)["output_ids"])

    def burst(self, count: int, hang_ups: float) -> None:
        """Sends requests, of which a share hang up."""
        plans = [
            (
                self._source.randrange(PROMPTS),
                self._source.randint(1, TOKENS_MAX),
                self._source.random() if self._source.random() < hang_ups else ANSWER_S,
            )
            for _ in range(count)
        ]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for outcome, error in threads.map(lambda plan: self._one(*plan), plans):
                self.outcomes[outcome] += 1
                if error:
                    self.errors[error] += 1

    def _one(self, number: int, tokens: int, timeout_s: float) -> tuple[str, str]:
        body = {"input_ids": self._prompts[number], **sampled(tokens)}
        answer = asked(self._through, "/generate", body, timeout_s)
        if "output_ids" in answer:
            return ("right" if answer["output_ids"] == self._expected[number][:tokens] else "wrong"), ""
        timed_out = "timed out" in answer.get("error", "")
        if timed_out:
            return ("hung up" if timeout_s < ANSWER_S else "unanswered"), ""
        return "failed", str(answer.get("error", answer))[:80]

    def wait_until_it_serves(self) -> None:
        """Waits until a request gets through: the router looks at its engines from time to time."""
        one = {"input_ids": self._prompts[0], **sampled(1)}
        wait_until(
            lambda: "output_ids" in asked(self._through, "/generate", one, 20.0),
            lambda: "the router does not serve",
            READY_S,
        )


def measured(folder: Path, requests: int, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Returns what became of a storm's requests, and what is held after it."""
    p = server("P", folder, "prefill", SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT=str(WAIT_S))
    pair = Pair(p, server("D", folder, "decode"), server("one", folder, ""))
    with started(list(pair)), router(pair, folder / "router.log") as through:
        storm = Storm(pair, through, seed)
        storm.wait_until_it_serves()
        tell("the storm begins")
        for victim in (pair.d, pair.p, None):
            storm.burst(requests // 3, hang_ups=0.4)
            if victim is not None:
                with ThreadPoolExecutor(1) as threads:
                    beside = threads.submit(storm.burst, AT_ONCE * 2, 0.0)
                    wait_until(lambda victim=victim: bool(victim.held()), lambda: "nothing is in flight")  # type: ignore[misc]
                    victim.stop()
                    beside.result()
                victim.start()
                victim.wait()
                storm.wait_until_it_serves()
            tell(f"{dict(storm.outcomes)}")
        held = _held(pair)
        last = pair.generate(prompt_of(3500, seed=1), 2)
        whole = last.get("output_ids") == pair.of_one(prompt_of(3500, seed=1), 2)["output_ids"]
    found = storm.outcomes
    return {
        "answers": found["right"] + found["wrong"], "wrong": found["wrong"], "hung_up": found["hung up"],
        "failed": found["failed"], "unanswered": found["unanswered"], "held": held, "kills": 2,
        "whole_memory_serves": whole, "router": "sglang-router", "errors": dict(storm.errors.most_common(8)),
    }  # fmt: skip


def _held(pair: Pair) -> dict[str, dict[str, int]]:
    """Returns what the leads still hold, once it is nothing or `REST_S` is over."""
    with suppress(AssertionError):  # the result says what is left
        wait_until(lambda: not pair.p.held() and not pair.d.held(), lambda: "something is held", REST_S)
    return {name: of for name, of in (("prefill", pair.p.held()), ("decode", pair.d.held())) if of}
