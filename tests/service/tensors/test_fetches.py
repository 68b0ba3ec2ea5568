"""Several calls fetch, or wait for, one tensor: each has its own timeout, and hears of its own source."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvgrpc.core.tensors.descriptions import ANY, Get
from kvgrpc.errors import Unavailable
from kvgrpc.v1 import tensor_pb2
from tests.service.api import refused
from tests.service.engines import wait_until
from tests.service.tensors.conftest import Begin
from tests.service.tensors.leads import named, served
from tests.service.tensors.stores import ARRIVING, PAGE, TENSORS, Store, data_of
from tests.service.values import dur, new_key

Pair = tuple[Store, Store]
DATA = data_of(2 * PAGE)
LONG = data_of(16 * PAGE)
SLOW = ("--bandwidth-limit-bytes-per-s", "20000")
"""Flags of a store from which a tensor of many pages takes seconds."""


def test_a_fetch_that_waits_shorter_ends_no_other_call(stores: Pair, key: bytes) -> None:
    p, d = stores
    with ThreadPoolExecutor(3) as threads:
        short = threads.submit(d.get_tensor, key, "a", p, timeout=dur(0.5))
        wait_until(lambda: p.status().waiting_count == 1)
        long = threads.submit(d.get_tensor, key, "a", p)
        waiting = threads.submit(d.get_tensor, key, "a")
        wait_until(lambda: d.status().waiting_count == 3)
        assert d.api.refusal(short.result).reason == "DEADLINE"
        assert not long.done()
        assert not waiting.done()
        p.put(key, DATA)
        assert long.result() == waiting.result() == DATA
    assert d.release_tensors(key) == 1
    wait_until(lambda: p.used() == 0)


def test_a_source_that_refuses_one_call_refuses_no_other(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA)
    wrong = tensor_pb2.ExpectedTensor(dtype="int8")
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(d.get_tensor, key, "a")
        wait_until(lambda: d.status().waiting_count == 1)
        with refused(d.api, "FAILED_PRECONDITION", "CONTENT_MISMATCH"):
            d.get_tensor(key, "a", p, expected=wrong)
        assert not waiting.done()
        assert d.get_tensor(key, "a", p) == waiting.result() == DATA
    d.release_tensors(key)


def test_a_call_that_has_its_tensor_asks_its_source_no_more(stores: Pair, key: bytes) -> None:
    p, d = stores
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(d.get_tensor, key, "a", p)
        wait_until(lambda: p.status().waiting_count == 1)
        p.put(key, DATA, [d])
        assert got.result() == DATA
    wait_until(lambda: p.status().waiting_count == 0, 5.0)
    d.release_tensors(key)


@pytest.mark.chaos
def test_a_call_whose_tensor_was_coming_by_a_put_that_fails_has_it_from_its_source(
    stores: Pair, begin: Begin, key: bytes
) -> None:
    p, d = stores
    p.put(key, LONG)
    (putting,) = begin(TENSORS, flags=SLOW)
    with ThreadPoolExecutor(2) as threads:
        put = threads.submit(putting.put, key, LONG, [d])
        wait_until(lambda: d.listed() == {"a": ARRIVING})
        got = threads.submit(d.get_tensor, key, "a", p)
        wait_until(lambda: d.status().waiting_count == 2)
        putting.process.kill()
        assert got.result() == LONG
        with pytest.raises(grpc.RpcError):
            put.result()
    d.release_tensors(key)


def test_a_call_that_left_asks_its_source_no_more(stores: Pair, key: bytes) -> None:
    p, d = stores
    call = d.api.tensors.GetTensor.future(d.wanted(key, "a", p))
    wait_until(lambda: p.status().waiting_count == 1)
    call.cancel()
    wait_until(lambda: p.status().waiting_count == 0, 5.0)
    assert d.status().waiting_count == 0


async def test_a_call_that_waits_when_its_server_stops_hears_that_and_so_does_one_that_comes_then() -> None:
    async with served() as server:
        staging = server._staging
        call = asyncio.ensure_future(staging.get(Get(named(), ANY), ""))
        await asyncio.sleep(0)
        await server.stop()
        for late in (call, staging.get(Get(named(), ANY), "")):
            with pytest.raises(Unavailable, match="ENGINE_LOST"):
                await late


def test_what_is_kept_lasts_while_its_consumer_waits_for_anything_of_its_request(stores: Pair, key: bytes) -> None:
    """Two tensors have the same TTL. The one that was put first outlives the other one."""
    p, d = stores
    other = new_key()
    p.put(key, DATA, ttl=dur(3.0))
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(d.get_tensor, key, "never put", p, timeout=dur(30.0))
        wait_until(lambda: p.status().waiting_count == 1)
        p.put(other, DATA, ttl=dur(3.0))
        wait_until(lambda: p.status().offered_count == 2)
        for again in range(100):
            if p.status().offered_count == 1:
                break
            asked = d.wanted(key, f"never put {again}", p, timeout=dur(0.2))
            assert d.api.refusal(lambda asked=asked: d.api.tensors.GetTensor(asked)).reason == "DEADLINE"  # type: ignore[misc]
        assert d.get_tensor(key, "a", p) == DATA
        d.release_tensors(key)
        assert d.api.refusal(waits.result).reason == "TRANSFER_ENDED"
    wait_until(lambda: p.used() == 0)
