"""A fair queue gives callers equal shares, by cost, and less to those with many items in it."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.tables.fair_queue import CLOCKS_MIN, FairQueue

NEVER_LATE = -1.0


def queue_of(*callers: str, cost: float = 1.0) -> FairQueue[int]:
    """Returns a queue with an item, its number, of each caller that is named, in order."""
    queue: FairQueue[int] = FairQueue()
    for number, caller in enumerate(callers):
        queue.join(caller, number, cost, now=float(number))
    return queue


def order_of(queue: FairQueue[int], late: float = NEVER_LATE) -> list[tuple[str, int]]:
    return [queue.next(late) for _ in range(len(queue))]


def test_items_of_one_caller_go_in_the_order_in_which_they_came() -> None:
    assert order_of(queue_of("a", "a", "a")) == [("a", 0), ("a", 1), ("a", 2)]


def test_the_newest_goes_first_while_the_oldest_is_late() -> None:
    queue = queue_of("a", "a", "a")
    assert queue.next(late=1.0) == ("a", 2)
    assert queue.next(late=0.0) == ("a", 0)


def test_a_caller_with_few_items_does_not_wait_for_those_with_many() -> None:
    callers = [caller for caller, _ in order_of(queue_of(*"aaaaaaaa", *"bb"))]
    assert callers[:4].count("b") == 2
    assert callers[4:] == list("aaaaaa")


def test_a_caller_that_comes_waits_for_one_item_of_each_other_caller_at_most() -> None:
    queue = queue_of(*"aaaabbbb")
    for _ in range(3):
        queue.next(NEVER_LATE)
    queue.join("new", 100, 1.0, now=9.0)
    assert ("new", 100) in [queue.next(NEVER_LATE) for _ in range(3)]


def test_ever_new_callers_do_not_keep_another_from_its_share() -> None:
    queue = queue_of(*"aaaa")
    for number in range(24):
        queue.join(f"caller {number}", 100 + number, 1.0, now=9.0)
        queue.next(NEVER_LATE)
    assert not queue.count_of("a")


def test_a_caller_that_was_away_has_saved_nothing_up() -> None:
    queue = queue_of("b", *"a" * 40)
    for _ in range(31):
        queue.next(NEVER_LATE)
    for number in range(10):
        queue.join("b", 100 + number, 1.0, now=50.0)
    assert Counter(queue.next(NEVER_LATE)[0] for _ in range(10))["b"] <= 6


def test_callers_with_one_item_at_a_time_get_the_same() -> None:
    queue: FairQueue[int] = FairQueue()
    got: Counter[str] = Counter()
    for number in range(20):
        for caller in "ab":
            if not queue.count_of(caller):
                queue.join(caller, 2 * number + (caller == "b"), 1.0, now=50.0)
        got[queue.next(NEVER_LATE)[0]] += 1
    assert abs(got["a"] - got["b"]) <= 1


def test_a_caller_that_has_many_items_gets_less_and_still_something() -> None:
    queue = queue_of(*"a" * 40)
    got: Counter[str] = Counter()
    for number in range(20):
        if not queue.count_of("b"):
            queue.join("b", 100 + number, 1.0, now=50.0)
        got[queue.next(NEVER_LATE)[0]] += 1
    assert got["b"] > got["a"] > 0


def test_an_item_that_costs_more_counts_for_more() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(30):
        queue.join("dear", number, 3.0, now=0.0)
        queue.join("cheap", 100 + number, 1.0, now=0.0)
    got = Counter(queue.next(NEVER_LATE)[0] for _ in range(20))
    assert got["cheap"] == pytest.approx(3 * got["dear"], abs=3)


def test_an_item_that_leaves_has_gone_and_may_leave_twice() -> None:
    queue = queue_of("a", "b", "a")
    queue.leave("a", 0)
    queue.leave("a", 0)
    queue.leave("c", 0)
    queue.leave("b", 1)
    assert (len(queue), queue.count_of("a"), queue.count_of("b"), queue.count_of("c")) == (1, 1, 0, 0)
    assert order_of(queue) == [("a", 2)]


def test_only_the_oldest_is_taken_out_as_late() -> None:
    queue = queue_of("a", "a")
    assert queue.take_late("a", late=0.0) is None
    assert queue.take_late("a", late=0.5) == 0
    assert queue.take_late("a", late=0.5) is None
    assert queue.take_late("a", late=5.0) == 1
    assert queue.take_late("a", late=5.0) is None
    assert queue.take_late("b", late=5.0) is None
    assert len(queue) == 0


def test_clocks_of_callers_that_are_gone_are_forgotten() -> None:
    queue = queue_of(*"a" * (4 * CLOCKS_MIN))
    for number in range(3 * CLOCKS_MIN):
        queue.join(f"caller {number}", 1_000 + number, 1.0, now=0.0)
        while queue.count_of(f"caller {number}"):
            queue.next(NEVER_LATE)
    assert queue.clocks_kept <= CLOCKS_MIN + 3
    order_of(queue)
    assert queue.clocks_kept == 0


def test_callers_whose_items_have_all_left_are_forgotten() -> None:
    queue = FairQueue[int]()
    for item in range(1_000):
        queue.join(f"caller {item}", item, 1.0, 0.0)
    for item in range(1_000):
        queue.leave(f"caller {item}", item)
    assert (len(queue), queue.clocks_kept) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["join", "next", "leave", "late"])), max_size=80))
def test_every_item_comes_out_once(steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[int, str] = {}
    for number, (caller, step) in enumerate(steps):
        if step == "join":
            queue.join(caller, number, 1.0, float(number))
            waiting[number] = caller
        elif step == "next" and waiting:
            owner, item = queue.next(number - 5.0)
            assert waiting.pop(item) == owner
        elif step == "leave" and caller in waiting.values():
            mine = next(item for item, owner in waiting.items() if owner == caller)
            queue.leave(caller, mine)
            del waiting[mine]
        elif step == "late" and (late := queue.take_late(caller, number - 5.0)) is not None:
            assert waiting.pop(late) == caller
        assert len(queue) == len(waiting)
    assert {item for _, item in order_of(queue)} == set(waiting)
