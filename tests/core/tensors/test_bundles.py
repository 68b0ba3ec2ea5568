"""What goes together, and when: nobody waits for nothing, nor for long."""

import pytest

from kvgrpc.core.tensors.bundles import TENSORS_MAX, WAIT_S, Gathering

NOW, MOST = 100.0, 16
LATER = NOW + WAIT_S


def gathering(*names: str, pages: int = 1, under_way: bool = True) -> Gathering[str, str]:
    """One route on which these wait, behind one that is under way."""
    made: Gathering[str, str] = Gathering()
    if under_way:
        made.add("r", "first", 1, NOW)
        assert made.take("r", MOST, NOW) == ["first"]
    for name in names:
        made.add("r", name, pages, NOW)
    return made


def test_the_first_one_goes_at_once() -> None:
    made = gathering()
    assert (made.take("r", MOST, NOW), made.next_deadline()) == ([], None)
    made.ended("r")
    assert not len(made)


def test_what_comes_meanwhile_goes_together_when_it_has_ended() -> None:
    made = gathering("a", "b", "c")
    assert made.take("r", MOST, NOW) == []
    made.ended("r")
    assert made.take("r", MOST, NOW) == ["a", "b", "c"]
    made.ended("r")
    assert not len(made)


def test_nobody_waits_longer_than_a_moment() -> None:
    made = gathering("a", "b")
    assert made.due(LATER - 1e-6) == []
    assert (made.next_deadline(), made.due(LATER)) == (LATER, ["r"])
    assert made.take("r", MOST, LATER) == ["a", "b"]
    made.add("r", "c", 1, LATER)
    assert (made.take("r", MOST, LATER), made.next_deadline()) == ([], LATER + WAIT_S)


@pytest.mark.parametrize(("pages", "together"), [(16, 1), (9, 1), (8, 2), (5, 3), (17, 1), (100, 1)])
def test_a_full_bundle_goes_at_once_and_holds_no_more_than_it_may(pages: int, together: int) -> None:
    made = gathering(*"abc", pages=pages)
    assert made.take("r", MOST, NOW) == list("abc"[:together])


def test_of_many_small_ones_so_many_go() -> None:
    names = [str(i) for i in range(TENSORS_MAX + 1)]
    made = gathering(*names, pages=0)
    assert made.take("r", MOST, NOW) == names[:TENSORS_MAX]
    assert made.take("r", MOST, NOW) == []
    assert made.take("r", MOST, LATER) == names[TENSORS_MAX:]


def test_a_consumer_that_takes_no_bundles_gets_each_at_once() -> None:
    made = gathering("a", "b")
    assert [made.take("r", 0, NOW) for _ in "abc"] == [["a"], ["b"], []]


def test_what_is_taken_back_does_not_go() -> None:
    made = gathering("a", "b", "c")
    assert (made.discard("r", "b"), made.discard("r", "b"), made.discard("other", "b")) == (True, False, False)
    made.ended("r")
    assert made.take("r", MOST, NOW) == ["a", "c"]


def test_routes_wait_by_themselves_in_the_order_of_their_waiting() -> None:
    made: Gathering[str, str] = Gathering()
    for i, route in enumerate("rst"):
        made.add(route, "first", 1, NOW)
        made.take(route, MOST, NOW)
        made.add(route, "next", 1, NOW + i)
    assert made.due(NOW + 1 + WAIT_S) == ["r", "s"]
    assert made.discard("r", "next")
    assert (made.due(NOW + 1 + WAIT_S), made.next_deadline()) == (["s"], NOW + 1 + WAIT_S)
    for route in "rst":
        made.ended(route)
    assert [made.take(route, MOST, NOW) for route in "rst"] == [[], ["next"], ["next"]]
    for route in "st":
        made.ended(route)
    assert (len(made), made.next_deadline()) == (0, None)
