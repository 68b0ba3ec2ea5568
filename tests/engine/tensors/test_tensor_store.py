"""The library: a get returns what was put, in every element type and shape, from any thread."""

import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.core.tensors.line import RESERVED
from kvgrpc.engine.tensors import PendingPut
from kvgrpc.engine.tensors.store import NAMES_MAX
from kvgrpc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from tests.engine.tensors.conftest import PAGE, PAGES, Launch, Pair


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "complex64"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 700)])
def test_a_torch_tensor_comes_as_it_was(pair: Pair, key: bytes, dtype: str, shape: tuple[int, ...]) -> None:
    p, d = pair
    sent = (torch.randn(shape) * 3).to(getattr(torch, dtype))
    p.put(key, "t", sent, to=[d.address])
    with d.get(key, "t", dtype=dtype, shape=shape) as got:
        assert got.is_view
        assert torch.equal(got.torch().reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
        assert got.torch().dtype == sent.dtype
        assert got.torch().shape == sent.shape
    d.release(key)


def test_tensors_are_asked_for_and_let_go_without_waiting(pair: Pair, key: bytes) -> None:
    p, d = pair
    coming = [d.get_async(key, name) for name in range(20)]
    late = d.get_async(key, "late")
    for name in range(20):
        p.put_async(key, name, np.full(9, name), to=[d.address])
    assert [int(one.result(20.0).numpy()[0]) for one in coming] == list(range(20))
    assert not late.done()
    released = d.release_async(key)
    with pytest.raises(PreconditionFailed):
        d.get(key, 0)
    with pytest.raises(PreconditionFailed):
        late.result(20.0)
    assert released.result(20.0) == 20


def test_one_that_is_asked_for_while_others_are_released_with_it_stays(pair: Pair, key: bytes) -> None:
    p, d = pair
    other, busy, go_on = os.urandom(16), threading.Event(), threading.Event()
    for each in (key, other):
        p.put(each, "t", np.full(9, 7), to=[d.address])
    first, second = d.get(key, "t"), d.get(other, "t")

    def wait() -> Generator[float, Any, None]:
        busy.set()
        go_on.wait()
        yield 0.0

    d._thread.run(wait())
    busy.wait()
    first.release()
    second.release()
    again = d.get_async(other, "t")
    go_on.set()
    with again.result(20.0) as got:
        d.get_async(other, "t").result(20.0).release()
        p.put(os.urandom(16), "u", np.full(9, 8), to=[d.address])
        assert got.numpy().tolist() == [7] * 9
    for each in (key, other):
        d.release(each)


def test_a_fetch_goes_on_for_those_who_wait_longer_than_the_one_who_began_it(pair: Pair) -> None:
    p, d = pair
    keys = [os.urandom(16) for _ in range(30)]
    short = [d.get_async(key, "a", source=p.address, timeout_s=0.0) for key in keys]
    longer = [d.get_async(key, "a", source=p.address, timeout_s=20.0) for key in keys]
    for one in short:
        with pytest.raises(DeadlineExceeded):
            one.result(20.0)
    for key in keys:
        p.put(key, "a", np.full(9, 7))
    for one in longer:
        with one.result(20.0) as got:
            assert (got.numpy() == 7).all()
    for key in keys:
        p.release(key)


def test_tensors_are_let_go_by_name_and_their_request_goes_on(pair: Pair, key: bytes) -> None:
    p, d = pair
    for name in range(3):
        p.put(key, name, np.full(9, name), to=[d.address])
    got = d.get(key, 0)
    assert (
        d.release_async(key, [(0, 0), ("layers.1", 0), *((5, part) for part in range(2 * NAMES_MAX))]).result(20) == 2
    )
    got.release()
    for name, part in ((1, 0), (5, 2 * NAMES_MAX - 1)):
        with pytest.raises(PreconditionFailed, match="TRANSFER_ENDED"):
            p.put(key, name, np.full(9, 1), part=part, to=[d.address])
    assert int(d.get(key, 2).numpy()[0]) == 2
    with pytest.raises(InvalidRequest, match="part"):
        d.release_async(key, [(3, -1)])
    assert d.release(key) == 1


def test_an_array_that_is_no_row_of_bytes_comes_as_it_reads(pair: Pair, key: bytes) -> None:
    p, d = pair
    strided = np.arange(24_000).reshape(40, 600).T[::2]
    p.put(key, 3, strided, to=[d.address])
    with d.get(key, 3) as got:
        assert np.array_equal(got.numpy(), strided)
        assert (got.description.layer, got.id.name) == (3, "layers.3")
        with pytest.raises(ValueError, match="read-only"):
            got.numpy()[0] = 1
    transposed = torch.arange(6000).reshape(60, 100).t()
    p.put(key, "t", transposed, to=[d.address])
    with d.get(key, "t") as got:
        assert torch.equal(got.torch(), transposed)
    d.release(key)


def test_a_tensor_in_scattered_pages_comes_whole(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    room = PAGES - PAGES // RESERVED
    for i in range(room):
        p.put(key, f"s{i}", np.full(PAGE, i, np.uint8), to=[d.address])
    p.put(key, "rest", np.zeros((PAGES - room) * PAGE, np.uint8))
    d.get(key, "rest", source=p.address)
    for i in range(0, room, 2):
        d.get(key, f"s{i}").release()
    p.put(key, "done", np.arange(3 * PAGE, dtype=np.uint8), to=[d.address])  # waits until releases have made room
    with d.get(key, "done") as got:
        assert not got.is_view
        assert (got.numpy() == np.arange(3 * PAGE, dtype=np.uint8)).all()


def test_memory_may_be_reused_when_it_is_saved_though_no_consumer_has_it(launch: Launch, key: bytes) -> None:
    """Tensors for a slow or dead consumer count as saved. Tensors that were not copied yet do not."""
    p, d = launch(), launch()
    d.close()
    tensor = torch.full((PAGE,), 7, dtype=torch.uint8)
    pending = [p.put_async(key, f"t{i}", tensor, to=[d.address], timeout_s=3.0) for i in range(8)]
    p.wait_for_saved(2.0)
    assert not any(one.done() for one in pending)
    tensor.zero_()
    for i in range(8):
        p.put(key, f"kept{i}", tensor)
    for one in pending:
        with pytest.raises(KVGrpcError):
            one.result(20.0)


def test_what_finds_no_room_is_not_said_to_be_saved(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    for i in range(2):
        p.put(key, f"kept{i}", np.zeros(PAGES // 2 * PAGE, np.uint8), ttl_s=60.0)
    pending = p.put_async(key, "late", np.ones(PAGE, np.uint8), to=[d.address], timeout_s=60.0)
    with pytest.raises(DeadlineExceeded) as raised:
        p.wait_for_saved(0.3)
    assert raised.value.reason is Reason.DEADLINE
    with pytest.raises(DeadlineExceeded):
        pending.result(0.0)
    with d.get(key, "kept0", source=p.address):
        p.wait_for_saved(20.0)
    pending.result(20.0)
    d.release(key)


def test_a_store_that_stays_full_ends_the_put(launch: Launch, key: bytes) -> None:
    p = launch()
    p.put(key, "all", np.zeros(PAGES * PAGE, np.uint8), ttl_s=60.0)
    with pytest.raises(Exhausted) as raised:
        p.put(key, "late", np.ones(PAGE, np.uint8), timeout_s=0.5)
    assert raised.value.reason is Reason.POOL_EXHAUSTED
    p.wait_for_saved(1.0)


def test_what_can_never_be_put_is_refused_at_once(pair: Pair, key: bytes) -> None:
    p, _ = pair
    with pytest.raises(OutOfRange):
        p.put(key, "large", np.zeros((PAGES + 1) * PAGE, np.uint8))
    for wrong in ("text", np.zeros((0, 3)), np.zeros(3, dtype="U4"), np.array([object()])):
        with pytest.raises(InvalidRequest):
            p.put(key, "wrong", wrong)
    with pytest.raises(InvalidRequest):
        p.put(b"short", "a", np.zeros(3))
    with pytest.raises(InvalidRequest):
        p.put(key, "", np.zeros(3))


def test_a_refused_put_gives_its_pages_back(pair: Pair, key: bytes) -> None:
    p, d = pair
    p.put(key, "a", np.zeros(PAGE, np.uint8), to=[d.address])
    for _ in range(PAGES + 1):
        with pytest.raises(AlreadyExists):
            p.put(key, "a", np.zeros(2 * PAGE, np.uint8), to=[d.address])
        with pytest.raises(PermissionDenied):
            p.put(key, "b", np.zeros(PAGE, np.uint8), to=["192.0.2.1:1"])
    d.release(key)


def test_a_get_ends_with_the_tensor_or_an_error_and_never_with_another(pair: Pair, key: bytes) -> None:
    p, d = pair
    with pytest.raises(DeadlineExceeded):
        d.get(key, "never", timeout_s=0.2)
    p.put(key, "a", np.zeros((4, 5), np.float32), to=[d.address], content_digest=b"prompt", layer=2)
    for wrong in ({"dtype": "float16"}, {"shape": (5, 4)}, {"shape": ()}, {"layer": 1}, {"content_digest": b"other"}):
        with pytest.raises(PreconditionFailed) as raised:
            d.get(key, "a", **wrong)
        assert raised.value.reason is Reason.CONTENT_MISMATCH
    d.get(key, "a", dtype="float32", shape=(4, 5), layer=2, content_digest=b"prompt").release()
    with pytest.raises(PreconditionFailed):
        d.get(key, "a", timeout_s=5.0)
    d.release(key)


def test_got_twice_it_is_the_stores_again_with_the_last_release(pair: Pair, key: bytes) -> None:
    p, d = pair
    p.put(key, "a", np.arange(10), to=[d.address])
    first, second = d.get(key, "a"), d.get(key, "a")
    first.release()
    first.release()
    third = d.get(key, "a")
    second.release()
    assert (third.numpy() == np.arange(10)).all()
    third.release()
    assert d.release(key) == 0


def test_a_release_frees_nothing_that_another_get_is_given_meanwhile(pair: Pair, key: bytes) -> None:
    p, d = pair
    for number in range(50):
        p.put(key, number, np.full(PAGE, number, np.uint8), to=[d.address])
        first = d.get(key, number)
        coming = d.get_async(key, number)
        first.release()
        second = coming.result(20.0)
        p.put(key, f"other {number}", np.full(PAGE, 255, np.uint8), to=[d.address])
        assert (second.numpy() == number).all()
        second.release()
        d.get(key, f"other {number}").release()
    assert d.release(key) == 0, "each was released with its last get"


def test_a_get_that_ends_without_a_tensor_keeps_none_that_another_get_released(pair: Pair, key: bytes) -> None:
    p, d = pair
    p.put(key, "a", np.arange(10), to=[d.address])
    first = d.get(key, "a")
    wrong = d.get_async(key, "a", dtype="float32")
    first.release()
    with pytest.raises(PreconditionFailed, match="not the one that is asked for"):
        wrong.result(20.0)
    assert d.release(key) == 0


def test_what_is_under_way_cannot_be_cancelled_by_its_future(pair: Pair, key: bytes) -> None:
    p, d = pair
    coming = d.get_async(key, "a")
    put = p.put_async(key, "a", np.arange(10), to=[d.address])
    assert not coming.cancel()
    assert not put.future.cancel()
    coming.result(20.0).release()
    assert d.release(key) == 0


def test_a_put_that_is_queued_as_the_store_ends_fails_whoever_queued_it(
    launch: Launch, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = launch()
    run = p._thread.run
    queued: list[PendingPut] = []

    def closed_meanwhile(*arguments: Any) -> Any:
        if not queued:
            queued.append(p.put_async(key, "of another thread", np.zeros(9)))
            p.close()
        return run(*arguments)

    monkeypatch.setattr(p._thread, "run", closed_meanwhile)
    with pytest.raises(Unavailable):
        p.put(key, "a", np.zeros(9))
    with pytest.raises(Unavailable):
        queued[0].result(20.0)
    assert queued[0].saved.done()


def test_many_threads_put_and_get_through_one_store(pair: Pair, key: bytes) -> None:
    p, d = pair

    def move(i: int) -> bool:
        p.put(key, i, torch.full((3 * PAGE,), i % 251, dtype=torch.uint8), to=[d.address], timeout_s=60.0)
        with d.get(key, i, timeout_s=60.0) as got:
            return bool((got.torch() == i % 251).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(move, range(120)))
    d.release(key)


@pytest.mark.parametrize("path", ["shm", "cma", "nixl", "collective"])
def test_tensors_move_over_every_data_path(launch: Launch, key: bytes, path: str) -> None:
    p, d = launch("--data-paths", path), launch("--data-paths", path)
    sent = torch.randn(9, 1000)
    p.put(key, "a", sent, to=[d.address])
    with d.get(key, "a") as got:
        assert torch.equal(got.torch(), sent)


def test_a_store_that_leaves_gives_back_what_is_kept_for_it(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    for i in range(3):
        p.put(key, i, np.arange(9))
    d.get(key, 0, source=p.address).release()
    assert d.release_async(key, [(1, 0)], source=p.address).result(20.0) == 1
    assert d.release_async(key, source=p.address).result(20.0) == 1
    with pytest.raises(PreconditionFailed) as raised:
        p.put(key, 3, np.arange(9))
    assert raised.value.reason is Reason.TRANSFER_ENDED


def test_all_names_are_released_though_their_source_cannot_be_told(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    last = NAMES_MAX  # sent in the second of two calls
    p.put(key, last, np.arange(9), to=[d.address])
    address = p.address
    p.close()
    with pytest.raises(Unavailable):
        d.release_async(key, [(i, 0) for i in range(NAMES_MAX + 1)], source=address).result(60.0)
    with pytest.raises(PreconditionFailed) as raised:
        d.get(key, last, timeout_s=1.0)
    assert raised.value.reason is Reason.TRANSFER_ENDED


def test_a_store_whose_lead_died_says_so_and_what_was_got_stays_readable(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    p.put(key, "a", np.arange(1000), to=[d.address])
    got = d.get(key, "a")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(d.get, key, "never")
        os.kill(d._engine.lead_pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            waiting.result(20.0)
    with pytest.raises(Unavailable):
        d.get(key, "b")
    with pytest.raises(Unavailable):
        d.put(key, "b", np.zeros(3))
    got.release()
    assert (got.numpy() == np.arange(1000)).all()


def test_what_waits_when_the_store_is_closed_fails(launch: Launch, key: bytes) -> None:
    p = launch()
    p.put(key, "all", np.zeros(PAGES * PAGE, np.uint8), ttl_s=60.0)
    pending = p.put_async(key, "late", np.zeros(3))
    p.close()
    p.close()
    p.wait_for_saved(1.0)
    with pytest.raises(Unavailable):
        pending.result(1.0)
    with pytest.raises(Unavailable):
        p.put(key, "after", np.zeros(3))


def test_a_peer_that_comes_back_is_not_the_one_before(launch: Launch, key: bytes) -> None:
    p, d = launch(), launch()
    p.put(key, "a", np.arange(9), to=[d.address])
    address = d.address
    d.close()
    pending = p.put_async(key, "b", np.arange(9), to=[address], timeout_s=60.0)
    again = launch(listen=address)
    pending.result(60.0)
    with again.get(key, "b") as got:
        assert (got.numpy() == np.arange(9)).all()
    with pytest.raises(DeadlineExceeded):
        again.get(key, "a", timeout_s=0.2)
