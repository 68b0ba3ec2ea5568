"""Requests that vLLM made from one give its tensors once, and take their own."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.integrations.params import answered_named
from kvgrpc.integrations.vllm.tensors.scheduler_side import TensorSchedulerSide
from tests.vllm.cores import PROMPT, request_of, scheduled
from tests.vllm.engines import PREFILL
from tests.vllm.tensors.sides import KEY, giving, side_of, taking

ANSWERS = "0_cmpl-x-0-0a1b2c3d", "1_cmpl-x-0-0a1b2c3d"
"""Names that vLLM gives two answers to one prompt."""
PROMPTS = "cmpl-x-0-0a1b2c3d", "cmpl-x-1-4e5f6071"
"""Names that vLLM gives two prompts of one list."""


def computed(side: TensorSchedulerSide, requests: list[Any]) -> list[str]:
    """Computes all of each request in one step. Returns the requests whose tensors are put."""
    for request in requests:
        side.arrived(request)
    puts = side.step(scheduled({request.request_id: len(PROMPT) for request in requests})).puts
    for request in requests:
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(PROMPT)
    return sorted({put.request_id for put in puts})


@pytest.mark.parametrize("named", [False, True])
def test_answers_to_one_prompt_give_it_once_and_are_told_of_it_alike(named: bool) -> None:
    side = side_of()
    requests = [giving(name) if named else request_of(name, PREFILL) for name in ANSWERS]
    assert computed(side, requests) == [ANSWERS[0]]
    first, second = [side.finished(request) for request in requests]
    assert first == second
    assert first is not None
    if named:
        assert first == answered_named(KEY, "127.0.0.1:5000", puts=True)
    assert [request.max_tokens for request in requests] == [1, 1]
    assert side.stats.data["sent"] == 1
    assert side.stats.data["refused"] == 0


def test_an_answer_that_failed_is_told_of_nothing() -> None:
    side, requests = side_of(), [request_of(name, PREFILL) for name in ANSWERS]
    computed(side, requests)
    assert side.finished(requests[0])
    requests[1].status = RequestStatus.FINISHED_ABORTED
    assert side.finished(requests[1]) is None


def test_of_a_list_of_prompts_the_one_that_the_router_hears_of_is_given() -> None:
    side, requests = side_of(), [request_of(name, PREFILL) for name in PROMPTS]
    assert computed(side, requests) == [PROMPTS[0]]
    assert [bool(side.finished(request)) for request in requests] == [True, False]


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_other_prompts_of_a_list_are_computed(on_loss: OnLoss) -> None:
    side, (first, second) = side_of(on_loss=on_loss), [taking(name) for name in PROMPTS]
    for request in (first, second):
        side.arrived(request)
    assert side.match(first, 0) == (None, False)
    assert side.match(second, 0) == (0, False)
    side.finished(second)
    (expect,) = side.step(scheduled()).expects
    assert expect.request_id == PROMPTS[0]
    assert side.stats.data["refused"] == 0
