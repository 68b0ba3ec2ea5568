"""A repeated put: the same put gets the first one's answer at any time, and a different put is treated as a new one."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvgrpc.core.tensors.line import RESERVED
from kvgrpc.v1 import common_pb2, tensor_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.engines import wait_until
from tests.service.tensors.stores import OFFERED, PAGE, PAGES, Store, data_of
from tests.service.values import dur, new_key

Pair = tuple[Store, Store]
DATA = data_of(2 * PAGE)
FULL = data_of((PAGES - PAGES // RESERVED) * PAGE)
"""Data that fills all pages for tensors that no engine waits for."""
EXISTS = ("ALREADY_EXISTS", "TRANSFER_EXISTS")


def rows(store: Store) -> list[tensor_pb2.Tensor]:
    return list(store.api.tensors.ListTensors(tensor_pb2.ListTensorsRequest()).tensors)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_put_whose_answer_was_lost_is_answered_again_after_the_consumer_has_the_tensor(
    stores: Pair, key: bytes, asynchronous: bool
) -> None:
    p, d = stores
    request = p.request(key, DATA, [d], asynchronous=asynchronous)
    first = p.api.tensors.PutTensor(request).tensor
    wait_until(lambda: d.listed() != {} and p.used() == 0)
    for again in (p.api.tensors.PutTensor(request).tensor, p.api.tensors.PutTensor(request).tensor):
        assert (again.name, again.description, again.transfer_id) == (first.name, first.description, first.transfer_id)
    assert (len(rows(p)), len(rows(d)), d.used()) == (0, 1, 2)
    d.release_tensors(key)


def test_what_was_kept_and_fetched_is_answered_again_as_it_was(stores: Pair, key: bytes) -> None:
    p, d = stores
    request = p.request(key, DATA)
    first = p.api.tensors.PutTensor(request).tensor
    assert d.get_tensor(key, source=p) == DATA
    wait_until(lambda: p.listed() == {})
    again = p.api.tensors.PutTensor(request).tensor
    assert (again.state, again.transfer_id) == (OFFERED, first.transfer_id)
    assert p.listed() == {}
    d.release_tensors(key)


def test_a_put_that_was_refused_is_refused_again_for_the_same_reason(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, FULL, [d], "full")
    request = p.request(key, DATA, [d], timeout=dur(0.7))
    first = p.api.refusal(lambda: p.api.tensors.PutTensor(request))
    wait_until(lambda: p.used() == 0)
    again = p.api.refusal(lambda: p.api.tensors.PutTensor(request))
    assert first.reason == again.reason == "POOL_EXHAUSTED"
    d.release_tensors(key)


def test_a_put_that_is_made_again_meanwhile_waits_for_the_first_and_for_its_own_time(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, FULL, [d], "full")
    request = p.request(key, DATA, [d])
    short = tensor_pb2.PutTensorRequest()
    short.CopyFrom(request)
    short.timeout.CopyFrom(dur(0.3))
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(p.api.tensors.PutTensor, request) for _ in range(2)]
        wait_until(lambda: "a" in p.listed())
        with refused(p.api, "DEADLINE_EXCEEDED", "DEADLINE"):
            p.api.tensors.PutTensor(short)
        assert not any(call.done() for call in calls)
        d.release_tensors(key, "full")
        for call in calls:
            call.result()
    assert d.listed().keys() == {"a"}
    d.release_tensors(key)


def test_a_put_for_another_consumer_is_not_taken_for_the_one_that_is_under_way(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, FULL, [d], "full")
    request = p.request(key, DATA, [d], asynchronous=True)
    p.api.tensors.PutTensor(request)
    changes: list[dict[str, Any]] = [
        {"consumers": [common_pb2.PeerAddress(address=p.address)]},
        {"consumers": [common_pb2.PeerAddress(address=d.address, engine_id="another")]},
        {"consumers": [], "consumer_count": 1},
    ]
    for change in changes:
        other = p.request(key, DATA, allocation_id=request.allocation_id, **change)
        with refused(p.api, *EXISTS):
            p.api.tensors.PutTensor(other)
    for store in stores:
        store.release_tensors(key)


def test_a_put_under_a_name_whose_last_put_has_not_ended_goes_its_own_way(stores: Pair, key: bytes) -> None:
    p, d = stores
    nobody = [common_pb2.PeerAddress(address="127.0.0.1:1")]
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(p.put, key, DATA, consumers=nobody, timeout=dur(2.0))
        wait_until(lambda: "a" in p.listed())
        (row,) = rows(p)
        p.api.transfers.CancelTransfer(transfer_pb2.CancelTransferRequest(transfer_id=row.transfer_id))
        wait_until(lambda: p.listed() == {})
        p.put(key, DATA, [d])
        assert not first.done()
        assert p.api.refusal(first.result).reason == "PEER_UNREACHABLE"
    assert d.get_tensor(key) == DATA
    d.release_tensors(key)


def test_an_offer_whose_time_is_over_at_once_is_gone(stores: Pair) -> None:
    p, _ = stores
    for _ in range(5):
        p.put(new_key(), DATA, ttl=dur(1e-9))
    wait_until(lambda: p.listed() == {} and p.used() == 0, 10.0)


def test_offers_are_listed_and_counted_until_they_are_fetched_or_taken_back(stores: Pair, key: bytes) -> None:
    p, d = stores
    for name in "abc":
        p.put(key, DATA, name=name)
    assert p.listed(states=[OFFERED]) == dict.fromkeys("abc", OFFERED)
    assert (p.status().offered_count, p.status().tensor_count) == (3, 0)
    assert {row.peer_address for row in rows(p)} == {""}
    assert len({row.transfer_id for row in rows(p)}) == 3
    assert d.get_tensor(key, "b", p) == DATA
    wait_until(lambda: p.listed().keys() == {"a", "c"})
    assert p.release_tensors(key, "a") == 1
    assert (p.status().offered_count, p.used()) == (1, 2)
    with refused(d.api, "FAILED_PRECONDITION", "TRANSFER_ENDED"):
        d.get_tensor(key, "a", p)
    assert d.get_tensor(key, "c", p) == DATA
    for store in stores:
        store.release_tensors(key)
