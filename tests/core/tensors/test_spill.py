"""How room is made in a full store, and how what was spilled comes back."""

import pytest

from kvgrpc.core.tensors.rows import Purpose
from kvgrpc.errors import Exhausted, Reason
from tests.core.tensors.made_tensors import Store, all_spilled, named, spilling, store

FULL = Exhausted(Reason.POOL_EXHAUSTED, "full")


def spilled_store(*names: str) -> Store:
    """These are outside of the store."""
    made = store(spill_pages=8)
    all_spilled(made, made.table.spill(len(made.store(*names)), made.now))
    return made


def test_the_oldest_that_nobody_asked_for_go_first_and_no_more_than_needed() -> None:
    made = store(spill_pages=8)
    made.store("a", "asked", "b", "c")
    made.ask("asked")
    chosen = spilling(made, 2)
    assert [tensor.id.name for tensor in chosen] == ["a", "b"]
    assert all_spilled(made, chosen) == ["b-a", "b-b"]
    assert made.stages() == {"a": "spilled", "asked": "held", "b": "spilled", "c": "stored"}
    assert made.table.spilled_pages == 2


@pytest.mark.parametrize(("limit", "needed"), [(0, 1), (1, 2), (2, 5)])
def test_the_limit_is_never_exceeded_and_nothing_is_spilled_for_nothing(limit: int, needed: int) -> None:
    made = store(spill_pages=limit)
    made.store("a", "b", "c")
    assert spilling(made, needed) == []
    assert made.stages() == dict.fromkeys("abc", "stored")
    assert made.table.spilled_pages == 0


def test_one_that_does_not_fit_outside_is_passed_over() -> None:
    made = store(spill_pages=1)
    made.store("large", pages=2)
    made.store("small")
    assert [tensor.id.name for tensor in spilling(made, 1)] == ["small"]


def test_what_is_asked_for_is_brought_back_and_held() -> None:
    made = spilled_store("a")
    asked = made.ask("a")
    (tensor,) = made.wanted_back
    assert (made.stages(), made.answers) == ({"a": "returning"}, {})
    again = made.ask("a")
    assert len(made.wanted_back) == 1
    made.table.returning(tensor, "b-new")
    assert made.table.returned(tensor, made.now) == ""
    made.take()
    assert made.answers == {asked: tensor, again: tensor}
    assert (tensor.allocation_id, made.table.spilled_pages) == ("b-new", 0)
    assert made.stages() == {"a": "held"}


def test_what_is_asked_for_while_it_is_copied_out_stays_in() -> None:
    made = store(spill_pages=8)
    made.store("a")
    (tensor,) = spilling(made, 1)
    asked = made.ask("a")
    assert made.answers == {}
    assert all_spilled(made, [tensor]) == [""]
    assert made.answers == {asked: tensor}
    assert (tensor.allocation_id, made.table.spilled_pages, made.stages()) == ("b-a", 0, {"a": "held"})


def test_memory_that_is_being_copied_comes_back_when_that_is_over() -> None:
    made = store(spill_pages=8)
    made.store("a")
    (tensor,) = spilling(made, 1)
    made.release()
    assert (made.dropped, made.table.spilled_pages) == ([], 1)
    assert made.table.spilled(tensor, made.now) == "b-a"
    assert made.table.spilled_pages == 0


def test_one_that_is_dropped_while_it_comes_back_gives_back_both() -> None:
    made = spilled_store("a")
    made.ask("a")
    (tensor,) = made.wanted_back
    made.table.returning(tensor, "b-new")
    made.release()
    assert made.dropped == []
    assert made.table.returned(tensor, made.now) == "b-new"
    assert made.table.spilled_pages == 0


def test_one_that_is_dropped_outside_is_gone_at_once() -> None:
    made = spilled_store("a")
    made.release("a")
    assert (made.dropped, made.table.spilled_pages) == ([named("a")], 0)


def test_one_for_which_there_is_no_room_stays_out_and_may_be_asked_for_again() -> None:
    made = spilled_store("a")
    asked = made.ask("a")
    made.table.stays_out(made.wanted_back[0], FULL, made.now)
    made.take()
    assert (made.answers, made.stages()) == ({asked: FULL}, {"a": "spilled"})
    made.ask("a")
    assert len(made.wanted_back) == 2
    made.release()
    made.table.stays_out(made.wanted_back[1], FULL, made.now)
    assert made.stages() == {}


def test_what_is_outside_ends_with_its_time_too() -> None:
    made = spilled_store("a")
    made.pass_time(100.0)
    assert (made.dropped, made.table.spilled_pages) == ([named("a")], 0)


def test_what_is_put_again_while_it_is_outside_is_stored() -> None:
    made = spilled_store("a")
    tensor = made.table.tensors[named("a")]
    assert made.answers[made.ask("a", Purpose.STORED)] is tensor
    assert made.stages() == {"a": "spilled"}


def test_one_that_came_back_for_who_has_left_is_idle_again() -> None:
    made = spilled_store("a")
    made.table.waits.forget(made.ask("a"))
    (tensor,) = made.wanted_back
    made.table.returning(tensor, "b-new")
    made.table.returned(tensor, made.now)
    assert made.stages() == {"a": "stored"}
    assert spilling(made, 1) == [tensor]
