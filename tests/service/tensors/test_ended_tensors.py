"""Ends of tensors: release, cancel, expiry, end of their engine; and calls that come late."""

import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvgrpc.v1 import transfer_pb2
from tests.service.api import read_refusal, refused
from tests.service.engines import wait_until
from tests.service.tensors.conftest import Begin
from tests.service.tensors.stores import HELD, OFFERED, PAGE, TENSORS, Store, data_of
from tests.service.values import dur, new_key

Pair = tuple[Store, Store]
DATA = data_of(2 * PAGE)
ACTIVE = transfer_pb2.TRANSFER_STATE_ACTIVE
SLOW = ("--bandwidth-limit-bytes-per-s", "20000")
"""Flags of a store from which a tensor of many pages takes seconds."""


def cancel(store: Store, key: bytes) -> None:
    store.api.transfers.CancelTransfer(transfer_pb2.CancelTransferRequest(transfer_key=key, message="gone"))


def test_a_put_after_the_release_is_refused_at_its_source(stores: Pair, key: bytes) -> None:
    p, d = stores
    d.release_tensors(key)
    with refused(p.api, "FAILED_PRECONDITION", "TRANSFER_ENDED"):
        p.put(key, DATA, [d])
    with refused(d.api, "FAILED_PRECONDITION", "TRANSFER_ENDED"):
        d.get_tensor(key)
    wait_until(lambda: p.used() == 0)


def test_a_release_by_name_ends_that_tensor_alone(stores: Pair, key: bytes) -> None:
    p, d = stores
    d.release_tensors(key, "a")
    with refused(p.api, "FAILED_PRECONDITION", "TRANSFER_ENDED"):
        p.put(key, DATA, [d], name="a")
    p.put(key, DATA, [d], name="b")
    d.release_tensors(key)
    wait_until(lambda: p.used() == 0)


@pytest.mark.parametrize("at", ["source", "consumer"])
def test_a_cancel_by_the_requests_key_frees_its_tensors(stores: Pair, key: bytes, at: str) -> None:
    p, d = stores
    p.put(key, DATA, name="kept")
    p.put(key, DATA, [d], name="sent")
    side = p if at == "source" else d
    cancel(side, key)
    assert side.listed() == {}
    with refused(side.api, "FAILED_PRECONDITION", "CANCELLED"):
        side.get_tensor(key, "sent")
    for store in stores:
        store.release_tensors(key)


def test_a_cancel_ends_who_waits_and_what_comes_late(stores: Pair, key: bytes) -> None:
    p, d = stores
    call = d.api.tensors.GetTensor.future(d.wanted(key))
    wait_until(lambda: d.status().waiting_count == 1)
    cancel(d, key)
    assert d.api.refusal(call.result).reason == "CANCELLED"
    with refused(p.api, "FAILED_PRECONDITION", "CANCELLED"):
        p.put(key, DATA, [d])
    wait_until(lambda: p.used() == 0)


def test_a_cancel_leaves_the_engine_what_it_reads(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d])
    answer = d.api.tensors.GetTensor(d.wanted(key))
    cancel(d, key)
    assert d.listed() == {"a": HELD}
    assert d.bytes_of(answer) == DATA
    assert d.release_tensors(key) == 1


def test_what_nobody_fetches_ends_with_its_lease_and_what_nobody_asks_for_with_its_ttl(stores: Pair) -> None:
    p, d = stores
    p.put(new_key(), DATA, ttl=dur(0.3))
    p.put(new_key(), DATA, [d], ttl=dur(0.3))
    wait_until(lambda: p.used() == d.used() == 0)
    assert p.listed() == d.listed() == {}


def test_an_offer_that_is_taken_back_is_refused_to_who_comes_late(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA)
    assert p.release_tensors(key) == 1
    with refused(d.api, "FAILED_PRECONDITION", "TRANSFER_ENDED"):
        d.get_tensor(key, source=p)


def test_a_consumer_that_leaves_gives_back_what_is_kept_for_it(stores: Pair, key: bytes) -> None:
    p, d = stores
    for name in "abc":
        p.put(key, DATA, name=name)
    d.get_tensor(key, "a", source=p)
    assert d.give_back(key, p.address, "b") == 1
    assert p.listed() == {"c": OFFERED}
    assert d.give_back(key, p.address) == 1
    wait_until(lambda: p.used() == d.used() == 0)


def test_where_the_source_cannot_be_told_all_is_released_here(stores: Pair, begin: Begin, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d])
    d.get_tensor(key)
    (gone,) = begin(TENSORS)
    gone.process.kill()
    with refused(d.api, "UNAVAILABLE", "PEER_UNREACHABLE"):
        d.give_back(key, gone.address)
    assert d.used() == 0


def test_a_consumer_that_cannot_be_reached_ends_the_put_in_time(stores: Pair, begin: Begin, key: bytes) -> None:
    p, _ = stores
    (d,) = begin(TENSORS)
    d.process.kill()
    with refused(p.api, "UNAVAILABLE", "PEER_UNREACHABLE"):
        p.put(key, DATA, [d], timeout=dur(1.0))
    with refused(p.api, "UNAVAILABLE", "PEER_UNREACHABLE"):
        p.get_tensor(key, "b", d)
    wait_until(lambda: p.used() == 0)


@pytest.mark.chaos
def test_a_consumer_that_comes_back_at_its_address_gets_what_is_still_being_put(
    stores: Pair, begin: Begin, key: bytes
) -> None:
    p, _ = stores
    (d,) = begin(TENSORS)
    p.put(key, DATA, [d], name="before")
    d.process.kill()
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(p.put, key, DATA, [d], "after")
        (again,) = begin(TENSORS, flags=("--listen", d.address))
        late.result()
    assert again.listed().keys() == {"after"}
    assert again.get_tensor(key, "after") == DATA
    wait_until(lambda: p.used() == 0)


@pytest.mark.chaos
def test_a_source_that_dies_ends_what_it_was_sending_and_comes_back_to_send_anew(begin: Begin, key: bytes) -> None:
    p, d = begin(TENSORS, TENSORS)
    p.put(key, DATA, [d], name="before")
    p.put(key, DATA, name="kept")
    offer = p.api.tensors.GetTensor(p.wanted(key, "kept", as_offer=True))
    p.process.kill()
    request = p.request(key, DATA, name="kept", grant=offer.grant, description=offer.tensor.description)
    with pytest.raises(grpc.RpcError) as raised:
        d.api.tensors.PutTensor(request)
    assert read_refusal(d.api.last_method, raised.value).code == "UNAVAILABLE"
    (again,) = begin(TENSORS, flags=("--listen", p.address))
    refusal = d.api.refusal(lambda: d.api.tensors.PutTensor(request))
    assert refusal.reason in {"INCARNATION_CHANGED", "WRONG_ENGINE", "GRANT_FOREIGN"}
    again.put(key, DATA, [d], name="kept")
    assert d.get_tensor(key, "before") == d.get_tensor(key, "kept") == DATA


@pytest.mark.chaos
def test_a_consumer_that_stands_still_delays_no_other(stores: Pair, begin: Begin, key: bytes) -> None:
    p, d = stores
    (slow,) = begin(TENSORS)
    p.put(key, DATA, [slow], name="before")
    with ThreadPoolExecutor(1) as threads, slow.process.stopped():
        stuck = threads.submit(p.put, key, DATA, [slow], "stuck", timeout=dur(3.0))
        p.put(key, DATA, [d], name="other")
        assert p.api.refusal(stuck.result).code in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
    d.release_tensors(key)
    wait_until(lambda: p.used() == 0)
    slow.process.signal(signal.SIGCONT)


@pytest.mark.parametrize("by", ["release", "cancel"])
def test_a_request_that_ends_while_its_tensor_comes_refuses_the_put_and_frees_the_pages(
    stores: Pair, begin: Begin, key: bytes, by: str
) -> None:
    p, _ = stores
    (slow,) = begin(TENSORS, flags=SLOW)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(p.put, key, data_of(32 * PAGE), [slow])
        wait_until(lambda: any(row.state == ACTIVE for row in moving(slow)))
        if by == "release":
            slow.release_tensors(key)
        else:
            cancel(slow, key)
        refusal = p.api.refusal(sent.result)
    assert refusal.reason == ("TRANSFER_ENDED" if by == "release" else "CANCELLED")
    assert slow.listed() == {}
    wait_until(lambda: slow.used() == p.used() == 0)


def test_a_tensor_that_is_taken_back_while_it_is_sent_arrives_nowhere(stores: Pair, begin: Begin, key: bytes) -> None:
    p, _ = stores
    (slow,) = begin(TENSORS, flags=SLOW)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(p.put, key, data_of(32 * PAGE), [slow])
        wait_until(lambda: any(row.state == ACTIVE for row in moving(slow)))
        p.release_tensors(key)
        assert p.api.refusal(sent.result).reason == "TRANSFER_ENDED"
    wait_until(lambda: slow.listed() == {})
    wait_until(lambda: slow.used() == p.used() == 0)


def test_a_caller_that_leaves_waits_no_more(stores: Pair, key: bytes) -> None:
    _, d = stores
    call = d.api.tensors.GetTensor.future(d.wanted(key))
    wait_until(lambda: d.status().waiting_count == 1)
    call.cancel()
    wait_until(lambda: d.status().waiting_count == 0)


def moving(store: Store) -> list[transfer_pb2.Transfer]:
    return list(store.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest()).transfers)
