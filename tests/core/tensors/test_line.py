"""The line for pages of a store: in turn, urgent tensors first, and never in a deadlock."""

from hypothesis import given, settings, strategies as st

from kvgrpc.core.tensors.line import ABSENT_MAX, KEPT_S, RESERVED, Line, LinePlace
from tests.core.tensors.made_tensors import named

PAGES = 64
ROOM = PAGES - PAGES // RESERVED
NOW = 100.0


def joined(line: Line, name: str, pages: int = 1, *, urgent: bool = False) -> LinePlace:
    return line.join(named(name), pages, urgent=urgent)


def test_who_came_first_goes_first() -> None:
    line = Line(PAGES)
    first, second = joined(line, "a"), joined(line, "b")
    assert line.head(NOW) is first
    line.leave(first)
    assert line.head(NOW) is second
    line.leave(second)
    line.leave(second)
    assert line.head(NOW) is None
    assert not len(line)


def test_a_bundle_of_which_the_engine_waits_for_some_goes_first_and_leaves_the_rest_of_the_store_for_others() -> None:
    line = Line(PAGES)
    joined(line, "a")
    bundle = joined(line, "b", 3, urgent=True)
    bundle.whole = False
    assert line.head(NOW) is bundle
    assert [line.lacks(bundle, free) for free in (3, line.reserved + 2, line.reserved + 3)] == [line.reserved, 1, 0]
    bundle.whole = True
    assert line.lacks(bundle, 3) == 0


def test_one_that_does_not_fit_is_not_overtaken() -> None:
    line = Line(PAGES)
    large, _ = joined(line, "large", 40), joined(line, "small")
    assert line.lacks(large, free=20) == 40 + line.reserved - 20
    assert line.head(NOW) is large


def test_what_the_engine_waits_for_goes_first_and_may_take_all_that_is_free() -> None:
    line = Line(PAGES)
    other, wanted, later = joined(line, "a", 3), joined(line, "b", 3), joined(line, "c", 3, urgent=True)
    assert line.head(NOW) is later
    line.hurry(wanted.id)
    line.hurry(wanted.id)
    line.hurry(named("nobody"))
    assert line.head(NOW) is later, "among them who came first"
    line.leave(later)
    assert line.head(NOW) is wanted
    assert line.lacks(wanted, free=3) == 0
    line.leave(wanted)
    assert line.lacks(other, free=3) == line.reserved


def test_a_place_that_is_asked_for_again_is_the_same_and_may_become_urgent() -> None:
    line = Line(PAGES)
    place, other = joined(line, "a"), joined(line, "b")
    assert joined(line, "b", urgent=True) is other
    assert line.head(NOW) is other
    assert joined(line, "a") is place
    assert len(line) == 2


def test_one_that_leaves_nothing_of_the_store_gets_all_of_it_when_it_is_empty() -> None:
    line = Line(PAGES)
    whole = joined(line, "whole", PAGES)
    assert line.lacks(whole, free=PAGES - 1) == 1
    assert line.lacks(whole, free=PAGES) == 0


def test_who_is_refused_keeps_its_place_until_it_must_have_come_again() -> None:
    line = Line(PAGES)
    refused, other = joined(line, "a"), joined(line, "b")
    line.refuse(refused, NOW)
    assert line.head(NOW + KEPT_S - 0.01) is refused
    assert joined(line, "a") is refused
    assert line.head(NOW + 2 * KEPT_S) is refused, "it is here again"
    line.refuse(refused, NOW)
    assert line.head(NOW + KEPT_S) is other
    assert joined(line, "a") is not refused
    assert line.head(NOW) is other


def test_a_kept_place_is_for_as_many_pages_as_are_asked_for_when_it_is_taken_again() -> None:
    line = Line(PAGES)
    place = joined(line, "a", 40)
    line.refuse(place, NOW)
    assert joined(line, "a", 2) is place
    assert place.pages == 2
    assert line.lacks(place, free=2 + line.reserved) == 0


def test_kept_places_are_bounded() -> None:
    line = Line(PAGES)
    for i in range(ABSENT_MAX + 5):
        line.refuse(joined(line, f"t{i}"), NOW)
    assert len(line) == ABSENT_MAX
    line.leave(joined(line, "t0"))
    line.refuse(joined(line, "new"), NOW)
    assert len(line) == ABSENT_MAX
    assert line.head(NOW + KEPT_S) is None
    assert len(line) == 0
    line.refuse(joined(line, "again"), NOW)
    assert len(line) == 1, "places that lapsed count no more"


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, PAGES // RESERVED), min_size=1, max_size=60),
    data=st.data(),
)
def test_an_engine_that_waits_for_one_after_the_other_gets_each_in_whatever_order_they_come(
    sizes: list[int], data: st.DataObject
) -> None:
    line, free, stored = Line(PAGES), PAGES, set[int]()
    came = data.draw(st.permutations(range(len(sizes))))
    places = {number: joined(line, str(number), sizes[number]) for number in came}
    numbers = {place: number for number, place in places.items()}

    def serve() -> None:
        nonlocal free
        while (place := line.head(NOW)) is not None and not line.lacks(place, free):
            line.leave(place)
            free -= place.pages
            stored.add(numbers[place])
            assert free >= 0

    serve()
    for number in data.draw(st.permutations(range(len(sizes)))):
        line.hurry(places[number].id)
        serve()
        assert number in stored
        stored.remove(number)
        free += sizes[number]
        serve()
    assert free == PAGES
