"""The scheduler's side without an engine: its messages to vLLM and to the workers."""

import os
from collections import Counter

import pytest
from vllm.v1.request import RequestStatus

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.core.values.content import Item
from kvgrpc.integrations.params import answered_named
from kvgrpc.integrations.vllm.tensors.messages import ExpectTask, LoadTask, TensorStep, WorkerNews
from kvgrpc.integrations.vllm.tensors.options import SendMode, TensorOptions
from kvgrpc.integrations.vllm.tensors.parts import Cut, PromptParts
from kvgrpc.integrations.vllm.tensors.worker_side import TensorWorkerSide
from tests.vllm.cores import BLOCK_TOKENS, PROMPT, Hooks, scheduled
from tests.vllm.tensors.sides import BLOCK_BYTES, DIED, KEY, LAYOUT, PEER, TABLE, giving, held, side_of, taking


@pytest.mark.parametrize("steps", [[40], [16, 24], [7, 7, 7, 7, 7, 5], [15, 17, 8], [39, 1]], ids=str)
def test_parts_go_when_all_of_each_is_computed_whatever_the_steps_are(steps: list[int]) -> None:
    side, request = side_of(), giving("a")
    side.arrived(request)
    puts = []
    for count in steps:
        before = request.num_computed_tokens
        for put in side.step(scheduled({"a": count})).puts:
            assert before < min(len(PROMPT), BLOCK_TOKENS * (put.part.number + 1)) <= before + count
            puts.append((put.part.number, put.blocks, put.to))
        request.num_computed_tokens += count
    assert puts == [(0, [1], PEER), (1, [2], PEER), (2, [3], PEER)]
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert side.finished(request) == answered_named(KEY, "127.0.0.1:5000", puts=True)


def test_both_engines_name_a_part_alike_and_another_prompt_otherwise() -> None:
    cut = Cut(16, 32, 1)
    base = PromptParts(cut, PROMPT, adapter="a", cache_salt="s", items=(Item(b"image", 33, 2),))
    assert base.part(1) == PromptParts(cut, PROMPT, adapter="a", cache_salt="s", items=(Item(b"image", 33, 2),)).part(1)
    others = [
        PromptParts(cut, [9, *PROMPT[1:]], adapter="a", cache_salt="s", items=(Item(b"image", 33, 2),)),
        PromptParts(cut, PROMPT, adapter="b", cache_salt="s", items=(Item(b"image", 33, 2),)),
        PromptParts(cut, PROMPT, adapter="a", items=(Item(b"image", 33, 2),)),
        PromptParts(cut, PROMPT, adapter="a", cache_salt="s", items=(Item(b"other", 33, 2),)),
        PromptParts(Cut(16, 32, 2), PROMPT, adapter="a", cache_salt="s", items=(Item(b"image", 33, 2),)),
    ]
    assert len({prompt.part(1).content_digest for prompt in (base, *others)}) == 6


@pytest.mark.parametrize("computed", [0, 16, 32])
def test_a_request_has_blocks_when_every_rank_has_what_it_lacks(computed: int) -> None:
    side, request = side_of(ranks=2), taking("a")
    side.arrived(request)
    assert side.match(request, computed) == (None, False)
    (expect,) = side.step(scheduled()).expects
    assert [part.number for part in expect.parts] == list(range(computed // 16, 3))
    held(side, "a", len(expect.parts))
    assert side.match(request, computed) == (None, False)
    held(side, "a", len(expect.parts))
    assert side.match(request, computed) == (39 - computed, False)
    side.allocated(request, (TABLE,), 39 - computed)
    step = side.step(scheduled())
    first = computed // 16
    assert step.loads == [LoadTask("a", first, TABLE[first:3])]
    assert (step.left, step.ended, step.expects) == (["a"], [KEY], [])


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_what_does_not_come_fails_or_is_computed(on_loss: OnLoss) -> None:
    side, request = side_of(on_loss=on_loss), taking("a")
    side.arrived(request)
    side.match(request, 16)
    side.hear(WorkerNews(lost={("a", KEY): DIED}))
    tokens, waits = side.match(request, 16)
    assert (tokens, waits) == ((24, True) if on_loss is OnLoss.FAIL else (0, False))
    side.allocated(request, (TABLE,), tokens or 0)
    step = side.step(scheduled())
    assert step.failed == ({"a"} if waits else set())
    assert (step.loads, step.expects, step.ended) == ([], [], [KEY])
    assert side.stats.data["failures"] == {"receive": {"PEER_LOST": 1}}


def test_answers_to_one_prompt_share_its_tensors_until_the_last_one_left() -> None:
    side, requests = side_of(), [taking("a"), taking("b")]
    for request in requests:
        side.arrived(request)
    side.finished(requests[0])
    assert side.step(scheduled()).ended == []
    side.finished(requests[1])
    assert side.step(scheduled()).ended == [KEY]


def test_a_request_is_watched_from_its_arrival_on_until_it_left() -> None:
    side, requests = side_of(), [taking("a"), taking("b", os.urandom(16))]
    for request in requests:
        side.arrived(request)
    side.finished(requests[1])
    assert side.step(scheduled()).watches == [ExpectTask("a", KEY, PEER, [])]
    side.match(requests[0], 0)
    assert side.step(scheduled()).watches == []


def test_no_more_is_waited_for_than_fits_and_nobody_overtakes_the_first() -> None:
    side = side_of(waiting_bytes=5 * BLOCK_BYTES)
    named = (("a", 40), ("b", 40), ("c", 20))
    requests = [taking(name, os.urandom(16), prompt_token_ids=PROMPT[:most], num_tokens=most) for name, most in named]
    for request in requests:
        side.arrived(request)
        assert side.match(request, 0) == (None, False)
    assert [expect.request_id for expect in side.step(scheduled()).expects] == ["a"]
    side.finished(requests[0])
    for request in (requests[2], requests[1], requests[2]):
        side.match(request, 0)
    assert [expect.request_id for expect in side.step(scheduled()).expects] == ["b", "c"]


def test_a_refused_prefill_ends_its_key_so_that_decode_hears_of_it() -> None:
    side = side_of(send=SendMode.GET, store_bytes=1 << 16)
    side.arrived(giving("a"))
    assert side.step(scheduled()).ended == [KEY]
    assert side.finished(giving("a")) is None


@pytest.mark.parametrize(
    ("layers_per_tensor", "pages", "ended"), [(1, 6, []), (1, 5, [KEY]), (2, 3, []), (2, 2, [KEY])]
)
def test_a_prompt_is_refused_that_has_no_room_in_the_store(
    layers_per_tensor: int, pages: int, ended: list[bytes]
) -> None:
    """The prompt has three parts of two layers, each smaller than a page."""
    side = side_of(send=SendMode.GET, store_bytes=pages << 16, layers_per_tensor=layers_per_tensor)
    side.arrived(giving("a"))
    assert side.step(scheduled()).ended == ended


def test_a_key_that_is_given_already_is_not_ended_by_another_request() -> None:
    side = side_of()
    side.arrived(giving("a"))
    side.arrived(giving("b"))
    step = side.step(scheduled({"a": 16, "b": 16}))
    assert (step.ended, [put.request_id for put in step.puts]) == ([], ["a"])


def test_a_prefill_that_comes_again_leaves_the_tensors_of_the_complete_one() -> None:
    side, first = side_of(), giving("a")
    side.arrived(first)
    first.status = RequestStatus.FINISHED_LENGTH_CAPPED
    side.step(scheduled({"a": len(PROMPT)}))
    assert side.finished(first) is not None
    side.arrived(giving("b"))
    side.finished(giving("b"))
    assert side.step(scheduled()).ended == []
    side.reset()
    side.arrived(giving("c"))
    side.finished(giving("c"))
    assert side.step(scheduled()).ended == [KEY]


def test_a_reset_is_done_when_every_worker_has_ended_what_it_put() -> None:
    side = side_of(ranks=2)
    assert side.reset()
    side.arrived(giving("a"))
    side.step(scheduled({"a": 40}))
    assert not side.reset()
    step = side.step(scheduled())
    assert step.forget
    for _ in range(2):
        assert side.has_news
        side.hear(WorkerNews(forgot=Counter({step.number: 1})))
    assert side.reset()


def test_a_defect_ends_kvgrpc_and_what_was_to_be_loaded_is_loaded() -> None:
    side, request, gives = side_of(on_loss=OnLoss.FAIL), taking("a"), giving("b", os.urandom(16))
    for arrived in (request, gives):
        side.arrived(arrived)
    side.match(request, 0)
    side.step(scheduled())
    held(side, "a", 3)
    side.allocated(request, (TABLE,), 39)
    side._blocks = None
    step = Hooks(side).step(scheduled({"b": 40}))
    assert [load.request_id for load in step.loads] == ["a"]
    side.arrived(taking("c"))
    assert side.match(taking("c"), 0) == (40, True)


def test_a_load_that_no_worker_knows_leaves_its_blocks_bad() -> None:
    side, worker = side_of(), TensorWorkerSide(TensorOptions(), LAYOUT)
    side.allocated(taking("a"), (TABLE,), 39)
    worker.begin(side.step(scheduled()))
    assert worker.bad_blocks() == set(TABLE)
    assert worker.bad_blocks() == set()
    worker.step_done(TensorStep())
    assert not worker.heard()
