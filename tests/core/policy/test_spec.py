"""A request's start time is stated by a router, or taken from its grant or its arrival; start times order requests."""

from kvgrpc.core.policy.spec import Offer, Source, began_at
from kvgrpc.core.policy.values import Give, ModeChoice
from kvgrpc.core.values.request_times import REQUEST_AGE_MAX_US, RequestTime, heard, plausible
from tests.core.nodes import describe, grant

NOW = 2_000_000_000_000_000
PREFILLED = NOW - 5_000
TIMED = Offer(grant(describe("p", 1), request_time_us=PREFILLED))
PREFILLS, OFFERS = Give(ModeChoice.PULL), Give(ModeChoice.PULL, prefill=False)


def test_a_request_that_is_decoded_began_with_its_prefill() -> None:
    assert began_at(TIMED, None, 0, NOW) == PREFILLED
    assert began_at(TIMED, OFFERS, 0, NOW) == PREFILLED
    assert began_at(Offer(grant(describe("p", 1))), None, 0, NOW) == NOW


def test_a_next_turn_began_when_it_came_whatever_it_goes_on_from() -> None:
    assert began_at(TIMED, PREFILLS, 0, NOW) == NOW


def test_all_others_began_when_they_came_or_when_a_router_says() -> None:
    assert began_at(None, PREFILLS, 0, NOW) == NOW
    assert began_at(Source(), None, 0, NOW) == NOW
    assert began_at(TIMED, None, NOW - 7, NOW) == NOW - 7


def test_who_began_later_is_younger_and_of_two_at_once_the_later_name() -> None:
    assert RequestTime(1, "b") < RequestTime(2, "a")
    assert RequestTime(1, "a") < RequestTime(1, "b")


def test_a_time_that_is_not_known_is_now() -> None:
    assert plausible(0, NOW) == NOW


def test_no_request_begins_in_the_future_or_long_ago() -> None:
    assert plausible(NOW + 1, NOW) == NOW
    assert plausible(1, NOW) == NOW - REQUEST_AGE_MAX_US
    assert plausible(NOW - 5, NOW) == NOW - 5


def test_what_a_lead_hears_is_bounded_unless_its_own_engine_says_it() -> None:
    assert heard(1, NOW, own=False) == NOW - REQUEST_AGE_MAX_US
    assert heard(1, NOW, own=True) == 1
    assert heard(0, NOW, own=True) == NOW
    assert heard(1, 0, own=False) == 1
