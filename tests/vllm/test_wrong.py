"""Wrong params of routers and clients fail as configured, harm nobody else, and never give another request's tokens."""

from typing import Any

import pytest

from tests.vllm.engines import PREFILL, Pair, prompt_of, wait_until

PROMPT = prompt_of(100, seed=3)
PUSH = {"mode": "TRANSFER_MODE_PUSH"}


def test_swapped_grants_fail_and_both_are_good_for_their_own_prompts_still(pair: Pair) -> None:
    prompts = [prompt_of(100, seed=80), prompt_of(100, seed=81)]
    expected = [pair.expected(prompt) for prompt in prompts]
    params = [pair.prefilled(prompt) for prompt in prompts]
    assert [pair.d.ask(prompt, other).failed for prompt, other in zip(prompts, params[::-1], strict=True)] == [True] * 2
    assert [pair.d.ask(prompt, own).tokens for prompt, own in zip(prompts, params, strict=True)] == expected


def test_a_grant_is_used_once(pair: Pair) -> None:
    expected, params = pair.expected(PROMPT), pair.prefilled(PROMPT)
    assert pair.d.ask(PROMPT, params).tokens == expected
    pair.d.let_go()
    wait_until(lambda: pair.p.held() == {}, pair.p.held)
    wait_until(pair.d.rests)
    assert pair.d.ask(PROMPT, params).failed


def test_what_came_too_late_fails(pair: Pair) -> None:
    answer = pair.p.ask(PROMPT, {**PREFILL, "kvgrpc_intent": {"ttl": "0.2s"}}, 1)
    wait_until(lambda: pair.p.held() == {}, pair.p.held)
    assert pair.d.ask(PROMPT, answer.params).failed


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "kvgrpc_grant": "nonsense"},
        {"do_remote_prefill": True, "kvgrpc_grant": 7},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_prefill": True, "kvgrpc_intent": "push"},
        {"do_remote_prefill": True, "kvgrpc_intent": PUSH},
        {
            "do_remote_prefill": True,
            "kvgrpc_intent": {"mode": "TRANSFER_MODE_PUSH"},
            "transfer_id": "x",
            "remote_host": 1,
        },
    ],
    ids="+".join,
)
def test_a_decode_request_whose_params_are_wrong_fails_alone(pair: Pair, params: dict[str, Any]) -> None:
    assert pair.d.ask(PROMPT, params).failed
    assert pair.d.ask(PROMPT, None).tokens == pair.expected(PROMPT)


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "kvgrpc_intent": 7},
        {"do_remote_decode": True, "kvgrpc_grant": "nonsense"},
        {"x": [1, {"y": None}]},
    ],
)
def test_a_prefill_request_with_wrong_params_is_computed_and_kept(pair: Pair, params: dict[str, Any]) -> None:
    answer = pair.p.ask(PROMPT, params)
    assert (answer.tokens, answer.params) == (pair.expected(PROMPT), None)
    assert pair.p.held() == {}


def test_a_flag_that_is_not_true_asks_for_nothing_and_names_a_turn_that_is_offered(pair: Pair) -> None:
    expected, before = pair.expected(PROMPT), pair.d.counts()["external_hits"]
    answer = pair.p.ask(PROMPT, {"do_remote_decode": "yes"})
    assert answer.tokens == expected
    assert (answer.params["do_remote_prefill"], answer.params["do_remote_decode"]) == (False, True)
    assert not pair.d.ask([*PROMPT, *expected, 77], answer.params, 1).failed
    assert pair.d.counts()["external_hits"] - before == len(PROMPT) + len(expected) - 1
