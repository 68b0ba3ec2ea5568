"""Processes die. Whoever is left frees its blocks, and never takes one request's KV for another's."""

import os
import signal

from tests.vllm.engines import CHUNK_TOKENS, Pair, prompt_of, wait_until

PROMPT = prompt_of(3 * CHUNK_TOKENS, seed=7)
LEADS = 4
"""More than are replaced within a minute."""


def test_an_engine_whose_lead_died_gets_another_one(pair: Pair) -> None:
    expected, dead = pair.expected(PROMPT), pair.d.lead_pid()
    os.kill(dead, signal.SIGKILL)

    def pulled() -> bool:
        answer = pair.pull(PROMPT)
        pair.p.let_go()
        assert answer.failed or answer.tokens == expected
        return not answer.failed

    wait_until(pulled)
    assert pair.d.lead_pid() != dead


def test_an_engine_without_a_lead_goes_on_alone(pair: Pair) -> None:
    expected = pair.expected(PROMPT)
    params = pair.prefilled(PROMPT)
    for _ in range(LEADS):
        wait_until(lambda: pair.d.ask([5, 6, 7], None, 1).tokens != [] and pair.d.lead_pid() > 0)
        os.kill(pair.d.lead_pid(), signal.SIGKILL)
    wait_until(lambda: pair.d.ask([5, 6, 7], None, 1).tokens != [] and "goes on alone" in pair.d.log())
    assert pair.d.ask(PROMPT, params).failed
    assert pair.d.ask(PROMPT).tokens == expected
    pair.d.kill()
    pair.p.let_go()


def test_prefill_frees_what_a_dead_decode_engine_was_reading(pair: Pair) -> None:
    pair.on_loss["D"] = "recompute"  # of the one that comes next
    params = pair.prefilled(PROMPT)
    pair.p.signal(signal.SIGSTOP)
    try:
        pair.d.begin(PROMPT, params)
        wait_until(lambda: "pinned_blocks" in pair.d.held(), pair.d.held)
        pair.d.kill()
    finally:
        pair.p.signal(signal.SIGCONT)


def test_decode_computes_what_a_dead_prefill_engine_had(pair: Pair) -> None:
    assert pair.on_loss["D"] == "recompute"
    prompts = [PROMPT, prompt_of(100, seed=90), prompt_of(100, seed=91)]
    expected = [pair.expected(prompt) for prompt in prompts]
    params = [pair.prefilled(prompt) for prompt in prompts]
    swapped = [pair.d.ask(prompts[1], params[2]).tokens, pair.d.ask(prompts[2], params[1]).tokens]
    assert swapped == expected[1:]
    pair.p.signal(signal.SIGSTOP)
    line = pair.d.begin(PROMPT, params[0])
    wait_until(lambda: "pinned_blocks" in pair.d.held(), pair.d.held)
    pair.p.kill()
    assert pair.d.answer(line).tokens == expected[0]
