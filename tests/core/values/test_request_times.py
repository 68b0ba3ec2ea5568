"""Request times: the order in which requests are that wait for each other, and how much of it callers may say."""

from kvgrpc.core.values.request_times import REQUEST_AGE_MAX_US, RequestTime, plausible

NOW = 2_000_000_000_000_000


def test_who_began_later_is_younger_and_of_two_at_once_the_later_name() -> None:
    assert RequestTime(1, "b") < RequestTime(2, "a")
    assert RequestTime(1, "a") < RequestTime(1, "b")


def test_a_time_that_is_not_known_is_now() -> None:
    assert plausible(0, NOW) == NOW


def test_no_request_begins_in_the_future_or_long_ago() -> None:
    assert plausible(NOW + 1, NOW) == NOW
    assert plausible(1, NOW) == NOW - REQUEST_AGE_MAX_US
    assert plausible(NOW - 5, NOW) == NOW - 5
