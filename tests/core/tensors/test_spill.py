"""Spilling makes room in a full store, and spilled tensors come back when they are asked for."""

from typing import Any

import pytest

from kvgrpc.core.tensors.descriptions import TensorId
from kvgrpc.core.tensors.rows import Purpose, Tensor
from kvgrpc.core.tensors.spill import PASSED_OVER_MAX
from kvgrpc.errors import Exhausted, Reason
from tests.core.tensors.made_tensors import Store, all_spilled, named, spilling, store

FULL = Exhausted(Reason.POOL_EXHAUSTED, "full")


class Looked(dict[TensorId, Tensor]):
    """Rows that count how many of them are looked at."""

    looked_at = 0

    def values(self) -> Any:
        for row in super().values():
            self.looked_at += 1
            yield row


def spilling_of(made: Store, name: str, pages: int) -> Tensor:
    """Makes a tensor that is spilled out of the store."""
    made.store(name, pages=pages)
    (tensor,) = spilling(made, pages)
    all_spilled(made, [tensor])
    return tensor


def spilled_store(*names: str) -> Store:
    """Makes a store whose tensors `names` are all spilled."""
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
    assert made.table.spill_pages.used == 2


@pytest.mark.parametrize(("limit", "needed"), [(0, 1), (1, 2), (2, 5)])
def test_the_limit_is_never_exceeded_and_nothing_is_spilled_for_nothing(limit: int, needed: int) -> None:
    made = store(spill_pages=limit)
    made.store("a", "b", "c")
    assert spilling(made, needed) == []
    assert made.stages() == dict.fromkeys("abc", "stored")
    assert made.table.spill_pages.used == 0


def test_one_that_does_not_fit_outside_is_passed_over() -> None:
    made = store(spill_pages=1)
    made.store("large", pages=2)
    made.store("small")
    assert [tensor.id.name for tensor in spilling(made, 1)] == ["small"]


def test_a_store_of_which_too_little_is_idle_is_not_looked_through() -> None:
    made = store(pages=4096, spill_pages=4096)
    made.store(*(f"t{i}" for i in range(100)))
    rows = Looked(made.table._idle._rows)
    made.table._idle._rows = rows
    assert spilling(made, 101) == []
    assert rows.looked_at == 0
    assert len(spilling(made, 3)) == 3
    assert rows.looked_at <= 4


def test_a_spill_that_is_full_is_not_looked_for_room_in() -> None:
    made = store(pages=4096, spill_pages=1)
    made.store("small", *(f"t{i}" for i in range(100)))
    all_spilled(made, spilling(made, 1))
    made.table._idle._rows = rows = Looked(made.table._idle._rows)
    assert spilling(made, 1) == []
    assert rows.looked_at == 0


def test_not_more_than_some_are_passed_over() -> None:
    made = store(pages=4096, spill_pages=1)
    made.store(*(f"large{i}" for i in range(PASSED_OVER_MAX)), pages=2)
    made.store("small")
    assert spilling(made, 1) == []
    made.release("large0")
    assert [tensor.id.name for tensor in spilling(made, 1)] == ["small"]


def test_pages_outside_are_each_of_one_tensor_and_are_used_again() -> None:
    made = store(spill_pages=4)
    a, b = spilling_of(made, "a", 1), spilling_of(made, "b", 2)
    assert sorted(a.slots + b.slots) == [0, 1, 2]
    freed = a.slots
    made.release("a")
    assert made.table.spill_pages.free == 2
    c = spilling_of(made, "c", 2)
    assert set(freed) < set(c.slots)
    assert sorted(b.slots + c.slots) == [0, 1, 2, 3]


def test_one_that_is_asked_for_while_it_is_copied_out_does_not_end_with_its_time() -> None:
    made = store(spill_pages=8)
    made.store("a")
    (tensor,) = spilling(made, 1)
    made.now = 95.0
    asked = made.ask("a", wait_s=10.0)
    made.pass_time(6.0)
    assert made.stages() == {"a": "spilling"}
    all_spilled(made, [tensor])
    assert made.answers == {asked: tensor}


def test_one_whose_caller_leaves_while_it_is_copied_out_has_its_time_again() -> None:
    made = store(spill_pages=8)
    made.store("a")
    (tensor,) = spilling(made, 1)
    made.table.waits.forget(made.ask("a"))
    assert made.table.timers.next_deadline() is None
    made.now = 5.0
    all_spilled(made, [tensor])
    assert made.table.timers.next_deadline() == 105.0


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
    assert (tensor.allocation_id, made.table.spill_pages.used) == ("b-new", 0)
    assert made.stages() == {"a": "held"}


def test_what_is_asked_for_while_it_is_copied_out_stays_in() -> None:
    made = store(spill_pages=8)
    made.store("a")
    (tensor,) = spilling(made, 1)
    asked = made.ask("a")
    assert made.answers == {}
    assert all_spilled(made, [tensor]) == [""]
    assert made.answers == {asked: tensor}
    assert (tensor.allocation_id, made.table.spill_pages.used, made.stages()) == ("b-a", 0, {"a": "held"})


def test_memory_that_is_being_copied_comes_back_when_that_is_over() -> None:
    made = store(spill_pages=8)
    made.store("a")
    (tensor,) = spilling(made, 1)
    made.release()
    assert (made.dropped, made.table.spill_pages.used) == ([], 1)
    assert made.table.spilled(tensor, made.now) == "b-a"
    assert made.table.spill_pages.used == 0


def test_one_that_is_dropped_while_it_comes_back_gives_back_both() -> None:
    made = spilled_store("a")
    made.ask("a")
    (tensor,) = made.wanted_back
    made.table.returning(tensor, "b-new")
    made.release()
    assert made.dropped == []
    assert made.table.returned(tensor, made.now) == "b-new"
    assert made.table.spill_pages.used == 0


def test_one_that_cannot_be_copied_out_stays_in_its_pages() -> None:
    made = store(spill_pages=8)
    made.store("a", "dropped")
    kept, dropped = spilling(made, 2)
    made.release("dropped")
    assert made.table.spilled(kept, made.now, copied=False) == ""
    assert made.table.spilled(dropped, made.now, copied=False) == "b-dropped"
    assert (made.stages(), made.table.spill_pages.used) == ({"a": "stored"}, 0)
    assert made.answers[made.ask("a")] is kept


@pytest.mark.parametrize("dropped", [False, True])
def test_one_that_cannot_be_copied_back_gives_its_new_pages_back(dropped: bool) -> None:
    made = spilled_store("a")
    asked = made.ask("a")
    (tensor,) = made.wanted_back
    made.table.returning(tensor, "b-new")
    if dropped:
        made.release("a")
    assert made.table.stays_out(tensor, FULL, made.now) == "b-new"
    made.take()
    assert made.stages() == ({} if dropped else {"a": "spilled"})
    assert made.table.spill_pages.used == (0 if dropped else 1)
    assert made.answers[asked].reason is (Reason.TRANSFER_ENDED if dropped else Reason.POOL_EXHAUSTED)
    assert not tensor.copying


def test_one_that_is_dropped_outside_is_gone_at_once() -> None:
    made = spilled_store("a")
    made.release("a")
    assert (made.dropped, made.table.spill_pages.used) == ([named("a")], 0)


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
    assert (made.dropped, made.table.spill_pages.used) == ([named("a")], 0)


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
