"""A wait for one tensor of a request renews all tensors of that request."""

import pytest

from kvgrpc.core.tensors.offer_tables import RENEW_S
from kvgrpc.core.tensors.rows import Purpose
from kvgrpc.core.values.owners import ANONYMOUS
from tests.core.tensors.made_tensors import KEY, OTHER, all_spilled, named, spilling, store


def test_what_is_stored_lasts_while_something_of_its_request_is_waited_for() -> None:
    made = store()
    made.store("a", "b")
    made.store("c", key=OTHER)
    made.pass_time(99.0)
    made.ask("never put")
    made.pass_time(1.0)
    assert made.dropped == [named("c", OTHER)]
    made.pass_time(98.0)
    assert len(made.table.tensors) == 2
    made.pass_time(1.0)
    assert {id_.name for id_ in made.dropped} == {"a", "b", "c"}


def test_what_is_renewed_ends_all_the_same() -> None:
    made = store(kept_s=150.0)
    made.store("a")
    for _ in range(3):
        made.pass_time(49.0)
        made.ask("never put", wait_s=1.0)
    made.pass_time(2.9)
    assert made.dropped == []
    made.pass_time(0.1)
    assert made.dropped == [named("a")]


def test_a_cap_that_is_shorter_than_its_ttl_ends_nothing_sooner() -> None:
    made = store(kept_s=10.0)
    made.store("a")
    made.ask("never put")
    made.pass_time(99.9)
    assert made.dropped == []


def test_what_is_outside_of_the_store_lasts_too() -> None:
    made = store(pages=2, spill_pages=2)
    made.store("a", pages=2)
    all_spilled(made, spilling(made, 2))
    made.pass_time(60.0)
    made.ask("never put")
    made.pass_time(60.0)
    assert made.dropped == []


def test_what_a_caller_holds_ends_as_before() -> None:
    made = store(held_s=20.0)
    made.store("a")
    made.ask("a", caller=ANONYMOUS)
    made.pass_time(10.0)
    made.ask("never put", wait_s=100.0)
    made.pass_time(10.0)
    assert made.dropped == [named("a")]


@pytest.mark.parametrize("purpose", [Purpose.OFFERED, Purpose.GIVEN])
def test_what_is_kept_is_renewed_together_and_not_too_often(purpose: Purpose) -> None:
    made = store()
    for name in "abc":
        offer = made.offer(name, allocation=name, to="d:1" if name == "c" else "")
        if name != "b":
            made.table.offered(offer, b"token", f"t-{name}")
    made.ask("never put", purpose)
    made.ask("never put", purpose)
    assert made.renewed == [[named("a")]]
    made.pass_time(RENEW_S)
    made.ask("never put", purpose)
    assert made.renewed == [[named("a")]] * 2


def test_nothing_is_remembered_of_a_request_of_which_nothing_is_here() -> None:
    made = store()
    made.ask("never put")
    made.store("a")
    made.ask("never put")
    made.release()
    requests = made.table._requests
    assert (KEY in requests, requests._of, requests._renewed) == (False, {}, {})
