"""Decode learns at once of tensors that will not come, and nobody else's tensors end with them."""

import os
import time
from collections.abc import Callable

import pytest
import torch

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.engine.tensors import TensorStore
from kvgrpc.integrations.vllm.tensors.messages import ExpectTask, LoadTask, TensorStep, WorkerNews
from kvgrpc.integrations.vllm.tensors.options import SendMode, TensorOptions, WhenFull
from kvgrpc.integrations.vllm.tensors.parts import PromptPart
from kvgrpc.integrations.vllm.tensors.putter import TensorPutter
from tests.vllm.cores import scheduled
from tests.vllm.engines import wait_until
from tests.vllm.tensors.sides import DIED, KEY, giving, held, side_of, taking
from tests.vllm.tensors.workers import PAGE, PARTS, Worker, put_of


def test_a_prefill_that_vllm_refused_ends_its_key() -> None:
    side = side_of()
    side.arrived(giving("a", abort_immediately=True))
    assert side.step(scheduled()).ended == [KEY]


def test_a_prefill_that_vllm_refused_does_not_end_what_another_one_gives() -> None:
    side = side_of()
    side.arrived(giving("a"))
    side.arrived(giving("b", abort_immediately=True))
    step = side.step(scheduled({"a": 16}))
    assert (step.ended, [put.request_id for put in step.puts]) == ([], ["a"])


def test_a_prefill_that_is_aborted_before_anything_is_put_ends_its_key() -> None:
    side, request = side_of(), giving("a")
    side.arrived(request)
    assert side.finished(request) is None
    assert side.has_news
    assert side.step(scheduled()).ended == [KEY]
    assert not side.has_news


def test_a_reset_before_anything_is_put_ends_the_key() -> None:
    side = side_of()
    side.arrived(giving("a"))
    assert side.reset()
    assert side.has_news
    step = side.step(scheduled({"a": 16}))
    assert (step.ended, step.puts) == ([KEY], [])


def test_an_engine_without_kvgrpc_ends_what_it_was_giving() -> None:
    side = side_of()
    side.arrived(giving("a"))
    side.hear(WorkerNews(over="its store died"))
    assert side.step(scheduled({"a": 16})).ended == [KEY]
    side.arrived(giving("b", b"another key, too"))
    assert side.step(scheduled({"b": 16})).ended == [b"another key, too"]


def test_a_reset_is_done_though_the_store_died(worker: Callable[..., Worker]) -> None:
    side, request, p = side_of(send=SendMode.GET, on_loss=OnLoss.FAIL), giving("a"), worker(send=SendMode.GET)
    side.arrived(request)
    p.step(side.step(scheduled({"a": 40})))
    assert p.side._store is not None
    p.side._store.close()
    assert not side.reset()
    p.step(side.step(scheduled()))
    assert p.heard.over
    side.hear(p.heard)
    assert side.reset()
    side.arrived(taking("b"))
    assert side.match(taking("b"), 0) == (40, True)


@pytest.mark.parametrize("on_loss", list(OnLoss))
def test_what_is_said_of_a_request_that_left_is_not_taken_for_the_next_one_of_its_id(on_loss: OnLoss) -> None:
    side, keys = side_of(on_loss=on_loss), [os.urandom(16) for _ in range(2)]
    requests = [taking("a", key) for key in keys]
    for request in requests:
        side.finished(request)  # the earlier request
        side.arrived(request)
        side.match(request, 0)
        side.step(scheduled())
    held(side, "a", 3, key=keys[0])
    side.hear(WorkerNews(lost={("a", keys[0]): DIED}))
    assert side.match(requests[1], 0) == (None, False)
    held(side, "a", 3, key=keys[1])
    assert side.match(requests[1], 0) == (39, False)


def test_a_worker_that_is_over_ends_its_store_so_that_others_hear_of_it(worker: Callable[..., Worker]) -> None:
    p, d, key = worker(), worker(), os.urandom(16)
    d.step(expects=[ExpectTask("a", key, p.address, PARTS)])
    wait_until(lambda: p.waits() == 1)
    p.step(puts=[put_of(key, PARTS[0], [4, 10_000], d.address)])  # no such block
    assert "lost its store" in p.hears().over
    assert d.loses(key).startswith(("INCARNATION_CHANGED", "PEER_UNREACHABLE"))
    p.step(loads=[LoadTask("b", 0, [3, 4])])
    assert p.side.bad_blocks() == {3, 4}


def test_a_second_prompt_under_a_key_does_not_end_the_first(worker: Callable[..., Worker]) -> None:
    p, d, key = worker(send=SendMode.GET), worker(send=SendMode.GET), os.urandom(16)
    p.caches["0"][2], p.caches["0"][3] = 7, 8
    p.step(puts=[put_of(key, PARTS[1], [2])])
    p.step(puts=[put_of(key, PromptPart(1, 2, 1, b"another prompt"), [3])])
    d.step(expects=[ExpectTask("a", key, p.address, PARTS[1:])])
    wait_until(lambda: d.hears().held["a", key, 1] == 1)
    d.step(loads=[LoadTask("a", 2, [5])])
    assert torch.all(d.caches["0"][5] == 7)


def test_where_steps_are_to_wait_one_waits_once_for_a_store_that_stays_full_and_queues_no_more_than_it_may() -> None:
    caches, timeout_s = {name: torch.zeros(16, 4, dtype=torch.float16) for name in "0123456789"}, 1.0
    options = TensorOptions(
        send=SendMode.GET, timeout_s=timeout_s, layers_per_tensor=1, queued_bytes=1, when_full=WhenFull.WAIT
    )
    with TensorStore.launch(store_bytes=PAGE, weights_revision="weights") as store:
        sending = TensorPutter(store, options, 0, caches)
        step = TensorStep(puts=[put_of(os.urandom(16), PARTS[1], [2]) for _ in range(8)])
        began = time.monotonic()
        for layer in caches:
            sending.layer_done(layer, step)
            assert sending.queued_bytes == 8
        sending.step_done(step)
        assert timeout_s <= time.monotonic() - began < len(caches) * timeout_s, "not once for each layer"


def test_a_full_store_holds_no_step_up_and_what_the_queue_has_no_room_for_is_given_up(
    worker: Callable[..., Worker],
) -> None:
    """The store has room for one of these requests, and the queue for another one."""
    d, keys = worker(send=SendMode.GET, timeout_s=60.0), [os.urandom(16) for _ in range(3)]
    nbytes = sum(cache[0].nbytes for cache in d.caches.values())
    p = worker(send=SendMode.GET, store_bytes=2 * PAGE, queued_bytes=nbytes, timeout_s=600.0)
    for key in keys:
        p.step(puts=[put_of(key, PARTS[1], [2])])
    d.step(expects=[ExpectTask(name, key, p.address, PARTS[1:]) for name, key in zip("abc", keys, strict=True)])
    assert d.loses(keys[2], "c").startswith("TRANSFER_ENDED")
    wait_until(lambda: d.hears().held["a", keys[0], 1] == d.hears().held["b", keys[1], 1] == 1)
    assert not p.hears().over
