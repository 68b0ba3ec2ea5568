"""Pushes that end before or with their first part. An engine gets the same events as for any other push, and owns its
blocks again once it is told so.
"""

import pytest

from kvgrpc.core.values import grants
from kvgrpc.engine import Push, Reservation, content
from kvgrpc.v1 import common_pb2, handoff_pb2
from tests.engine.support import Side, kinds, new_key, tokens

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
READ_GRANT = grants.mint(
    grants.Claims(grants.AccessKind.READ, "P", 1, "127.0.0.1:1", "l", new_key(), 1.0, 1, 16),
    grants.signing_key(bytes(32)),
)
Pair = tuple[Side, Side]


def registered_by(who: str, pair: Pair) -> tuple[Push, Reservation]:
    """Returns a push without parts, and blocks that are reserved for it."""
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
    source.round_trip()  # by now the lead has sent every event
    assert kinds(source.engine.poll())[-1:] == ["BlocksReturned"]
    assert push.over
    if who != "nobody":
        assert kinds(destination.poll_until(lambda _: reservation.over))[-2:] == ["Failed", "BlocksReturned"]


def calls(first: str, push: Push, grant: bytes) -> None:
    """Sends calls in one batch whose first call is refused."""
    match first:
        case "a part, and parts follow":
            push.finished([1, 10_000], layers=(0, 1))
            push.finished(SOURCE, layers=(1, 1))
        case "a registration, and parts follow":
            push.register(READ_GRANT)
            push.finished(SOURCE, layers=(1, 1))
        case "a part, and a registration follows":
            push.finished([10_000])
            push.register(grant)
        case "all parts":
            push.finished([10_000])
            push.finished([10_001])
        case "a part, and the source gives up":
            push.finished([10_000])
            push.fail("the prefill was aborted")


@pytest.mark.parametrize(
    "first",
    [
        "a part, and parts follow",
        "a registration, and parts follow",
        "a part, and a registration follows",
        "all parts",
        "a part, and the source gives up",
    ],
)
def test_blocks_come_back_when_later_calls_end_though_the_first_was_refused(pair: Pair, first: str) -> None:
    source, destination = pair
    key = new_key()
    reservation = destination.engine.reserve(TARGET, content(PROMPT), transfer_key=key)
    destination.poll_until(bool)
    push = source.engine.push(content(PROMPT), transfer_key=key)
    calls(first, push, reservation.grant)
    events = source.poll_until(lambda _: push.over)
    assert kinds(events) == ["Failed", "BlocksReturned"]
    assert source.lead.at_rest()
    # The blocks and the void page's slot can be reused.
    again = [source.engine.finished_blocks([20 + i], content(tokens(16, i)), transfer_key=new_key()) for i in range(3)]
    reuse = source.engine.reserve(SOURCE, content(PROMPT), transfer_key=new_key())
    assert kinds(source.poll_until(lambda _: bool(reuse.grant or reuse.over))) == ["Reserved"]
    assert not any(handover.failed for handover in again)
    source.round_trip()
    assert source.engine.poll() == []
