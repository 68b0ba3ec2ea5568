"""Either engine dies between any two steps of a tensor and comes back at its address, in another life."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvgrpc.core.tensors.line import RESERVED
from tests.service.api import read_refusal
from tests.service.engines import wait_until
from tests.service.tensors.conftest import Begin
from tests.service.tensors.stores import ARRIVING, PAGE, PAGES, TENSORS, Store, data_of
from tests.service.values import dur, new_key

SLOW = ("--bandwidth-limit-bytes-per-s", "20000")
"""Flags of a store from which a tensor of many pages takes seconds."""
DATA = data_of(20 * PAGE)
FULL = (PAGES - PAGES // RESERVED) * PAGE
Call = Callable[[], object]


def moving(store: Store) -> bool:
    return any("TRANSFER_STATE_ACTIVE" in text for text in store.transfers_state())


def asked(p: Store, d: Store, key: bytes, later: Callable[[Call], None]) -> None:
    later(lambda: d.get_tensor(key, timeout=dur(8.0)))
    wait_until(lambda: d.status().waiting_count == 1)


def offered(p: Store, d: Store, key: bytes, later: Callable[[Call], None]) -> None:
    p.put(key, DATA)


def in_line(p: Store, d: Store, key: bytes, later: Callable[[Call], None]) -> None:
    p.put(key, data_of(FULL), [d], name="first")
    later(lambda: p.put(key, DATA, [d], timeout=dur(8.0)))
    wait_until(lambda: d.status().queued_count == 1)


def on_its_way(p: Store, d: Store, key: bytes, later: Callable[[Call], None]) -> None:
    later(lambda: p.put(key, DATA, [d], timeout=dur(12.0)))
    wait_until(lambda: moving(d) and d.listed() == {"a": ARRIVING})


def fetched(p: Store, d: Store, key: bytes, later: Callable[[Call], None]) -> None:
    p.put(key, DATA)
    later(lambda: d.get_tensor(key, source=p, timeout=dur(12.0)))
    wait_until(lambda: moving(d))


def stored(p: Store, d: Store, key: bytes, later: Callable[[Call], None]) -> None:
    p.put(key, DATA, [d])


def held(p: Store, d: Store, key: bytes, later: Callable[[Call], None]) -> None:
    p.put(key, DATA, [d])
    d.get_tensor(key)


STEPS = (asked, offered, in_line, on_its_way, fetched, stored, held)
SLOWLY = (on_its_way, fetched)
AT_CONSUMER = (stored, held)


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["source", "consumer"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_waited_ends_typed_no_page_is_lost_and_the_new_life_moves_its_own_bytes(
    begin: Begin, step: Callable[..., None], victim: str
) -> None:
    p, d = begin(TENSORS, TENSORS, flags=SLOW if step in SLOWLY else ())
    key, waiting = new_key(), list[Future[object]]()
    with ThreadPoolExecutor(2) as threads:
        step(p, d, key, lambda call: waiting.append(threads.submit(call)))
        dead = p if victim == "source" else d
        dead.process.kill()
        (again,) = begin(TENSORS, flags=("--listen", dead.address))
        for call in waiting:
            check_end(call)
    here, there = (again, d) if victim == "source" else (p, again)
    found = got(there, key)
    assert found in {DATA, b""}, "what was put, if a put went on, and nothing else"
    assert found or victim == "consumer" or step not in AT_CONSUMER, "it is the consumer's"
    for store in (here, there):
        store.release_tensors(key)
    other, anew = data_of(20 * PAGE, 2), new_key()
    here.put(anew, other, [there])
    assert there.get_tensor(anew) == other
    for store in (here, there):
        store.release_tensors(anew)
    for store in (here, there):
        wait_until(lambda store=store: store.used() == 0, 30.0, lambda store=store: (store.listed(), store.status()))  # type: ignore[misc]


def got(store: Store, key: bytes) -> bytes:
    """Returns the tensor's bytes if it is there or comes at once, else b""."""
    try:
        return store.get_tensor(key, timeout=dur(0.2))
    except grpc.RpcError as error:
        refusal = read_refusal("GetTensor", error)
    assert refusal.reason == "DEADLINE", refusal
    return b""


def check_end(call: "Future[Any]") -> None:
    """Checks that the call got its tensor or failed with a typed error."""
    error = call.exception(40.0)
    if error is None:
        return
    assert isinstance(error, grpc.RpcError)
    # A dead server gives gRPC's own UNAVAILABLE, without a reason.
    assert read_refusal("", error).reason or error.code() is grpc.StatusCode.UNAVAILABLE
