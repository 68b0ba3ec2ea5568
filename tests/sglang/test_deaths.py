"""Engines that are killed while the other one waits for them."""

import signal
from concurrent.futures import ThreadPoolExecutor

from tests.sglang.servers import Pair, prompt_of, wait_until

HEARD_S = 30.0
"""Maximum time until an engine hears that the other one was killed, in seconds."""


def test_a_killed_prefill_fails_what_decode_waits_for_and_decode_serves_the_next_one(pair: Pair) -> None:
    pair.p.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(pair.d.ask, "/generate", pair.body(prompt_of(500, 1)))
        wait_until(lambda: "pinned_block_count" in pair.d.held(), pair.d.held)
        pair.p.stop()
        assert "error" in waits.result(HEARD_S)
    assert "PEER_UNREACHABLE" in pair.d.ask("/generate", pair.body(prompt_of(500, 2)))["error"]
    pair.p.start()
    pair.p.wait()
    pair.check_whole_memory(seed=5)


def test_requests_that_wait_at_decode_fail_when_its_lead_is_killed_and_it_serves_the_next_one(pair: Pair) -> None:
    with ThreadPoolExecutor(2) as threads:
        pair.p.signal(signal.SIGSTOP)
        try:
            waits = [threads.submit(pair.d.ask, "/generate", pair.body(prompt_of(500, seed))) for seed in (7, 8)]
            wait_until(lambda: pair.d.held().get("pending_transfer_count") == len(waits), pair.d.held)
            pair.d.kill_lead()
            assert all("ENGINE_LOST" in one.result(HEARD_S)["error"] for one in waits)
        finally:
            pair.p.signal(signal.SIGCONT)
    wait_until(pair.d.attached, lambda: "no other lead serves decode")
    pair.check_whole_memory(seed=9)


def test_a_killed_decode_frees_the_pages_of_prefill(pair: Pair) -> None:
    body = pair.body(prompt_of(600, 3))
    with ThreadPoolExecutor(2) as threads:
        lost = threads.submit(pair.d.ask, "/generate", body)
        wait_until(lambda: bool(pair.p.held()), pair.p.held)
        pair.d.signal(signal.SIGSTOP)
        waits = threads.submit(pair.p.ask, "/generate", body)
        wait_until(lambda: "lease_count" in pair.p.held(), pair.p.held)
        pair.d.stop()
        assert "error" in lost.result(HEARD_S)
        assert "error" in waits.result(HEARD_S)
    pair.d.start()
    pair.d.wait()
    pair.check_whole_memory(seed=6)
