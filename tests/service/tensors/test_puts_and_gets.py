"""Tensors move from store to store over sockets: puts with and without waiting, fetches, waits, and holders."""

from concurrent.futures import ThreadPoolExecutor

from kvgrpc.v1 import tensor_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.engines import wait_until
from tests.service.tensors.conftest import Begin
from tests.service.tensors.stores import HELD, OFFERED, PAGE, STORED, TENSORS, Store, data_of, described, name_of
from tests.service.values import dur, ids_of, new_key

Pair = tuple[Store, Store]
DATA = data_of(3 * PAGE + 17)


def test_a_put_returns_when_the_consumer_has_the_bytes(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d])
    assert d.listed() == {"a": STORED}
    assert d.get_tensor(key) == DATA
    assert d.listed() == {"a": HELD}
    assert d.used() == 4
    assert d.release_tensors(key) == 1
    wait_until(lambda: p.used() == 0)
    assert d.used() == 0


def test_who_asks_first_waits_until_it_is_there(stores: Pair, key: bytes) -> None:
    p, d = stores
    with ThreadPoolExecutor(2) as threads:
        got = [threads.submit(d.get_tensor, key) for _ in range(2)]
        wait_until(lambda: d.status().waiting_count == 2)
        p.put(key, DATA, [d])
        assert [future.result() for future in got] == [DATA, DATA]
    d.release_tensors(key)


def test_an_asynchronous_put_returns_when_it_is_handed_over(stores: Pair, key: bytes) -> None:
    p, d = stores
    answer = p.put(key, DATA, [d], asynchronous=True)
    assert answer.tensor.state == OFFERED
    assert d.get_tensor(key) == DATA
    d.release_tensors(key)


def test_what_is_put_to_nobody_is_kept_until_it_is_fetched(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA)
    assert p.listed() == {"a": OFFERED}
    assert d.get_tensor(key, source=p) == DATA
    wait_until(lambda: p.listed() == {})
    d.release_tensors(key)


def test_a_fetch_waits_at_the_source_for_what_is_put_later(stores: Pair, key: bytes) -> None:
    p, d = stores
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(d.get_tensor, key, "a", p)
        wait_until(lambda: p.status().waiting_count == 1)
        p.put(key, DATA)
        assert got.result() == DATA
    d.release_tensors(key)


def test_a_fetch_ends_when_the_tensor_is_put_here_by_another(stores: Pair, key: bytes) -> None:
    p, d = stores
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(d.get_tensor, key, "a", p, timeout=dur(5.0))
        wait_until(lambda: p.status().waiting_count == 1)
        p.put(key, DATA, [d])
        assert got.result() == DATA
    p.release_tensors(key)
    d.release_tensors(key)


def test_one_tensor_goes_to_several_consumers(begin: Begin, stores: Pair, key: bytes) -> None:
    p, d = stores
    (other,) = begin(TENSORS)
    p.put(key, DATA, [d, other])
    assert d.get_tensor(key) == other.get_tensor(key) == DATA
    wait_until(lambda: p.used() == 0)
    d.release_tensors(key)


def test_several_engines_fetch_one_tensor(begin: Begin, stores: Pair, key: bytes) -> None:
    p, d = stores
    (other,) = begin(TENSORS)
    p.put(key, DATA, consumer_count=2)
    assert d.get_tensor(key, source=p) == DATA
    assert p.listed() == {"a": OFFERED}
    assert other.get_tensor(key, source=p) == DATA
    wait_until(lambda: p.listed() == {})
    d.release_tensors(key)


def test_put_twice_it_arrives_once(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d])
    wait_until(lambda: p.used() == 0)
    p.put(key, DATA, [d])
    wait_until(lambda: p.used() == 0)  # freed although no consumer came for it
    assert d.used() == 4
    d.release_tensors(key)


def test_got_twice_it_is_in_the_same_pages(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d])
    pages = [ids_of(d.api.tensors.GetTensor(d.wanted(key)).pages) for _ in range(2)]
    assert pages[0] == pages[1]
    assert (d.release_tensors(key, "a"), d.release_tensors(key, "a")) == (1, 0)


def test_another_tensor_under_the_name_is_refused_and_the_first_stays(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d])
    with refused(p.api, "ALREADY_EXISTS", "TRANSFER_EXISTS"):
        p.put(key, DATA[1:], [d])
    assert d.get_tensor(key) == DATA
    d.release_tensors(key)


def test_a_list_says_who_holds_what_in_pages_and_tells_no_key(stores: Pair, key: bytes) -> None:
    p, d = stores
    for i in range(5):
        p.put(key, data_of(PAGE, i), [d], name=f"t{i}")
    d.get_tensor(key, "t3")
    assert d.listed(states=[HELD]) == {"t3": HELD}
    assert d.listed(transfer_key=new_key()) == {}
    found, token = [], ""
    while True:
        page = d.api.tensors.ListTensors(tensor_pb2.ListTensorsRequest(page_size=2, page_token=token))
        found += list(page.tensors)
        token = page.next_page_token
        assert key not in page.SerializeToString()
        if not token:
            break
    assert [row.name for row in found] == [f"t{i}" for i in range(5)]
    assert {row.peer_address for row in found} == {p.address}
    assert all((row.page_count, row.description) == (1, described(PAGE)) for row in found)
    assert all(d.get(row.transfer_id).pair_id for row in found)
    assert len({row.pair_id for row in found}) == 1
    d.release_tensors(key)


def test_parts_of_a_tensor_come_by_themselves(stores: Pair, key: bytes) -> None:
    p, d = stores
    for part in (0, 1):
        p.put(key, data_of(PAGE, part), [d], tensor=name_of(key, "a", part))
    got = [d.bytes_of(d.api.tensors.GetTensor(d.wanted(key, tensor=name_of(key, "a", part)))) for part in (0, 1)]
    assert got == [data_of(PAGE, 0), data_of(PAGE, 1)]
    d.release_tensors(key)


def test_the_request_may_have_two_names(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d], request_id="at-p")
    assert d.get_tensor(key, request_id="at-d") == DATA
    d.release_tensors(key)


def test_a_trace_goes_with_a_tensor_through_both_leads(stores: Pair, key: bytes) -> None:
    p, d = stores
    trace_id = key.hex()
    metadata = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),)
    p.api.tensors.PutTensor(p.request(key, DATA, [d], request_id="traced"), metadata=metadata)
    for store in stores:
        wanted = transfer_pb2.TransferFilter(trace_id=trace_id)
        (found,) = store.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest(filter=wanted)).transfers
        assert found.request_id == "traced"
    d.release_tensors(key)
