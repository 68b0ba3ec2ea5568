"""Several requests at once, prefixes that an engine has, and the content of a prompt's KV."""

import os

import pytest

from tests.vllm.clear import clear_prompt
from tests.vllm.counts import received
from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, PREFILL, prompt_of
from tests.vllm.tensors.pairs import LONG, PART_TOKENS, TensorPair


@pytest.mark.parametrize("first", ["P", "D"])
def test_stores_that_are_full_hold_up_and_lose_nothing(pair: TensorPair, first: str) -> None:
    """The stores have room for one of these prompts at a time."""
    prompts = [prompt_of(LONG - 50 * seed, 30 + seed) for seed in range(4)]
    expected, before = [pair.expected(prompt) for prompt in prompts], received(pair.d)
    legs = [pair.begin_both(prompt, first=first) for prompt in prompts]
    assert [pair.d.answer(leg["D"]).tokens for leg in legs] == expected
    assert not any(pair.p.answer(leg["P"]).failed for leg in legs)
    assert received(pair.d) - before == sum(map(len, prompts)) - len(prompts)


def test_eight_at_once_keep_their_tokens_apart(pair: TensorPair) -> None:
    prompts = [prompt_of(30 + 41 * seed, 20 + seed) for seed in range(8)]
    expected, before = [pair.expected(prompt) for prompt in prompts], received(pair.d)
    legs = [pair.begin_both(prompt, first="DP"[seed % 2]) for seed, prompt in enumerate(prompts)]
    assert [pair.d.answer(leg["D"]).tokens for leg in legs] == expected
    assert not any(pair.p.answer(leg["P"]).failed for leg in legs)
    assert received(pair.d) - before == sum(map(len, prompts)) - len(prompts)


def test_what_an_engine_has_of_a_prompt_is_neither_computed_nor_loaded_again(pair: TensorPair) -> None:
    shared = prompt_of(2 * PART_TOKENS + BLOCK_TOKENS, seed=40)
    prompts = [shared + prompt_of(50, seed=41 + i) for i in range(3)]
    expected = [pair.expected(prompt) for prompt in prompts]
    came, here = [], []
    for prompt, tokens in zip(prompts, expected, strict=True):
        before = pair.d.counts().get("external_hits", 0), pair.p.counts()["local_hits"]
        assert pair.moved(prompt).tokens == tokens
        came.append(pair.d.counts()["external_hits"] - before[0])
        here.append(pair.p.counts()["local_hits"] - before[1])
    assert came == [len(prompts[0]) - 1, 49, 49]
    assert here == [0, len(shared), len(shared)]


def test_a_prompt_that_decode_has_comes_no_more(pair: TensorPair) -> None:
    prompt = prompt_of(3 * BLOCK_TOKENS + 1, seed=50)
    expected = pair.expected(prompt)
    assert pair.moved(prompt).tokens == expected
    before = received(pair.d)
    assert pair.moved(prompt).tokens == expected
    assert received(pair.d) == before


@pytest.mark.parametrize("answers", [2, 3])
def test_several_answers_have_the_tokens_of_one_engine_whose_prompt_is_given_once(
    pair: TensorPair, answers: int
) -> None:
    prompt, expected = clear_prompt(pair, CHUNK_TOKENS + 40 * answers, answers, seed=63 + answers)
    before, sent = received(pair.d), pair.p.counts().get("sent", 0)
    prefilled = pair.p.answer(pair.begin_prefill(prompt, n=answers))
    answer = pair.d.ask(prompt, prefilled.params, n=answers)
    assert [answer.tokens, *answer.others] == answers * [expected]
    assert received(pair.d) - before >= len(prompt) - 1
    assert pair.p.counts()["sent"] - sent == 1


def test_answers_whose_client_left_leave_nothing(pair: TensorPair) -> None:
    prompt, key = prompt_of(20 * BLOCK_TOKENS, seed=69), os.urandom(16)
    params = {"do_remote_prefill": True, **pair.intent(key, pair.p)}
    waiting = pair.d.begin(prompt, params, n=2)
    source = pair.begin_prefill(prompt, key, n=2)
    pair.d.abort(waiting)
    pair.p.abort(source)
    again = prompt_of(3 * BLOCK_TOKENS, seed=70)
    assert pair.moved(again).tokens == pair.expected(again)


@pytest.mark.parametrize("salt", ["", "pepper"])
def test_tensors_of_another_prompt_or_salt_are_refused(pair: TensorPair, salt: str) -> None:
    prompt, before, said = prompt_of(200, seed=70), received(pair.d), len(pair.d.log())
    changed = prompt if salt else [*prompt[:9], 5, *prompt[10:]]
    prefilled = pair.p.answer(pair.begin_prefill(prompt))
    assert pair.lost(pair.d.ask(changed, prefilled.params, salt=salt), changed)
    assert received(pair.d) == before
    assert pair.d.log()[said:].count("gets no KV: CONTENT_MISMATCH") == 1


def test_params_that_name_nothing_are_refused(pair: TensorPair) -> None:
    prompt = prompt_of(100, seed=80)
    for params in (
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_prefill": True, "kvgrpc_intent": {"transferKey": "AAAA", "peer": {"address": pair.p.address}}},
        {"do_remote_prefill": True, **pair.intent(os.urandom(16), pair.p), "kvgrpc_intent": 7},
    ):
        assert pair.lost(pair.d.ask(prompt, params), prompt), params
    for params in (
        PREFILL | {"kvgrpc_intent": {"ttl": "-3s"}},
        PREFILL | {"kvgrpc_intent": {"peer": {"address": "nowhere"}}},
    ):
        answer = pair.p.ask(prompt, params, 1)
        assert len(answer.tokens) == 1
        assert answer.params is None


def test_a_prompt_whose_tensors_are_larger_than_the_store_goes_through_it(pair: TensorPair) -> None:
    """Tensors that are kept until they are fetched need room for all of them, so decode computes the prompt then."""
    prompt = prompt_of(1900, seed=90)
    expected, before = pair.expected(prompt), received(pair.d)
    if pair.send == "get":
        assert pair.p.answer(pair.begin_prefill(prompt)).params is None
        return
    assert pair.both(prompt).tokens == expected
    assert received(pair.d) - before == len(prompt) - 1
