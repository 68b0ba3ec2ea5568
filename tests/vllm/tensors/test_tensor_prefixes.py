"""Parts that an engine has do not come, and they may leave its prefix cache while the rest arrives."""

import os
from collections.abc import Callable

import pytest
import torch

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.errors import PreconditionFailed, Reason
from kvgrpc.integrations.vllm.tensors.messages import ExpectTask, LoadTask
from kvgrpc.integrations.vllm.tensors.options import SendMode
from tests.vllm.cores import BLOCK_TOKENS, scheduled
from tests.vllm.engines import wait_until
from tests.vllm.tensors.sides import BLOCK_BYTES, KEY, PEER, TABLE, held, side_of, taking
from tests.vllm.tensors.workers import PAGE, PARTS, Worker, prompt_of_blocks, put_of


def test_what_decode_had_and_has_no_more_is_fetched_too() -> None:
    side, request = side_of(send=SendMode.GET), taking("a")
    side.arrived(request)
    side.match(request, 32)
    side.step(scheduled())
    held(side, "a", 1)
    assert side.match(request, 0) == (None, False)
    (expect,) = side.step(scheduled()).expects
    assert [part.number for part in expect.parts] == [0, 1]
    held(side, "a", 1)
    assert side.match(request, 0) == (None, False)
    held(side, "a", 3)
    assert side.match(request, 0) == (39, False)


def test_a_request_that_asked_is_asked_for_what_it_lacks_by_now_though_others_wait_for_room() -> None:
    side, keys = side_of(send=SendMode.GET, waiting_bytes=3 * BLOCK_BYTES), [os.urandom(16) for _ in range(2)]
    first, second = taking("a", keys[0]), taking("b", keys[1])
    for request in (first, second):
        side.arrived(request)
    side.match(first, 32)
    side.step(scheduled())
    held(side, "a", 1, key=keys[0])
    assert side.match(second, 0) == (None, False)
    assert side.match(first, 0) == (None, False)
    (expect,) = side.step(scheduled()).expects
    assert (expect.request_id, [part.number for part in expect.parts]) == ("a", [0, 1])
    held(side, "a", 3, key=keys[0])
    assert side.match(first, 0) == (39, False)
    side.allocated(first, (TABLE,), 39)
    assert side.step(scheduled()).loads == [LoadTask("a", 0, TABLE[:3])]


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_where_what_decode_had_was_refused_it_computes_the_prompt_itself(on_loss: OnLoss) -> None:
    """Nothing failed to come, so no load failed."""
    side, requests = side_of(on_loss=on_loss), [taking("a"), taking("b")]
    for request in requests:
        side.arrived(request)
    side.match(requests[0], 32)
    (expect,) = side.step(scheduled()).expects
    assert (expect.let_go, [part.number for part in expect.parts]) == (2, [2])
    for request in requests:  # the second one has not asked yet
        assert side.match(request, 0) == (0, False)
        side.allocated(request, (TABLE,), 0)
    step = side.step(scheduled())
    assert (step.loads, step.failed, step.expects) == ([], set(), [])


def test_a_load_into_blocks_that_nothing_was_taken_for_fails_and_nothing_else_does(
    worker: Callable[..., Worker],
) -> None:
    p, d, key = worker(send=SendMode.GET), worker(send=SendMode.GET), os.urandom(16)
    for cache in p.caches.values():
        cache.fill_(7)
    p.step(puts=[put_of(key, PARTS[1], [2])])
    d.step(expects=[ExpectTask("a", key, p.address, PARTS[1:])])
    wait_until(lambda: d.hears().held["a", key, 1] == 1)
    d.step(loads=[LoadTask("a", 0, [3, 4, 5])])
    assert d.side.bad_blocks() == {3, 4, 5}
    assert not any(cache.any() for cache in d.caches.values())
    d.step(loads=[LoadTask("a", 2, [5])])
    assert d.side.bad_blocks() == set()
    assert all(torch.all(cache[5] == 7) for cache in d.caches.values())
    assert not d.hears().over


def test_parts_that_decode_has_take_no_room_and_hold_nobody_up(worker: Callable[..., Worker]) -> None:
    """These parts alone would fill both stores twice."""
    p, d = (worker(store_bytes=8 * PAGE, timeout_s=20.0) for _ in "pd")
    key, prompt = os.urandom(16), prompt_of_blocks(14)
    d.step(expects=[ExpectTask("a", key, p.address, [prompt.part(13)], let_go=13)])
    p.step(puts=[put_of(key, prompt.part(number), [number + 1], d.address) for number in range(14)])
    wait_until(lambda: d.hears().held["a", key, 1] == 1)
    assert not d.hears().lost


@pytest.mark.parametrize("asked", [[], [32], [32, 0], [0]], ids=["nothing", "the end", "the end, then all", "all"])
def test_what_decode_leaves_at_its_source_is_given_back(asked: list[int]) -> None:
    """If decode fetched all of it, nothing is left to give back."""
    side, request = side_of(send=SendMode.GET), taking("a")
    side.arrived(request)
    for computed in asked:
        side.match(request, computed)
        side.step(scheduled())
        held(side, "a", 3 - computed // BLOCK_TOKENS)
    side.finished(request)
    step = side.step(scheduled())
    assert step.ended == [KEY]
    assert step.given_back == ({} if 0 in asked else {KEY: PEER})


def test_a_part_that_decode_has_no_use_for_is_given_back_too() -> None:
    """The part has only the last token, which decode computes itself."""
    prompt = list(range(2 * BLOCK_TOKENS + 1))
    request = taking("a", prompt_token_ids=prompt, all_token_ids=prompt, num_tokens=len(prompt))
    side = side_of(send=SendMode.GET)
    side.arrived(request)
    side.match(request, 0)
    (expect,) = side.step(scheduled()).expects
    assert [part.number for part in expect.parts] == [0, 1]
    held(side, "a", 2)
    side.finished(request)
    assert side.step(scheduled()).given_back == {KEY: PEER}


def test_what_one_answer_left_and_another_one_fetched_is_not_given_back() -> None:
    side, requests = side_of(send=SendMode.GET), [taking("a"), taking("b")]
    for request in requests:
        side.arrived(request)
        side.match(request, 0)
    side.finished(requests[0])
    held(side, "b", 3)
    side.finished(requests[1])
    step = side.step(scheduled())
    assert (step.ended, step.given_back) == ([KEY], {})


def test_where_tensors_are_put_nothing_is_given_back() -> None:
    side, request = side_of(), taking("a")
    side.arrived(request)
    side.finished(request)
    step = side.step(scheduled())
    assert (step.ended, step.given_back) == ([KEY], {})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_gives_back_what_the_source_of_its_rank_keeps(worker: Callable[..., Worker], rank: int) -> None:
    p, d, key = worker(rank=rank, send=SendMode.GET), worker(rank=rank, send=SendMode.GET), os.urandom(16)
    p.step(puts=[put_of(key, PARTS[1], [2])])
    wait_until(lambda: p.offers() == 2)
    host, _, port = p.address.rpartition(":")
    d.step(ended=[key], given_back={key: f"{host}:{int(port) - rank}"})
    wait_until(lambda: p.offers() == 0)
    assert not d.hears().over


def test_a_worker_whose_source_may_not_be_dialled_ends_the_request_all_the_same(worker: Callable[..., Worker]) -> None:
    d, key = worker(send=SendMode.GET), os.urandom(16)
    d.step(ended=[key], given_back={key: "192.0.2.1:7000"})
    assert d.side._store is not None
    with pytest.raises(PreconditionFailed) as raised:
        d.side._store.get(key, "a", timeout_s=1.0)
    assert raised.value.reason is Reason.TRANSFER_ENDED
