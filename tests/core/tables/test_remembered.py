"""Rows about things that are over: the bounds of what is remembered."""

from math import inf

from hypothesis import given, strategies as st

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.remembered import ROW_BYTES, Remembered
from kvgrpc.core.values.limits import Limits

KIND = RowKind.TOMBSTONE


def test_a_row_is_remembered_for_its_time_from_when_it_was_added_last() -> None:
    rows = Remembered[str, int](8, 10.0)
    rows.add("a", 1, 0.0)
    rows.add("b", 2, 1.0)
    rows.add("a", 3, 2.0)
    assert (list(rows.items()), rows.next_deadline()) == ([("b", 2), ("a", 3)], 11.0)
    rows.expire(10.9)
    assert len(rows) == 2
    rows.expire(11.0)
    assert (list(rows), rows.next_deadline()) == (["a"], 12.0)
    rows.drop("a")
    rows.drop("a")
    assert (dict(rows), rows.next_deadline(), rows.nbytes) == ({}, None, 0)


def test_beyond_its_number_the_oldest_row_is_forgotten() -> None:
    rows = Remembered[str, int](2)
    for number, name in enumerate("abac"):
        rows.add(name, number, 0.0)
    assert dict(rows) == {"a": 2, "c": 3}
    assert rows.next_deadline() == inf
    none = Remembered[str, int](0)
    none.add("a", 1, 0.0)
    assert not none


def test_beyond_its_bytes_the_oldest_rows_are_forgotten_and_the_newest_stays() -> None:
    ledger = Ledger(Limits(remembered_bytes=3 * ROW_BYTES))
    rows, others = (Remembered[str, None](8, inf, ledger, KIND) for _ in range(2))
    others.add("o", None, 0.0)
    for name, nbytes in (("a", 100), ("b", 100), ("c", 900)):
        rows.add(name, None, 0.0, nbytes)
    assert list(rows) == ["b", "c"]
    rows.add("large", None, 0.0, 10 * ROW_BYTES)
    assert list(rows) == ["large"]
    assert list(others) == ["o"], "each table has a bound of its own"


def test_a_table_that_outlives_a_life_is_weighed_in_the_next_ones_ledger() -> None:
    first, second = Ledger(), Ledger()
    rows = Remembered[str, None](8, inf, first, KIND)
    rows.add("a", None, 0.0)
    rows.enter(second)
    rows.add("b", None, 0.0)
    assert (first.by_kind[KIND], second.by_kind[KIND]) == (ROW_BYTES, 2 * ROW_BYTES)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 900), st.sampled_from(["add", "drop", "wait"]))))
def test_bounds_hold_and_the_ledger_has_their_bytes(steps: list[tuple[str, int, str]]) -> None:
    ledger, now = Ledger(Limits(remembered_bytes=4_000)), 0.0
    rows, model = Remembered[str, int](3, 5.0, ledger, KIND), dict[str, tuple[float, int]]()
    for name, nbytes, what in steps:
        if what == "wait":
            now += 2.0
            rows.expire(now)
            model = {name: row for name, row in model.items() if row[0] > now}
            continue
        model.pop(name, None)
        if what == "drop":
            rows.drop(name)
        else:
            rows.add(name, nbytes, now, nbytes)
            model[name] = now + 5.0, nbytes
            while len(model) > 3 or sum(row[1] + ROW_BYTES for row in model.values()) > 4_000:
                del model[next(iter(model))]
        assert list(rows.items()) == [(name, row[1]) for name, row in model.items()]
        assert ledger.by_kind[KIND] == rows.nbytes == sum(row[1] + ROW_BYTES for row in model.values())
