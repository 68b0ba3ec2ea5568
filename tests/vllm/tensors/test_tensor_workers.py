"""The workers' side without an engine: tensors that are put, taken, loaded and ended."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvgrpc.integrations.vllm.tensors.messages import ExpectTask, LoadTask, TensorStep
from kvgrpc.integrations.vllm.tensors.options import SendMode
from tests.vllm.engines import wait_until
from tests.vllm.tensors.workers import PAGE, PARTS, Worker, put_of


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("layers_per_tensor", [1, 2, 3])
@pytest.mark.parametrize("send", [SendMode.PUT_ASYNC, SendMode.GET])
def test_layers_that_vllm_does_not_come_by_between_are_moved_all_the_same(
    worker: Callable[..., Worker], send: SendMode, layers_per_tensor: int, on_device: bool
) -> None:
    p, d = (worker(send=send, layers_per_tensor=layers_per_tensor, store_on_device=on_device) for _ in "pd")
    key = os.urandom(16)
    for number, cache in enumerate(p.caches.values()):
        cache.copy_(torch.arange(cache.numel()).reshape(cache.shape) % 1000 + number)
    d.step(expects=[ExpectTask("a", key, p.address, PARTS)])
    to = "" if send is SendMode.GET else d.address
    p.step(puts=[put_of(key, PARTS[0], [4, 7], to)])
    p.step(puts=[put_of(key, PARTS[1], [2], to)])
    wait_until(lambda: d.hears().held["a", key, 2] == 1)
    d.step(loads=[LoadTask("a", 1, [9, 3])], left=["a"], ended=[key])
    for mine, theirs in zip(d.caches.values(), p.caches.values(), strict=True):
        assert torch.equal(mine[[9, 3]], theirs[[7, 2]])
        assert not mine[[block for block in range(16) if block not in {9, 3}]].any()
    assert d.side.bad_blocks() == set()


@pytest.mark.parametrize("label", ["", "l" * 300])
@pytest.mark.parametrize("send", [SendMode.PUT_ASYNC, SendMode.GET])
def test_requests_with_long_ids_give_and_take(worker: Callable[..., Worker], send: SendMode, label: str) -> None:
    p, d, key, long = worker(send=send), worker(send=send), os.urandom(16), "r" * 300
    d.step(expects=[ExpectTask(long, key, p.address, PARTS[:1], label=label)])
    put = put_of(key, PARTS[0], [4, 7], "" if send is SendMode.GET else d.address)
    p.step(puts=[replace(put, request_id=long)])
    wait_until(lambda: d.hears().held[long, key, 1] == 1 or bool(d.heard.lost))
    assert not d.heard.lost


@pytest.mark.parametrize("send", [SendMode.PUT_ASYNC, SendMode.GET])
def test_engines_that_stack_other_numbers_of_layers_hear_of_it_at_once(
    worker: Callable[..., Worker], send: SendMode
) -> None:
    p, d, key = worker(send=send, layers_per_tensor=2), worker(send=send), os.urandom(16)
    d.step(expects=[ExpectTask("a", key, p.address, PARTS)])
    p.step(puts=[put_of(key, PARTS[0], [4, 7], "" if send is SendMode.GET else d.address)])
    assert d.loses(key).startswith("CONTENT_MISMATCH")


def test_a_tensor_goes_when_the_last_of_its_layers_is_computed(worker: Callable[..., Worker]) -> None:
    p, key = worker(send=SendMode.GET, layers_per_tensor=2), os.urandom(16)
    step = TensorStep(puts=[put_of(key, PARTS[0], [4, 7])])
    p.side.begin(step)
    p.side.layer_done("0", step)
    assert p.side._sides is not None
    assert p.side._sides[0].queued_bytes == 0
    p.side.layer_done("1", step)
    assert p.side._sides[0].queued_bytes > 0
    wait_until(lambda: p.offers() == 1)
    p.side.step_done(step)
    p.step(TensorStep(puts=[put_of(key, PARTS[1], [2])]))
    wait_until(lambda: p.offers() == 2)


def test_a_load_begins_within_a_part_of_several_layers(worker: Callable[..., Worker]) -> None:
    p, d = (worker(send=SendMode.GET, layers_per_tensor=2) for _ in "pd")
    key = os.urandom(16)
    for number, cache in enumerate(p.caches.values()):
        cache[7] = number + 1
    p.step(puts=[put_of(key, PARTS[0], [4, 7])])
    d.step(expects=[ExpectTask("a", key, p.address, PARTS[:1])])
    wait_until(lambda: d.hears().held["a", key, 1] == 1)
    d.step(loads=[LoadTask("a", 1, [9])], left=["a"], ended=[key])
    assert d.side.bad_blocks() == set()
    for number, cache in enumerate(d.caches.values()):
        assert torch.all(cache[9] == number + 1)
        assert not cache[[block for block in range(16) if block != 9]].any()


def test_a_source_whose_store_stays_full_goes_on_in_time_and_its_consumer_hears_of_it(
    worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    p, d, key = worker(send=SendMode.GET, store_bytes=PAGE, timeout_s=1.0), worker(send=SendMode.GET), os.urandom(16)
    began = time.monotonic()
    p.step(puts=[put_of(key, PARTS[0], [4, 7])])
    wait_until(lambda: "gives no KV" in caplog.text)  # before anybody fetches the layer that blocks the other one
    assert time.monotonic() - began < 20.0, "a lease's time, or a registration's"
    d.step(expects=[ExpectTask("a", key, p.address, PARTS[:1])])
    assert d.loses(key).startswith("TRANSFER_ENDED")
    assert not p.hears().over


def test_a_request_whose_source_is_gone_is_lost_though_nothing_was_put(worker: Callable[..., Worker]) -> None:
    p, d, key = worker(send=SendMode.PUT), worker(send=SendMode.PUT), os.urandom(16)
    d.step(expects=[ExpectTask("a", key, p.address, PARTS)])
    wait_until(lambda: p.waits() == 1)
    p.side.close()
    assert d.loses(key).startswith(("INCARNATION_CHANGED", "PEER_UNREACHABLE"))


def test_a_worker_whose_store_is_over_loads_nothing_and_says_so(worker: Callable[..., Worker]) -> None:
    p = worker()
    assert p.side._store is not None
    p.side._store.close()
    p.step(puts=[put_of(os.urandom(16), PARTS[0], [4, 7])])
    assert "lost its store" in p.hears().over
    p.step(loads=[LoadTask("a", 0, [3, 4])])
    assert p.side.bad_blocks() == {3, 4}


@pytest.mark.parametrize("send", [SendMode.PUT, SendMode.PUT_ASYNC])
def test_a_reset_ends_what_lies_at_decode_and_nobody_took(
    worker: Callable[..., Worker], send: SendMode, caplog: pytest.LogCaptureFixture
) -> None:
    p, d, gone = worker(send=send), worker(send=send), worker(send=send)
    keys = [os.urandom(16) for _ in range(3)]
    gone_address = gone.address
    p.step(number=1, puts=[put_of(keys[0], PARTS[1], [2], d.address), put_of(keys[2], PARTS[1], [2], gone_address)])
    wait_until(lambda: d.stored() == 2)
    gone.side.close()
    p.step(number=2, forget=True, puts=[put_of(keys[1], PARTS[1], [2], d.address)])
    assert p.hears().forgot[2] == 1
    (unheard,) = [text for text in caplog.messages if "was not told of the reset" in text]
    assert unheard.startswith(gone_address)
    d.step(expects=[ExpectTask(str(i), key, p.address, PARTS[1:]) for i, key in enumerate(keys[:2])])
    assert d.loses(keys[0], "0").startswith("TRANSFER_ENDED")
    wait_until(lambda: d.hears().held["1", keys[1], 1] == 1)


def test_a_reset_ends_what_is_kept(worker: Callable[..., Worker]) -> None:
    p, d = worker(send=SendMode.GET), worker(send=SendMode.GET)
    keys = [os.urandom(16) for _ in range(2)]
    p.step(number=1, puts=[put_of(keys[0], PARTS[1], [2])])
    p.step(number=2, forget=True, puts=[put_of(keys[1], PARTS[1], [2])])
    assert p.hears().forgot[2] == 1
    d.step(expects=[ExpectTask(str(i), key, p.address, PARTS[1:]) for i, key in enumerate(keys)])
    assert d.loses(keys[0], "0").startswith("TRANSFER_ENDED")
    wait_until(lambda: d.hears().held["1", keys[1], 1] == 1)
