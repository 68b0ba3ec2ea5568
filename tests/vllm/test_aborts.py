"""Clients hang up whenever they like; no block stays in use, and the other side does not wait. See `Pair.at_rest`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.vllm.engines import CHUNK_TOKENS, LEAD, PREFILL, Engine, Pair, prompt_of, pushed, wait_until

PROMPT = prompt_of(3 * CHUNK_TOKENS, seed=4)


@contextmanager
def standing(engine: Engine) -> Iterator[None]:
    """Its lead stands still: it answers nobody."""
    (lead,) = engine.tree(LEAD)
    os.kill(lead, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(lead, signal.SIGCONT)


def test_a_pull_is_aborted_before_its_source_answered(pair: Pair) -> None:
    params = pair.prefilled(PROMPT)
    with standing(pair.p):
        line = pair.d.begin(PROMPT, params)
        wait_until(lambda: "pinned_blocks" in pair.d.held(), pair.d.held)
        pair.d.abort(line)
    pair.p.let_go()


def test_decoding_is_aborted_after_a_pull(pair: Pair) -> None:
    before = pair.d.counts().get("received", 0)
    line = pair.d.begin(PROMPT, pair.prefilled(PROMPT), 1000)
    wait_until(lambda: pair.d.counts().get("received", 0) > before)
    pair.d.abort(line)


def test_a_prefill_is_aborted_while_it_is_computed(pair: Pair) -> None:
    pair.p.abort(pair.p.begin(prompt_of(1900, seed=5), PREFILL, 1))


def test_nobody_comes_for_what_was_prefilled(pair: Pair) -> None:
    pair.prefilled(PROMPT)
    assert pair.p.held()
    pair.p.let_go()


def test_decode_leaves_before_its_push_came(pair: Pair) -> None:
    key = os.urandom(16)
    line = pair.d.begin(PROMPT, {"do_remote_prefill": True, **pushed(key, pair.p.address)})
    wait_until(lambda: "pinned_blocks" in pair.d.held(), pair.d.held)
    pair.d.abort(line)
    assert not pair.p.ask(PROMPT, {**PREFILL, **pushed(key)}, 1).failed


@pytest.mark.parametrize("decode_first", [True, False])
def test_decode_learns_that_the_prefill_of_its_push_was_aborted(pair: Pair, *, decode_first: bool) -> None:
    key, long = os.urandom(16), prompt_of(1900, seed=6)
    target = {"do_remote_prefill": True, **pushed(key, pair.p.address)}
    line = pair.d.begin(long, target) if decode_first else 0
    if decode_first:
        wait_until(lambda: "pinned_blocks" in pair.d.held(), pair.d.held)
    prefill = pair.p.begin(long, {**PREFILL, **pushed(key)}, 1)
    wait_until(lambda: "pinned_blocks" in pair.p.held(), pair.p.held)  # its first chunk is handed over
    pair.p.abort(prefill)
    assert pair.d.answer(line or pair.d.begin(long, target)).failed
