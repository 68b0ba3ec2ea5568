"""Pairs of measurements favour neither side."""

from bench.measures.timed_pairs import timed_pairs


def test_each_of_the_two_is_in_turn_the_first_of_a_pair() -> None:
    called: list[str] = []

    def one() -> tuple[str, int]:
        called.append("one")
        return "one", len(called)

    def other() -> tuple[str, int]:
        called.append("other")
        return "other", len(called)

    assert timed_pairs(3, one, other) == [
        (("one", 2), ("other", 1)),
        (("one", 3), ("other", 4)),
        (("one", 6), ("other", 5)),
    ]
    assert called == ["other", "one", "one", "other", "other", "one"]
