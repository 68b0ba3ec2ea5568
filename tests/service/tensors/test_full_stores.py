"""A store at its limit: nothing is dropped, nothing exceeds a limit, and calls wait until there is room."""

from concurrent.futures import ThreadPoolExecutor

from kvgrpc.core.tensors.line import RESERVED
from tests.service.api import refused
from tests.service.engines import wait_until
from tests.service.tensors.conftest import Begin
from tests.service.tensors.stores import HELD, PAGE, PAGES, SPILLED, STORED, TENSORS, Store, data_of
from tests.service.values import dur

Pair = tuple[Store, Store]
ROOM = PAGES - PAGES // RESERVED
"""Number of pages for tensors that no engine waits for."""
HALF = ROOM // 2 * PAGE


def test_a_full_store_refuses_with_a_delay_and_keeps_what_it_has(stores: Pair, key: bytes) -> None:
    p, d = stores
    for name in ("a", "b"):
        p.put(key, data_of(HALF), [d], name=name)
    refusal = p.api.refusal(lambda: p.put(key, data_of(PAGE), [d], name="c", timeout=dur(0.5)))
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "POOL_EXHAUSTED")
    assert refusal.retry_delay_s
    assert d.listed() == {"a": STORED, "b": STORED}
    assert d.get_tensor(key) == data_of(HALF)
    wait_until(lambda: p.used() == 0)
    d.release_tensors(key)


def test_a_put_that_found_no_room_is_stored_when_there_is_some(stores: Pair, key: bytes) -> None:
    p, d = stores
    for name in ("a", "b"):
        p.put(key, data_of(HALF), [d], name=name)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(p.put, key, data_of(PAGE, 9), [d], "c")
        wait_until(lambda: "c" in p.listed())
        assert not late.done()
        d.get_tensor(key, "a")
        d.release_tensors(key, "a")
        late.result()
    assert d.get_tensor(key, "c") == data_of(PAGE, 9)
    d.release_tensors(key)


def test_puts_that_find_no_room_are_in_line_in_the_order_in_which_they_came(stores: Pair, key: bytes) -> None:
    p, d = stores
    for name in ("a", "b"):
        p.put(key, data_of(HALF), [d], name=name)
    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(p.put, key, data_of(2 * HALF, 8), [d], "large")
        wait_until(lambda: d.status().queued_count == 1)
        small = threads.submit(p.put, key, data_of(PAGE, 9), [d], "small")
        wait_until(lambda: d.status().queued_count == 2)
        d.get_tensor(key, "a")
        d.release_tensors(key, "a")
        assert d.status().queued_count == 2, "there is room for the one that came later, which overtakes nobody"
        assert not large.done()
        assert not small.done()
        d.get_tensor(key, "b")
        d.release_tensors(key, "b")
        large.result()
        assert d.get_tensor(key, "large") == data_of(2 * HALF, 8)
        d.release_tensors(key, "large")
        small.result()
    wait_until(lambda: d.status().queued_count == 0)
    d.release_tensors(key)


def test_a_fetch_into_a_full_store_waits_for_room(stores: Pair, key: bytes) -> None:
    p, d = stores
    for name in ("a", "b"):
        p.put(key, data_of(HALF), [d], name=name)
    kept = data_of((PAGES - ROOM + 1) * PAGE, 9)
    p.put(key, kept, name="kept")
    with refused(d.api, "DEADLINE_EXCEEDED", "DEADLINE"):
        d.get_tensor(key, "kept", p, timeout=dur(0.5))
    wait_until(lambda: "kept" not in d.listed())
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(d.get_tensor, key, "kept", p)
        wait_until(lambda: "kept" in d.listed())
        d.release_tensors(key, "b")
        assert late.result() == kept
    d.release_tensors(key)


def test_a_part_of_a_full_store_is_for_what_the_engine_waits_for(stores: Pair, key: bytes) -> None:
    p, d = stores
    for name in ("a", "b"):
        p.put(key, data_of(HALF), [d], name=name)
    kept = data_of((PAGES - ROOM) * PAGE, 9)
    p.put(key, kept, name="kept")
    assert d.status().reserved_page_count == PAGES - ROOM
    assert d.get_tensor(key, "kept", p) == kept
    d.release_tensors(key)


def test_an_engine_that_wants_tensors_in_another_order_than_they_come_gets_all(stores: Pair, key: bytes) -> None:
    p, d = stores
    names = [f"t{i}" for i in range(11)]
    for name in names:
        p.put(key, data_of(5 * PAGE, int(name[1:])), [d], name, asynchronous=True)
    wait_until(lambda: len(d.listed()) == 11 and d.used() == ROOM // 5 * 5)
    for name in names:
        p.put(key, data_of(PAGE, 1), [d], f"other {name}", asynchronous=True)
    for name in reversed(names):
        assert d.get_tensor(key, name) == data_of(5 * PAGE, int(name[1:]))
        d.release_tensors(key, name)
    wait_until(lambda: p.used() == 0)
    d.release_tensors(key)


def test_tensors_that_nobody_asked_for_are_spilled_and_come_back(begin: Begin, stores: Pair, key: bytes) -> None:
    p, _ = stores
    (d,) = begin(TENSORS + f"spill_bytes = {HALF}\n")
    for name in ("a", "b", "c"):
        p.put(key, data_of(HALF, ord(name)), [d], name=name)
        assert d.used() <= PAGES
    assert d.listed() == {"a": SPILLED, "b": STORED, "c": STORED}
    assert d.status().used_spill_page_count == d.status().spill_page_count == HALF // PAGE
    with refused(p.api, "RESOURCE_EXHAUSTED", "POOL_EXHAUSTED"):
        p.put(key, data_of(PAGE), [d], name="d", timeout=dur(0.5))
    assert d.get_tensor(key, "b") == data_of(HALF, ord("b"))
    d.release_tensors(key, "b")
    assert d.get_tensor(key, "a") == data_of(HALF, ord("a"))
    assert d.listed() == {"a": HELD, "c": STORED}
    assert d.status().used_spill_page_count == 0
    assert d.get_tensor(key, "c") == data_of(HALF, ord("c"))
    d.release_tensors(key)
    assert d.used() == 0


def test_what_is_wanted_back_goes_before_what_comes_new(begin: Begin, stores: Pair, key: bytes) -> None:
    p, _ = stores
    (d,) = begin(TENSORS + f"spill_bytes = {HALF}\n")
    for name in ("a", "b", "c"):
        p.put(key, data_of(HALF, ord(name)), [d], name=name)
    for name in ("b", "c"):
        d.get_tensor(key, name)
    with ThreadPoolExecutor(2) as threads:
        back = threads.submit(d.get_tensor, key, "a")
        wait_until(lambda: d.status().waiting_count == 1)
        new = threads.submit(p.put, key, data_of(HALF, 1), [d], "new")
        d.release_tensors(key, "b")
        assert back.result() == data_of(HALF, ord("a"))
        assert not new.done()
        d.release_tensors(key, "c")
        new.result()
    d.release_tensors(key)


def test_many_puts_and_gets_through_a_small_store_lose_nothing(begin: Begin, stores: Pair, key: bytes) -> None:
    p, _ = stores
    (d,) = begin(TENSORS + f"spill_bytes = {8 * PAGE}\n")
    names = [f"t{i}" for i in range(40)]

    def put(name: str) -> None:
        p.put(key, data_of(5 * PAGE, int(name[1:])), [d], name=name, timeout=dur(60.0))

    def get(name: str) -> bool:
        right = d.get_tensor(key, name, timeout=dur(60.0)) == data_of(5 * PAGE, int(name[1:]))
        d.release_tensors(key, name)
        return right

    with ThreadPoolExecutor(4) as puts, ThreadPoolExecutor(4) as gets:
        sent = [puts.submit(put, name) for name in names]
        got = [gets.submit(get, name) for name in names]
        assert all(future.result() for future in got)
        for future in sent:
            future.result()
    assert (d.used(), d.status().used_spill_page_count, d.listed()) == (0, 0, {})
