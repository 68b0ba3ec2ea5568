"""Clients hang up at any time: no block stays in use, and the other side does not wait. See `Pair.at_rest`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.vllm.engines import (
    CHUNK_TOKENS,
    PREFILL,
    SEQUENCES,
    WORKER,
    Engine,
    Pair,
    prompt_of,
    pushed,
    wait_until,
)
from tests.vllm.standing import standing

PROMPT = prompt_of(3 * CHUNK_TOKENS, seed=4)


@contextmanager
def full(engine: Engine) -> Iterator[None]:
    """Keeps the engine busy with as many requests as it runs at once, so that further ones queue."""
    before = engine.counts()["new_tokens"]
    lines = [engine.begin(prompt_of(20, 400 + seed), None, 1500) for seed in range(SEQUENCES)]
    try:
        wait_until(lambda: engine.counts()["new_tokens"] - before >= SEQUENCES)
        yield
    finally:
        for line in lines:
            engine.abort(line)
            assert engine.answer(line).error == "aborted"


def test_a_pull_is_aborted_before_its_source_answered(pair: Pair) -> None:
    params = pair.prefilled(PROMPT)
    with standing(pair.p):
        line = pair.d.begin(PROMPT, params)
        wait_until(lambda: "pinned_block_count" in pair.d.held(), pair.d.held)
        pair.d.abort(line)
    pair.p.let_go()


def test_decoding_is_aborted_after_a_pull(pair: Pair) -> None:
    before = pair.d.counts().get("received", 0)
    line = pair.d.begin(PROMPT, pair.prefilled(PROMPT), 1000)
    wait_until(lambda: pair.d.counts().get("received", 0) > before)
    pair.d.abort(line)


def test_decoding_is_aborted_after_a_push(pair: Pair) -> None:
    before = pair.d.counts().get("received", 0)
    legs = pair.begin_push(PROMPT, max_tokens=1000)
    wait_until(lambda: pair.d.counts().get("received", 0) > before)
    pair.d.abort(legs["D"])
    assert pair.d.answer(legs["D"]).error == "aborted"
    assert not pair.p.answer(legs["P"]).failed


def test_a_pull_is_aborted_in_the_queue_and_its_source_frees_at_once(pair: Pair) -> None:
    params = pair.prefilled(PROMPT)
    with full(pair.d):
        line = pair.d.begin(PROMPT, params)
        wait_until(lambda: "open_access_count" in pair.p.held(), pair.p.held)
        assert "pinned_block_count" not in pair.d.held()
        pair.d.abort(line)
        wait_until(lambda: pair.p.held() == {}, pair.p.held)


def test_a_pull_is_aborted_while_its_bytes_may_move(pair: Pair) -> None:
    pair.pull(prompt_of(20, seed=7))  # an engine's first request and its first peer wait for its worker
    pair.at_rest()
    params = pair.prefilled(PROMPT)
    with standing(pair.d, WORKER):
        line = pair.d.begin(PROMPT, params)
        wait_until(
            lambda: {"open_access_count"} <= pair.p.held().keys() and "pinned_block_count" in pair.d.held(), pair.d.held
        )
        pair.d.abort(line)
        assert pair.d.answer(line).error == "aborted"


def test_decode_leaves_after_the_first_part_of_its_push(pair: Pair) -> None:
    legs = pair.begin_push(prompt_of(1900, seed=9))
    wait_until(lambda: "pinned_block_count" in pair.p.held(), pair.p.held)
    with standing(pair.p, WORKER):
        pair.d.abort(legs["D"])
        assert pair.d.answer(legs["D"]).error == "aborted"
    assert not pair.p.answer(legs["P"]).failed


def test_a_prefill_is_aborted_in_the_queue(pair: Pair) -> None:
    with full(pair.p):
        line = pair.p.begin(PROMPT, PREFILL, 1)
        pair.p.abort(line)
        assert pair.p.answer(line).error == "aborted"
        assert pair.p.held() == {}


def test_a_prefill_is_aborted_while_it_is_computed(pair: Pair) -> None:
    before = pair.p.counts()["busy_steps"]
    line = pair.p.begin(prompt_of(1900, seed=5), PREFILL, 1)
    wait_until(lambda: pair.p.counts()["busy_steps"] > before)
    pair.p.abort(line)
    assert pair.p.answer(line).error == "aborted"


def test_what_was_prefilled_is_never_pulled(pair: Pair) -> None:
    pair.prefilled(PROMPT)
    assert pair.p.held()
    pair.p.let_go()


def test_decode_leaves_before_its_push_came(pair: Pair) -> None:
    key = os.urandom(16)
    line = pair.d.begin(PROMPT, {"do_remote_prefill": True, **pushed(key, pair.p.address)})
    wait_until(lambda: "pinned_block_count" in pair.d.held(), pair.d.held)
    pair.d.abort(line)
    assert not pair.p.ask(PROMPT, {**PREFILL, **pushed(key)}, 1).failed


@pytest.mark.parametrize("decode_first", [True, False])
def test_decode_learns_that_the_prefill_of_its_push_was_aborted(pair: Pair, *, decode_first: bool) -> None:
    key, long = os.urandom(16), prompt_of(1900, seed=6)
    target = {"do_remote_prefill": True, **pushed(key, pair.p.address)}
    line = pair.d.begin(long, target) if decode_first else 0
    if decode_first:
        wait_until(lambda: "pinned_block_count" in pair.d.held(), pair.d.held)
    prefill = pair.p.begin(long, {**PREFILL, **pushed(key)}, 1)
    wait_until(lambda: "pinned_block_count" in pair.p.held(), pair.p.held)  # its first chunk is handed over
    pair.p.abort(prefill)
    assert pair.d.answer(line or pair.d.begin(long, target)).failed
