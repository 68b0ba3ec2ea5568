"""Requests that end early, at either engine, at any moment."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.sglang.servers import Pair, prompt_of

ROUNDS = 40
AT_ONCE = 4


def test_a_decode_request_without_its_prefill_fails_by_itself(pair: Pair) -> None:
    answer = pair.d.ask("/generate", pair.body(prompt_of(50, 1)))
    assert "SOURCE_FAILED" in answer["error"]
    pair.check_whole_memory(seed=2)


def test_clients_that_hang_up_leave_all_pages_free(pair: Pair) -> None:
    for server in (pair.d, pair.p):
        assert "timed out" in server.ask("/generate", pair.body(prompt_of(50, 2)), timeout_s=1.0)["error"]
        pair.check_whole_memory(seed=3)


def test_aborts_at_any_moment_leave_all_pages_free_and_no_request_waiting(pair: Pair) -> None:
    source = random.Random(5)
    plans = [
        (source.choice((30, 300, 900)), source.random() * 0.6, source.choice(((pair.p,), (pair.d,), (pair.p, pair.d))))
        for _ in range(ROUNDS)
    ]

    def play(number: int) -> None:
        length, after_s, where = plans[number]
        name = f"aborted-{number}"
        body = pair.body(prompt_of(length, seed=1000 + number), 16, rid=name)

        def abort() -> None:
            for server in where:
                server.ask("/abort_request", {"rid": name})

        timer = threading.Timer(after_s, abort)
        timer.start()
        answers = pair.ask_both(body, body)
        timer.join()
        assert not [answer for answer in answers if "timed out" in answer.get("error", "")]

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(play, range(ROUNDS)))
    pair.check_whole_memory(seed=4)
