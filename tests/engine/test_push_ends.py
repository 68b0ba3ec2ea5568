"""The end of a push of which nothing was handed over yet: its engine hears of it like of any other."""

import pytest

from kvgrpc.engine import Push, Reservation, content
from kvgrpc.v1 import common_pb2, handoff_pb2
from tests.engine.support import Side, kinds, new_key, tokens

PROMPT = tokens(40)
TARGET = [30, 31, 5]
Pair = tuple[Side, Side]


def registered_by(who: str, pair: Pair) -> tuple[Push, Reservation]:
    """A push without parts, and blocks that are reserved for it."""
    source, destination = pair
    key = new_key()
    reservation = destination.engine.reserve(TARGET, content(PROMPT), transfer_key=key)
    destination.poll_until(bool)
    push = source.engine.push(content(PROMPT), transfer_key=key)
    if who == "its engine":
        push.register(reservation.grant)
    elif who == "a router":
        grant = common_pb2.Grant(token=reservation.grant)
        source.lead.api.handoff.RegisterPush(handoff_pb2.RegisterPushRequest(grant=grant))
    source.round_trip()
    return push, reservation


@pytest.mark.parametrize("who", ["nobody", "its engine", "a router"])
def test_a_source_that_gives_up_before_the_first_part_hears_the_end_of_it(pair: Pair, who: str) -> None:
    source, destination = pair
    push, reservation = registered_by(who, pair)
    push.fail("the prefill was aborted")
    source.round_trip()  # by now it was told all of it
    assert kinds(source.engine.poll())[-1:] == ["BlocksReturned"]
    assert push.over
    if who != "nobody":
        assert kinds(destination.poll_until(lambda _: reservation.over))[-2:] == ["Failed", "BlocksReturned"]
