"""Deadlines fire once and in order, and clearing or moving one costs no search."""

import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.tables.timers import FORGET_TOGETHER_S, FORGETS, STALE_MIN, Timer, Timers


def drain(timers: Timers, now: float) -> list[tuple[Timer, str]]:
    return list(timers.due(now))


def test_nothing_is_due_at_first() -> None:
    timers = Timers()
    assert timers.next_deadline() is None
    assert drain(timers, 1e9) == []
    assert len(timers) == 0


def test_the_earliest_is_next_and_what_is_due_comes_in_order() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "b", 2.0)
    timers.set(Timer.LEASE, "a", 1.0)
    timers.set(Timer.QUEUE, "a", 3.0)
    assert timers.next_deadline() == 1.0
    assert drain(timers, 2.0) == [(Timer.LEASE, "a"), (Timer.LEASE, "b")]
    assert timers.next_deadline() == 3.0


def test_what_is_due_at_one_moment_comes_in_the_order_of_setting() -> None:
    timers = Timers()
    for name in ("z", "a", "m"):
        timers.set(Timer.LEASE, name, 1.0)
    assert [name for _, name in drain(timers, 1.0)] == ["z", "a", "m"]


def test_a_deadline_fires_at_its_very_moment_and_not_before() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "a", 1.0)
    assert drain(timers, 0.9999999) == []
    assert drain(timers, 1.0) == [(Timer.LEASE, "a")]
    assert drain(timers, 1.0) == []


def test_moving_a_deadline_forgets_the_old_one_both_ways() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "later", 1.0)
    timers.set(Timer.LEASE, "later", 5.0)
    timers.set(Timer.LEASE, "earlier", 5.0)
    timers.set(Timer.LEASE, "earlier", 2.0)
    assert timers.when(Timer.LEASE, "later") == 5.0
    assert drain(timers, 4.0) == [(Timer.LEASE, "earlier")]
    assert drain(timers, 5.0) == [(Timer.LEASE, "later")]
    assert len(timers) == 0


def test_a_deadline_set_twice_to_one_moment_fires_once() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "a", 1.0)
    timers.set(Timer.LEASE, "a", 1.0)
    assert drain(timers, 1.0) == [(Timer.LEASE, "a")]


def test_a_cleared_deadline_never_fires() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "a", 1.0)
    timers.set(Timer.QUEUE, "a", 2.0)
    timers.clear(Timer.LEASE, "a")
    timers.clear(Timer.LEASE, "never set")
    assert timers.when(Timer.LEASE, "a") is None
    assert drain(timers, 9.0) == [(Timer.QUEUE, "a")]


def test_all_deadlines_are_cleared_at_once_and_new_ones_fire() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "a", 1.0)
    timers.set(Timer.QUEUE, "b", 2.0)
    timers.clear_all()
    assert timers.next_deadline() is None
    assert timers.when(Timer.LEASE, "a") is None
    assert len(timers) == 0
    timers.set(Timer.QUEUE, "b", 2.0)
    assert drain(timers, 9.0) == [(Timer.QUEUE, "b")]


def test_what_becomes_due_while_others_fire_fires_too() -> None:
    timers = Timers()
    timers.set(Timer.LEASE, "a", 1.0)
    fired = []
    for _, name in timers.due(2.0):
        fired.append(name)
        if name == "a":
            timers.set(Timer.LEASE, "b", 2.0)
            timers.set(Timer.LEASE, "c", 2.1)
    assert fired == ["a", "b"]


def test_stale_entries_never_outnumber_what_is_set_by_much() -> None:
    timers = Timers()
    for i in range(10):
        timers.set(Timer.LEASE, str(i), 1e6)
    for moment in range(20_000):
        timers.set(Timer.RENEW, "one", 10.0 + moment)
    assert len(timers._heap) <= 2 * len(timers) + STALE_MIN + 1
    assert drain(timers, 1e5) == [(Timer.RENEW, "one")]
    assert timers.next_deadline() == 1e6


def test_the_order_is_the_same_after_stale_entries_were_dropped() -> None:
    timers = Timers()
    last = 3 * STALE_MIN
    for i in range(last):
        timers.set(Timer.LEASE, str(i % 50), float((i * 7919) % 1000))
    expected = {str(i % 50): float((i * 7919) % 1000) for i in range(last)}
    due = [name for _, name in drain(timers, 1000.0)]
    assert len(due) == 50
    assert [expected[name] for name in due] == sorted(expected.values())


@pytest.mark.parametrize("timer", [timer for timer in Timer if timer in FORGETS])
def test_what_is_only_forgotten_is_so_together_soon_and_never_early(timer: Timer) -> None:
    timers, calls = Timers(), 500
    for number in range(calls):
        timers.set(timer, str(number), 7.0 + number / 1000)
    wakes, forgotten = 0, 0
    while (now := timers.next_deadline()) is not None:
        wakes += 1
        for _, name in timers.due(now):
            forgotten += 1
            assert 0 <= now - (7.0 + int(name) / 1000) <= FORGET_TOGETHER_S + 1e-9
    assert forgotten == calls
    assert wakes <= 0.5 / FORGET_TOGETHER_S + 2


def test_setting_a_deadline_again_to_the_same_moments_costs_no_memory() -> None:
    """A lease at its cap is renewed again and again without its deadline moving."""
    timers = Timers()
    longest = 0
    for i in range(3 * STALE_MIN):
        timers.set(Timer.LEASE, "at its cap", 5.0)
        timers.set(Timer.RENEW, "to and fro", 6.0 + i % 2)
        longest = max(longest, len(timers._heap))
    assert longest <= 2 * len(timers) + STALE_MIN + 1
    assert drain(timers, 9.0) == [(Timer.LEASE, "at its cap"), (Timer.RENEW, "to and fro")]


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 9)))), st.integers(0, 9))
def test_it_is_a_table_of_the_latest_settings(steps: list[tuple[int, int | None]], now: int) -> None:
    timers = Timers()
    expected: dict[str, int] = {}
    for name, when in steps:
        if when is None:
            timers.clear(Timer.LEASE, str(name))
            expected.pop(str(name), None)
        else:
            timers.set(Timer.LEASE, str(name), when)
            expected[str(name)] = when
    assert timers.next_deadline() == min(expected.values(), default=None)
    due = [name for _, name in drain(timers, now)]
    assert sorted(due) == sorted(name for name, when in expected.items() if when <= now)
    assert [expected[name] for name in due] == sorted(expected[name] for name in due)
