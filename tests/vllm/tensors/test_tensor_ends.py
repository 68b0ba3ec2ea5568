"""Clients hang up at any time, and caches are reset: no tensor stays, and nobody waits for one in vain."""

import os

from tests.vllm.counts import received
from tests.vllm.engines import PREFILL, WORKER, prompt_of, wait_until
from tests.vllm.standing import standing
from tests.vllm.tensors.pairs import LONG, TensorPair, stored


def test_decode_leaves_before_its_prompt_is_computed(pair: TensorPair) -> None:
    key, prompt = os.urandom(16), prompt_of(LONG, seed=100)
    line = pair.d.begin(prompt, {"do_remote_prefill": True, **pair.intent(key, pair.p)})
    wait_until(lambda: waits(pair) > 0)
    pair.d.abort(line)
    assert pair.d.answer(line).error == "aborted"
    assert not pair.p.ask(prompt, {**PREFILL, **pair.intent(key, pair.d), **soon(pair, key)}, 1).failed


def test_decode_leaves_while_its_tensors_come(pair: TensorPair) -> None:
    legs = pair.begin_both(prompt_of(LONG, seed=101))
    wait_until(lambda: stored(pair.d)["tensors"] > 0)
    with standing(pair.p, WORKER):
        pair.d.abort(legs["D"])
        assert pair.d.answer(legs["D"]).error == "aborted"
    assert not pair.p.answer(legs["P"]).failed


def test_decoding_is_aborted_after_a_load(pair: TensorPair) -> None:
    before = received(pair.d)
    legs = pair.begin_both(prompt_of(300, seed=102), max_tokens=1000)
    wait_until(lambda: received(pair.d) > before)
    pair.d.abort(legs["D"])
    assert pair.d.answer(legs["D"]).error == "aborted"
    assert not pair.p.answer(legs["P"]).failed


def test_decode_learns_at_once_that_prefill_was_aborted(pair: TensorPair) -> None:
    prompt = prompt_of(LONG, seed=103)
    legs = pair.begin_both(prompt)
    wait_until(lambda: stored(pair.d)["tensors"] > 0)
    pair.p.abort(legs["P"])
    assert pair.p.answer(legs["P"]).error == "aborted"
    assert pair.lost(pair.d.answer(legs["D"]), prompt)


def test_decode_learns_at_once_that_prefill_was_refused(pair: TensorPair) -> None:
    prompt, key = prompt_of(300, seed=106), os.urandom(16)
    waiting = pair.d.begin(prompt, {"do_remote_prefill": True, **pair.intent(key, pair.p)})
    wait_until(lambda: waits(pair) > 0)
    intent = pair.intent(key, pair.d)["kvgrpc_intent"]
    assert pair.p.ask(prompt, {**PREFILL, "kvgrpc_intent": {**intent, "ttl": "-3s"}}, 1).params is None
    assert pair.lost(pair.d.answer(waiting), prompt)


def test_what_was_prefilled_and_is_never_taken_ends_by_its_ttl(pair: TensorPair) -> None:
    key, prompt = os.urandom(16), prompt_of(300, seed=104)
    answer = pair.p.ask(prompt, {**PREFILL, **soon(pair, key)}, 1)
    assert answer.params["kvgrpc_intent"]["peer"]["address"] == pair.p.address


def test_a_reset_ends_what_is_kept_and_what_comes(pair: TensorPair) -> None:
    prompt, key = prompt_of(300, seed=105), os.urandom(16)
    waiting = pair.d.begin(prompt, {"do_remote_prefill": True, **pair.intent(os.urandom(16), pair.p)})
    wait_until(lambda: waits(pair) > 0)
    pair.d.forgets(connector=True)
    assert pair.lost(pair.d.answer(waiting), prompt)
    params = pair.p.ask(prompt, {**PREFILL, **pair.intent(key, pair.d)}, 1).params
    wait_until(lambda: pair.p.forgets(connector=True))
    assert (stored(pair.p)["offered"], stored(pair.d)["tensors"]) == (0, 0)
    assert pair.d.forgets()
    before = received(pair.d)
    assert pair.lost(pair.d.ask(prompt, params), prompt)
    assert received(pair.d) == before


def soon(pair: TensorPair, key: bytes) -> dict[str, object]:
    """Returns an intent under which what nobody takes is kept for a second."""
    intent = pair.intent(key, pair.d)["kvgrpc_intent"]
    return {"kvgrpc_intent": {**intent, "ttl": "1s"}}


def waits(pair: TensorPair) -> int:
    """Returns the number of calls that wait at D's store."""
    with pair.d.lead() as lead:
        return int(lead.tensors().status().waiting_count)
