"""Tensors that an engine computes in its store: a get returns what was computed, and no page is lost."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.client import connect_sync
from kvgrpc.engine.tensors import TensorStore
from kvgrpc.errors import (
    Exhausted,
    InvalidRequest,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from tests.engine.tensors.conftest import PAGE, PAGES, Launch, Pair


def used_pages(store: TensorStore) -> int:
    with connect_sync(store.address) as lead:
        return int(lead.tensors().status().used_page_count)


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, np.float16, np.dtype("int8")], ids=str)
@pytest.mark.parametrize("shape", [(), (3, 1, 700)], ids=str)
def test_what_is_computed_in_the_store_comes_as_it_was(
    pair: Pair, key: bytes, dtype: Any, shape: tuple[int, ...]
) -> None:
    p, d = pair
    for name, to in (("put", [d.address]), ("kept", [])):
        new = p.empty(shape, dtype)
        assert new.is_view
        new.torch().copy_(torch.randn(shape) * 3)
        computed = new.torch().clone()
        p.put(key, name, new, to=to, layer=3, content_digest=b"prompt")
        with d.get(key, name, source=p.address, layer=3, content_digest=b"prompt") as got:
            assert torch.equal(got.torch().reshape(-1).view(torch.uint8), computed.reshape(-1).view(torch.uint8))
            assert (got.torch().dtype, got.torch().shape) == (computed.dtype, computed.shape)
    d.release(key)


def test_where_pages_do_not_lie_side_by_side_it_comes_whole_all_the_same(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    held = [p.empty((PAGE,), "uint8") for _ in range(PAGES)]
    for new in held[::2]:
        new.release()
    new = p.empty((3 * PAGE,), "uint8")
    assert not new.is_view
    new.numpy()[:] = np.arange(3 * PAGE) % 251
    p.put(key, "a", new, to=[d.address])
    with d.get(key, "a") as got:
        assert (got.numpy() == np.arange(3 * PAGE) % 251).all()


def test_it_is_put_once_and_not_after_it_was_released(pair: Pair, key: bytes) -> None:
    p, d = pair
    before = used_pages(p)
    new, unwanted = p.empty((9,), "uint8"), p.empty((9,), "uint8")
    new.numpy()[:] = 7
    p.put(key, "a", new, to=[d.address])
    with unwanted:
        unwanted.numpy()[:] = 8
    for name, gone in (("b", new), ("c", unwanted)):
        with pytest.raises(InvalidRequest, match="put already, or released"):
            p.put(key, name, gone, to=[d.address])
    new.release()
    unwanted.release()
    for use in (new.numpy, new.torch, unwanted.numpy, unwanted.torch):
        with pytest.raises(InvalidRequest, match="put already, or released"):
            use()
    with d.get(key, "a") as got:
        assert (got.numpy() == 7).all()
    d.release(key)
    assert used_pages(p) == before


def test_a_refused_put_gives_its_pages_back(pair: Pair, key: bytes) -> None:
    p, d = pair
    before = used_pages(p)
    p.release(key)
    for name, to, error in (("a", [], PreconditionFailed), ("b", ["192.0.2.1:1"], PermissionDenied)):
        with pytest.raises(error):
            p.put(key if name == "a" else os.urandom(16), name, p.empty((PAGES * PAGE // 2,), "uint8"), to=to)
        assert used_pages(p) == before
    d.release(key)


def test_a_full_store_is_waited_for_and_said_to_be_full(launch: Launch) -> None:
    p = launch()
    held = p.empty((PAGES * PAGE,), "uint8")
    with pytest.raises(Exhausted) as raised:
        p.empty((1,), "uint8", timeout_s=0.3)
    assert raised.value.reason is Reason.POOL_EXHAUSTED
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(p.empty, (1,), "uint8", timeout_s=20.0)
        held.release()
        waiting.result().release()
    with pytest.raises(OutOfRange):
        p.empty((PAGES * PAGE + 1,), "uint8")
    for shape, dtype in (((0,), "uint8"), ((3,), "text"), ((3,), np.dtype("U4")), ((1,) * 17, "uint8")):
        with pytest.raises(InvalidRequest):
            p.empty(shape, dtype)


def test_it_does_not_wait_behind_a_put_that_waits_for_its_pages(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    new = p.empty((PAGES * PAGE // 2,), "uint8")
    new.numpy()[:] = 5
    late = p.put_async(key, "late", np.full((PAGES - 1) * PAGE, 6, np.uint8), timeout_s=60.0)
    p.put(key, "new", new, to=[d.address], timeout_s=20.0)
    late.result(20.0)
    with d.get(key, "new") as got:
        assert (got.numpy() == 5).all()


def test_a_put_after_the_end_of_its_store_keeps_nobody_waiting(launch: Launch, key: bytes) -> None:
    p = launch()
    new = p.empty((9,), "uint8")
    p.close()
    with pytest.raises(Unavailable):
        p.put_async(key, "a", new)
    with pytest.raises(Unavailable):
        p.empty((9,), "uint8")
    new.release()


def test_whoever_waits_for_memory_hears_that_the_store_is_closed(launch: Launch) -> None:
    p = launch()
    p.empty((PAGES * PAGE,), "uint8")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(p.empty, (1,), "uint8", timeout_s=60.0)
        p.close()
        with pytest.raises(Unavailable):
            waiting.result(20.0)


@pytest.mark.parametrize("scattered", [False, True])
def test_it_is_put_by_its_own_store_alone(launch: Launch, key: bytes, scattered: bool) -> None:
    """In another store, the same pages belong to other tensors."""
    a, b = launch(), launch()
    before = [a.empty((PAGE,), "uint8") for _ in range(PAGES)]
    for one in before[:: 2 if scattered else 1]:
        one.release()
    new, others = a.empty((2 * PAGE,), "uint8"), b.empty((PAGES * PAGE,), "uint8")
    assert new.is_view is not scattered
    new.numpy()[:] = 7
    others.numpy()[:] = 9
    with pytest.raises(InvalidRequest, match="of another store"):
        b.put(key, "a", new)
    assert (others.numpy() == 9).all()
    a.put(key, "a", new)
    others.release()
    with b.get(key, "a", source=a.address) as got:
        assert (got.numpy() == 7).all()


def test_a_scattered_one_whose_put_is_refused_gives_its_pages_back(launch: Launch, key: bytes) -> None:
    p = launch()
    held = [p.empty((PAGE,), "uint8") for _ in range(PAGES)]
    for one in held[::2]:
        one.release()
    new = p.empty((3 * PAGE,), "uint8")
    p.release(key)
    with pytest.raises(PreconditionFailed, match="TRANSFER_ENDED"):
        p.put(key, "a", new)
    assert used_pages(p) == PAGES // 2
