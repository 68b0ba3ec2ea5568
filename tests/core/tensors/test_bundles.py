"""Bundles: which tensors go together, and that none waits without a reason or for long."""

import pytest

from kvgrpc.core.tensors.bundles import TENSORS_MAX, WAIT_S, BundleQueue
from kvgrpc.core.tensors.descriptions import ANY, ExpectedTensor, Get, NamedTensor, Put, WantedTensor
from kvgrpc.core.tensors.rows import TensorOffer
from tests.core.tensors.made_tensors import Store, named, of_pages, store

NOW, MOST = 100.0, 16
LATER = NOW + WAIT_S


def gathering(*names: str, pages: int = 1, under_way: bool = True) -> BundleQueue[str, str]:
    """Makes one route on which `names` wait; with `under_way`, behind a bundle in flight."""
    made: BundleQueue[str, str] = BundleQueue()
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


def test_where_nothing_waits_nothing_goes_however_long_the_last_one_takes() -> None:
    made = gathering()
    assert made.take("r", MOST, LATER) == []
    assert made.take("other", MOST, LATER) == []
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
    made: BundleQueue[str, str] = BundleQueue()
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


def test_a_call_is_about_its_own_tensor_first_and_then_the_bundled_ones() -> None:
    further = NamedTensor(named("b"), of_pages(2))
    assert Put(named("a"), of_pages(1), bundled=(further,)).tensors == (NamedTensor(named("a"), of_pages(1)), further)
    wanted = WantedTensor(named("b"))
    assert Get(named("a"), ANY, bundled=(wanted,)).wanted == (WantedTensor(named("a")), wanted)


def kept(made: Store, name: str, pages: int = 1, *, to: str = "", count: int = 1) -> TensorOffer:
    """Makes an offer that stands."""
    offer = made.offer(name, pages, f"b-{name}", to, count)
    made.table.offered(offer, b"token", f"t-{name}")
    return offer


def together(made: Store, *names: str, most_pages: int = MOST, expected: ExpectedTensor = ANY) -> list[str]:
    """Returns the names of the tensors that go with a get of `names`."""
    found = made.table.kept.together([WantedTensor(named(name), expected) for name in names], most_pages)
    return [offer.id.name for offer in found]


def test_what_is_kept_for_one_consumer_goes_together_in_the_order_of_the_asking() -> None:
    made = store()
    for name in "abc":
        kept(made, name)
    assert together(made, *"cab") == ["c", "a", "b"]
    assert together(made, *"aba") == ["a", "b"], "each once"
    assert together(made, "a", "missing") == ["a"]


def test_what_is_for_several_or_sent_or_not_ready_or_read_already_goes_by_itself() -> None:
    made = store()
    kept(made, "plain")
    kept(made, "of two", count=2)
    kept(made, "sent", to="consumer:1")
    made.offer("early", allocation="b-early")
    kept(made, "lent").lent = "t-9"
    assert together(made, "of two", "sent", "early", "lent", "plain") == ["plain"]


def test_what_is_not_as_expected_is_left_to_a_call_of_its_own() -> None:
    made = store()
    kept(made, "a")
    assert together(made, "a", expected=ExpectedTensor(dtype="float64")) == []
    assert together(made, "a", expected=ExpectedTensor(dtype="uint8")) == ["a"]


@pytest.mark.parametrize(("most", "names"), [(0, []), (1, ["c"]), (2, ["a"]), (3, ["a", "c"]), (5, ["a", "b"])])
def test_no_more_pages_go_together_than_are_asked_for(most: int, names: list[str]) -> None:
    made = store()
    for name, pages in (("a", 2), ("b", 3), ("c", 1)):
        kept(made, name, pages)
    assert together(made, *"abc", most_pages=most) == names
