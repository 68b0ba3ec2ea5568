"""Soft leases, oldest first, and firm leases in the order in which they become soft."""

from hypothesis import given, strategies as st

from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.soft_leases import SoftLeases
from tests.core.made_leases import lease


def firm(soft: SoftLeases, lease_id: str, granted: float = 0.0, until: float = 3.0) -> Lease:
    made = lease(lease_id, granted, firm_until=until)
    soft.firm(made)
    return made


def names(leases: object) -> list[str]:
    return [found.id for found in leases]  # type: ignore[attr-defined]


def test_a_lease_is_soft_when_its_firm_time_is_over() -> None:
    soft = SoftLeases()
    firm(soft, "l-1", until=3.0)
    firm(soft, "l-2", until=4.0)
    assert soft.next_end() == 3.0
    assert names(soft.soften(2.9)) == []
    assert names(soft.soften(3.0)) == ["l-1"]
    assert names(soft.oldest()) == ["l-1"]
    assert (len(soft), soft.next_end()) == (1, 4.0)


def test_the_oldest_is_the_one_that_was_granted_first() -> None:
    soft = SoftLeases()
    firm(soft, "l-1", granted=2.0, until=3.0)
    firm(soft, "l-2", granted=1.0, until=4.0)
    assert names(soft.soften(4.0)) == ["l-1", "l-2"]
    assert names(soft.oldest()) == names(soft.oldest()) == ["l-2", "l-1"]


def test_one_that_is_taken_out_is_neither_soft_nor_will_be() -> None:
    soft = SoftLeases()
    first, second = firm(soft, "l-1", until=1.0), firm(soft, "l-2", until=2.0)
    list(soft.soften(1.0))
    assert soft.take_out(first)
    assert not soft.take_out(second)
    assert (names(soft.oldest()), names(soft.soonest(9)), soft.next_end(), len(soft)) == ([], [], None, 0)


def test_one_that_is_firm_anew_is_soft_later_and_once() -> None:
    soft = SoftLeases()
    made = firm(soft, "l-1", until=1.0)
    list(soft.soften(1.0))
    for until in (5.0, 7.0):
        made.firm_until = until
        soft.firm(made)
    assert names(soft.oldest()) == []
    assert names(soft.soonest(9)) == names(soft.soonest(9)) == ["l-1"]
    assert names(soft.soften(5.0)) == []
    assert names(soft.soften(7.0)) == ["l-1"]
    assert names(soft.oldest()) == ["l-1"]


def test_of_many_the_next_ones_are_named_in_their_order() -> None:
    soft = SoftLeases()
    for number in (3, 1, 2):
        firm(soft, f"l-{number}", until=float(number))
    assert names(soft.soonest(2)) == ["l-1", "l-2"]


def test_what_was_claimed_before_it_was_soft_leaves_nothing_behind_for_long() -> None:
    soft = SoftLeases()
    stays = firm(soft, "stays", until=9.0)
    for number in range(3_000):
        soft.take_out(firm(soft, f"l-{number}", until=10.0 + number))
    assert sum(len(kept) for kept in vars(soft).values() if isinstance(kept, dict | list)) <= 1_100
    assert list(soft.soften(9.0)) == [stays]


def test_what_is_over_leaves_nothing_behind_for_long() -> None:
    soft = SoftLeases()
    for number in range(5_000):
        made = firm(soft, f"l-{number}", granted=float(number), until=float(number))
        if number % 2:
            list(soft.soften(float(number)))
        soft.take_out(made)
    assert sum(len(kept) for kept in vars(soft).values() if isinstance(kept, dict | list)) <= 2_100


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(("firm", "out", "look")), st.integers(0, 9))))
def test_it_is_what_a_plain_list_would_say(steps: list[tuple[str, str, int]]) -> None:
    soft, now = SoftLeases(), 0
    known: dict[str, Lease] = {name: lease(name, float(i)) for i, name in enumerate("dcba")}
    due: dict[str, float] = {}
    for name, what, number in steps:
        if what == "firm":
            due[name] = known[name].firm_until = float(now + number)
            soft.firm(known[name])
        elif what == "out":
            soft.take_out(known[name])
            due.pop(name, None)
        else:
            now += number
            list(soft.soften(float(now)))
        is_soft = {name for name in soft._soft}  # noqa: C416 - compared with the model below
        assert is_soft <= due.keys()
        assert names(soft.oldest()) == [name for name in known if name in is_soft]
        assert set(names(soft.soonest(9))) == due.keys() - is_soft
        if what == "look":
            assert is_soft == {name for name, when in due.items() if when <= now}
