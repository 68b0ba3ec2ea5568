"""Pauses grow up to a bound, with jitter, and follow the server's retry hint."""

from hypothesis import given, strategies as st

from kvgrpc.client import pauses


@given(st.integers(1, 100), st.none() | st.floats(0, 60))
def test_a_pause_is_at_least_half_of_its_bound(failures: int, asked_s: float | None) -> None:
    pause_s = pauses.growing(failures, asked_s)
    own_s = min(2.0, 0.1 * 2 ** (failures - 1))
    assert max(own_s / 2, asked_s or 0) <= pause_s <= max(own_s, asked_s or 0)


def test_no_two_pauses_are_the_same() -> None:
    assert len({pauses.growing(5) for _ in range(20)}) > 10
