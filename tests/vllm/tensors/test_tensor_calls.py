"""Calls for tensors that exceed a lead's limit of waiting calls, or wait for tensors that never come."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.engine.tensors import TensorStore
from kvgrpc.integrations.vllm.tensors import asker
from kvgrpc.integrations.vllm.tensors.asker import CALLS_MAX
from kvgrpc.integrations.vllm.tensors.messages import ExpectTask, LoadTask
from kvgrpc.integrations.vllm.tensors.options import SendMode
from tests.vllm.engines import wait_until
from tests.vllm.tensors.workers import PARTS, Worker, prompt_of_blocks, put_of


def test_more_than_a_lead_lets_wait_are_asked_for_in_turn_and_nobody_is_lost(worker: Callable[..., Worker]) -> None:
    """The first request's tensors never come, and its calls fill the limit when the second request comes."""
    p, d, keys = worker(), worker(timeout_s=60.0), [os.urandom(16) for _ in range(2)]
    prompt = prompt_of_blocks(2100)
    d.step(expects=[ExpectTask("a", keys[0], "", [prompt.part(number) for number in range(2100)])])
    wait_until(lambda: d.waits() == CALLS_MAX)
    p.step(puts=[put_of(keys[1], PARTS[0], [4, 7], d.address)])
    d.step(expects=[ExpectTask("b", keys[1], "", PARTS[:1])])
    wait_until(lambda: d.hears().held["b", keys[1], 1] == 1)
    assert d.waits() <= CALLS_MAX
    assert not d.hears().lost


def test_calls_that_are_refused_for_being_one_too_many_are_made_again(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, key, prompt = worker(), os.urandom(16), prompt_of_blocks(15)
    monkeypatch.setattr(asker, "CALL_S", 0.5)
    monkeypatch.setenv("KVGRPC_TENSORS_WAITS", "8")
    d = worker()
    parts = [prompt.part(number) for number in range(15)]
    d.step(expects=[ExpectTask("a", key, p.address, parts)])
    wait_until(lambda: d.waits() == 8)
    wait_until(lambda: d.waits() <= 4)  # half of the limit, because puts need room too
    assert max(d.waits() for _ in range(30)) <= 4
    p.step(puts=[put_of(key, part, [part.number], d.address) for part in parts])
    wait_until(lambda: d.hears().held["a", key, 15] == 1)
    assert not d.hears().lost


def test_a_source_at_which_too_many_wait_is_not_gone(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, keys = worker(), worker(), [os.urandom(16) for _ in range(2)]
    monkeypatch.setenv("KVGRPC_TENSORS_WAITS", "1")
    p = worker()
    first.step(expects=[ExpectTask("a", keys[0], p.address, PARTS)])
    wait_until(lambda: p.waits() == 1)
    second.step(expects=[ExpectTask("b", keys[1], p.address, PARTS)])
    p.step(puts=[put_of(keys[1], part, [4, 7][: part.blocks], second.address) for part in PARTS])
    wait_until(lambda: second.hears().held["b", keys[1], 2] == 1)
    assert not second.hears().lost
    p.step(ended=[keys[0]])
    assert first.loses(keys[0]).startswith("TRANSFER_ENDED")


def test_what_does_not_come_in_time_is_lost_and_only_that(worker: Callable[..., Worker]) -> None:
    d, key = worker(timeout_s=1.0), os.urandom(16)
    d.step(expects=[ExpectTask("a", key, "", PARTS)])
    assert d.loses(key).startswith("DEADLINE")
    assert not d.hears().over


def test_a_load_of_what_is_on_its_way_fails_and_the_worker_goes_on(worker: Callable[..., Worker]) -> None:
    p, d, key = worker(), worker(), os.urandom(16)
    d.step(expects=[ExpectTask("a", key, "", PARTS)])
    d.step(loads=[LoadTask("a", 0, [3, 4, 5])])
    assert d.side.bad_blocks() == {3, 4, 5}
    p.step(puts=[put_of(key, PARTS[0], [4, 7], d.address), put_of(key, PARTS[1], [2], d.address)])
    wait_until(lambda: d.hears().held["a", key, 2] == 1)
    d.step(loads=[LoadTask("a", 0, [3, 4, 5])])
    assert d.side.bad_blocks() == set()
    assert not d.hears().over


def test_a_request_that_comes_again_under_its_id_is_told_anew(worker: Callable[..., Worker]) -> None:
    p, d, key = worker(send=SendMode.GET), worker(send=SendMode.GET), os.urandom(16)
    p.step(puts=[put_of(key, PARTS[1], [2])])
    d.step(expects=[ExpectTask(name, key, p.address, PARTS[1:]) for name in "ab"])
    wait_until(lambda: d.hears().held["a", key, 1] == 1)
    d.step(left=["a"])
    d.step(expects=[ExpectTask("a", key, p.address, PARTS[1:])])
    wait_until(lambda: d.hears().held["a", key, 1] == 2)


def test_the_tensors_of_one_rank_are_not_taken_for_those_of_another(worker: Callable[..., Worker]) -> None:
    p, d, key = worker(rank=1, send=SendMode.GET), worker(send=SendMode.GET, timeout_s=2.0), os.urandom(16)
    p.step(puts=[put_of(key, PARTS[1], [2])])
    d.step(expects=[ExpectTask("a", key, p.address, PARTS[1:])])
    assert d.loses(key).startswith("DEADLINE")


@pytest.mark.parametrize("send", [SendMode.PUT_ASYNC, SendMode.GET])
def test_a_call_whose_time_is_over_is_made_again_until_its_tensor_comes(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, send: SendMode
) -> None:
    monkeypatch.setattr(asker, "CALL_S", 0.1)
    p, d, key = worker(send=send), worker(send=send), os.urandom(16)
    made, get_async = Counter[str](), TensorStore.get_async

    def counted(store: TensorStore, key: bytes, name: str | int, **more: Any) -> Any:
        made[str(name)] += 1
        return get_async(store, key, name, **more)

    monkeypatch.setattr(TensorStore, "get_async", counted)
    d.step(expects=[ExpectTask("a", key, p.address, PARTS[1:])])
    wait_until(lambda: len(made) > 1 and min(made.values()) > 5)
    assert not d.hears().lost
    p.step(puts=[put_of(key, PARTS[1], [2], "" if send is SendMode.GET else d.address)])
    wait_until(lambda: d.hears().held["a", key, 1] == 1)
    assert not d.hears().lost


@pytest.mark.parametrize("send", [SendMode.PUT_ASYNC, SendMode.GET])
def test_what_a_request_will_take_lasts_while_it_waits_in_the_queue(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, send: SendMode
) -> None:
    """Two tensors have the same TTL; the one put first outlives the other because it is watched."""
    monkeypatch.setattr(asker, "CALL_S", 0.3)
    p, d, keys = worker(send=send), worker(send=send), [os.urandom(16) for _ in range(2)]
    keeps = p.offers if send is SendMode.GET else d.stored
    d.step(watches=[ExpectTask("a", keys[0], p.address, [])])
    for number, key in enumerate(keys, 1):
        p.step(puts=[put_of(key, PARTS[1], [2], "" if send is SendMode.GET else d.address, ttl_s=3.0)])
        wait_until(lambda number=number: keeps() == 2 * number)  # type: ignore[misc]
    wait_until(lambda: keeps() == 2)
    d.step(expects=[ExpectTask("a", keys[0], p.address, PARTS[1:])])
    wait_until(lambda: d.hears().held["a", keys[0], 1] == 1)


def test_a_prefill_that_keeps_what_decode_waits_for_is_asked_for_it(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker, "CALL_S", 0.3)
    p, d, key = worker(), worker(), os.urandom(16)
    d.step(expects=[ExpectTask("a", key, p.address, PARTS[1:])])
    p.step(puts=[put_of(key, PARTS[1], [2])])
    wait_until(lambda: d.hears().held["a", key, 1] == 1)
