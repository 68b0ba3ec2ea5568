"""Processes die. The survivor frees its blocks, and never takes one request's KV for another's."""

import os
import signal

import pytest

from tests.vllm.engines import CHUNK_TOKENS, LEAD, PREFILL, WORKER, Pair, prompt_of, wait_until

PROMPT = prompt_of(3 * CHUNK_TOKENS, seed=7)


def test_an_engine_whose_lead_died_gets_another_one(pair: Pair) -> None:
    expected, (dead,) = pair.expected(PROMPT), pair.d.tree(LEAD)
    os.kill(dead, signal.SIGKILL)

    def pulled() -> bool:
        answer = pair.pull(PROMPT)
        pair.p.let_go()
        assert answer.failed or answer.tokens == expected
        return not answer.failed

    wait_until(pulled)
    assert pair.d.tree(LEAD) != [dead]


def test_an_engine_that_gets_no_lead_any_more_goes_on_alone(pair: Pair) -> None:
    """A lead is not replaced without end."""
    expected = pair.expected(PROMPT)
    params = pair.prefilled(PROMPT)

    def alone() -> bool:
        assert len(pair.d.ask([5, 6, 7], None, 1).tokens) == 1
        if "goes on alone" in pair.d.log():
            return True
        for pid in pair.d.tree(LEAD):
            os.kill(pid, signal.SIGKILL)
        return False

    wait_until(alone)
    assert pair.d.ask(PROMPT, params).failed
    assert pair.d.ask(PROMPT).tokens == expected
    pair.d.kill()


@pytest.mark.parametrize("opened", [False, True])
def test_a_pull_whose_source_dies_fails_where_that_is_configured(pair: Pair, *, opened: bool) -> None:
    """The source dies before it answers, or while bytes move: some have moved, or are read from the dead process."""
    expected = pair.expected(PROMPT)
    assert not pair.pull(prompt_of(50, seed=11)).failed  # they have met
    params = pair.prefilled(PROMPT)
    (worker,), (lead,) = pair.d.tree(WORKER), pair.p.tree(LEAD)
    stopped = worker if opened else lead
    os.kill(stopped, signal.SIGSTOP)
    try:
        line = pair.d.begin(PROMPT, params)
        wait_until(lambda: "pinned_block_count" in pair.d.held(), pair.d.held)
        if opened:
            wait_until(lambda: "open_access_count" in pair.p.held(), pair.p.held)
    finally:
        pair.p.kill()
        if opened:
            os.kill(worker, signal.SIGCONT)
    assert pair.d.answer(line).failed
    assert pair.d.ask(PROMPT).tokens == expected


def test_a_push_whose_source_dies_after_its_first_part_fails_where_that_is_configured(pair: Pair) -> None:
    prompt = prompt_of(1900, seed=10)
    expected = pair.expected(prompt)
    legs = pair.begin_push(prompt)
    wait_until(lambda: "pinned_block_count" in pair.p.held(), pair.p.held)
    pair.p.kill()
    assert pair.d.answer(legs["D"]).failed
    assert pair.d.ask(prompt).tokens == expected


def test_prefill_frees_what_a_dead_decode_engine_was_reading(pair: Pair) -> None:
    pair.on_loss["D"] = "recompute"  # for the next D
    assert not pair.pull(prompt_of(50, seed=8)).failed  # they have met
    params = pair.p.ask(PROMPT, {**PREFILL, "kvgrpc_intent": {"ttl": "5s"}}, 1).params
    (worker,) = pair.d.tree(WORKER)
    os.kill(worker, signal.SIGSTOP)  # otherwise it would read everything in a millisecond
    try:
        pair.d.begin(PROMPT, params)
        wait_until(lambda: "open_access_count" in pair.p.held(), pair.p.held)
    finally:
        pair.d.kill()
    wait_until(lambda: pair.p.held() == {}, pair.p.held)


def test_decode_computes_what_a_dead_prefill_engine_had(pair: Pair) -> None:
    assert pair.on_loss["D"] == "recompute"
    prompts = [PROMPT, prompt_of(100, seed=90), prompt_of(100, seed=91)]
    expected = [pair.expected(prompt) for prompt in prompts]
    params = [pair.prefilled(prompt) for prompt in prompts]
    swapped = [pair.d.ask(prompts[1], params[2]).tokens, pair.d.ask(prompts[2], params[1]).tokens]
    assert swapped == expected[1:]
    pair.p.signal(signal.SIGSTOP)
    try:
        line = pair.d.begin(PROMPT, params[0])
        wait_until(lambda: "pinned_block_count" in pair.d.held(), pair.d.held)
    finally:
        pair.p.kill()
    assert pair.d.answer(line).tokens == expected[0]
