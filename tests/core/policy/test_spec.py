"""When a request began: what is said of it, what its grant says, or when its engine heard of it."""

from kvgrpc.core.policy.spec import Offer, Source, began_at
from kvgrpc.core.policy.values import Give, Mode
from tests.core.nodes import describe, grant

NOW = 2_000_000_000_000_000
PREFILLED = NOW - 5_000
TIMED = Offer(grant(describe("p", 1), request_time_us=PREFILLED))
PREFILLS, OFFERS = Give(Mode.PULL), Give(Mode.PULL, prefill=False)


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
