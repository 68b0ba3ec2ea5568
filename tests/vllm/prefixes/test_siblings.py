"""Requests that vLLM made from one share what it gives and what it takes."""

import os
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvgrpc.integrations.params import answered_push
from kvgrpc.integrations.vllm.siblings import family_of, is_told_of
from tests.vllm.clear import clear_prompt
from tests.vllm.cores import PROMPT, Core, Cores, request_of
from tests.vllm.engines import BLOCK_TOKENS, PREFILL, Pair, pushed, wait_until

ANSWERS = "0_cmpl-x-0-0a1b2c3d", "1_cmpl-x-0-0a1b2c3d"
"""Names that vLLM gives two answers to one prompt."""
PROMPTS = "cmpl-x-0-0a1b2c3d", "cmpl-x-1-4e5f6071"
"""Names that vLLM gives two prompts of one list."""
KEY = b"k" * 16


def left(core: Core, request: Any) -> Any:
    """Computes a prompt. Returns the params that its answer has for the router."""
    blocks = core.allocate()
    core.hooks.allocated(request, (blocks,), 0)
    return core.left(request, blocks)


@pytest.mark.parametrize(
    ("request_id", "family", "told_of"),
    [
        (ANSWERS[1], PROMPTS[0], True),
        (PROMPTS[1], PROMPTS[1], False),
        (f"1_{PROMPTS[1]}", PROMPTS[1], False),
        ("cmpl-a-1-0", "cmpl-a-1-0", True),
        ("chatcmpl-a-1-0a1b2c3d", "chatcmpl-a-1-0a1b2c3d", True),
        ("x_1", "x_1", True),
    ],
)
def test_names_tell_what_vllm_made_of_one_request(request_id: str, family: str, told_of: bool) -> None:
    assert (family_of(request_id), is_told_of(request_id)) == (family, told_of)


def test_answers_to_one_prompt_give_it_once_and_are_told_of_it_whichever_ends_last(cores: Cores) -> None:
    p, _ = cores
    first, second = (request_of(name, PREFILL) for name in ANSWERS)
    for request in (first, second):
        p.hooks.arrived(request)
    given, shown = left(p, first), left(p, second)
    assert given["kvgrpc_grant"] == shown["kvgrpc_grant"]
    assert p.used() == 3, "those of the first one"


@pytest.mark.parametrize("push", [False, True])
def test_an_answer_that_arrives_when_all_others_have_left_gives_nothing_again(cores: Cores, push: bool) -> None:
    p, _ = cores
    first, second = (request_of(name, {**PREFILL, **(pushed(KEY) if push else {})}) for name in ANSWERS)
    p.hooks.arrived(first)
    given = left(p, first)
    p.hooks.arrived(second)
    assert left(p, second) == given
    assert p.used() == 3, "those of the first one"


def test_a_request_that_comes_again_under_its_name_gives_again(cores: Cores) -> None:
    p, d = cores
    given = []
    for number in range(2):
        request = request_of(ANSWERS[0], PREFILL)
        p.hooks.arrived(request)
        given.append(left(p, request))
        d.begin(request_of(f"d-{number}", given[-1]))
        wait_until(lambda: d.step() and p.step() and p.used() == 0)
    assert given[0]["kvgrpc_grant"] != given[1]["kvgrpc_grant"]


def test_an_answer_that_arrives_when_the_one_that_took_has_left_takes_nothing_again(cores: Cores) -> None:
    p, d = cores
    params = p.prefilled("p")
    first, second = (request_of(name, params) for name in ANSWERS)
    blocks = d.begin(first)
    wait_until(lambda: d.step() and d.told.loaded == {ANSWERS[0]})
    d.step({ANSWERS[0]: 1})
    d.left(first, blocks)
    d.hooks.arrived(second)
    assert d.hooks.match(second, 0) == 0, "what its prompt lacks in the prefix cache is computed"
    assert not d.told.failed
    wait_until(lambda: p.step() and p.used() == 0)


def test_an_answer_that_failed_is_told_of_nothing(cores: Cores) -> None:
    p, _ = cores
    first, second = (request_of(name, PREFILL) for name in ANSWERS)
    for request in (first, second):
        p.hooks.arrived(request)
    assert left(p, first)
    second.status = RequestStatus.FINISHED_ABORTED
    assert p.hooks.finished(second, ([],)) == (False, None)


def test_of_a_list_of_prompts_only_what_the_router_hears_of_is_given(cores: Cores) -> None:
    p, _ = cores
    first, second = (request_of(name, PREFILL) for name in PROMPTS)
    second.max_tokens = 64
    for request in (first, second):
        p.hooks.arrived(request)
    assert second.max_tokens == 1
    assert left(p, second) == {}
    assert p.used() == 0
    assert left(p, first)


def test_answers_to_one_prompt_are_pushed_and_reserved_for_once(cores: Cores) -> None:
    p, d = cores
    sources = [request_of(name, {**PREFILL, **pushed(KEY)}) for name in ANSWERS]
    for source in sources:
        p.tables[source.request_id] = p.computing(source)
    p.step({source.request_id: 32 for source in sources})
    answers = [p.left(source, p.tables[source.request_id]) for source in sources]
    assert answers == [answered_push(KEY, "P", p.side.engine.address, 40)] * 2, "whichever of them its router hears"
    first, second = (
        request_of(name, {"do_remote_prefill": True, **pushed(KEY, p.side.engine.address)}) for name in ANSWERS
    )
    d.begin(first)
    d.hooks.arrived(second)
    assert d.hooks.match(second, 0) is None
    wait_until(lambda: p.step() and d.step() and d.told.loaded == {ANSWERS[0]})
    assert not d.told.failed
    wait_until(lambda: p.step() and p.used() == 0)


def test_answers_to_one_prompt_take_it_once_and_find_it_when_the_first_one_goes_on(cores: Cores) -> None:
    p, d = cores
    params = p.prefilled("p")
    first, second = (request_of(name, params) for name in ANSWERS)
    d.begin(first)
    d.hooks.arrived(second)
    wait_until(lambda: d.step() and d.told.loaded == {ANSWERS[0]})
    assert not d.told.failed
    assert d.hooks.match(second, 0) is None, "it is not in the prefix cache yet"
    d.step({ANSWERS[0]: 1})
    assert d.hooks.match(second, 32) == 0
    d.hooks.allocated(second, (d.allocate(),), 0)
    wait_until(lambda: p.step() and p.used() == 0)


@pytest.mark.parametrize("began", [False, True])
def test_an_answer_whose_first_one_left_is_computed(cores: Cores, began: bool) -> None:
    p, d = cores
    params = p.prefilled("p")
    first, second = (request_of(name, params) for name in ANSWERS)
    d.hooks.arrived(first)
    d.hooks.arrived(second)
    if began:
        d.hooks.allocated(first, (d.allocate(),), d.hooks.match(first, 0) or 0)
    assert d.hooks.match(second, 0) is None
    d.hooks.finished(first, ([],))
    assert d.hooks.match(second, 0) == 0


def test_where_nothing_is_cached_nobody_waits(cores: Cores) -> None:
    p, d = cores
    d.pool.enable_caching = False
    params = p.prefilled("p")
    first, second = (request_of(name, params) for name in ANSWERS)
    d.hooks.arrived(first)
    d.hooks.arrived(second)
    assert d.hooks.match(second, 0) == 0
    assert d.hooks.match(first, 0) == len(PROMPT)


def test_requests_that_take_something_else_under_the_same_names_wait_for_nobody(cores: Cores) -> None:
    p, d = cores
    one, two = p.prefilled("p"), p.prefilled("q")
    first, second = request_of(ANSWERS[0], one), request_of(ANSWERS[1], two)
    d.begin(first)
    d.begin(second)
    wait_until(lambda: d.step() and d.told.loaded == set(ANSWERS))
    assert not d.told.failed


def test_other_prompts_of_a_list_are_computed(cores: Cores) -> None:
    p, d = cores
    params = p.prefilled("p")
    other = PROMPT[::-1]
    d.hooks.arrived(request_of(PROMPTS[1], params, prompt_token_ids=other, all_token_ids=other))
    assert d.hooks.match(request_of(PROMPTS[1], params), 0) == 0
    d.begin(request_of(PROMPTS[0], params))
    wait_until(lambda: d.step() and d.told.loaded == {PROMPTS[0]})
    assert not d.told.failed


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("answers", [2, 4])
def test_several_answers_have_the_tokens_of_one_engine_and_one_transfer(pair: Pair, answers: int, push: bool) -> None:
    prompt, expected = clear_prompt(pair, 5 * BLOCK_TOKENS + 7, answers, seed=900 + answers + push)
    before, key = pair.d.counts(), os.urandom(16)
    if push:
        source = pair.p.begin(prompt, {**PREFILL, **pushed(key)}, 1, n=answers)
        answer = pair.d.ask(prompt, {"do_remote_prefill": True, **pushed(key, pair.p.address)}, n=answers)
        assert not pair.p.answer(source).failed
    else:
        answer = pair.d.ask(prompt, pair.prefilled(prompt, n=answers), n=answers)
    assert [answer.tokens, *answer.others] == [expected] * answers
    after = pair.d.counts()
    assert after["received"] - before.get("received", 0) == 1
    assert after["received_tokens"] - before.get("received_tokens", 0) == len(prompt)
    wait_until(lambda: pair.p.held() == {}, pair.p.held)
