"""A reservation by address takes the life that is known there for the source, until a life has taken it."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import MapPeer, SendRegister
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import State, Transfer
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.nodes import Lead, describe, endpoints, key_of
from tests.core.pairs import UNREACHABLE, Pair

FORMER, NEXT = describe("p", 1), describe("p", 9)
SOURCE = events.PushSource(FORMER.address)


def unanswered() -> tuple[Pair, str]:
    """Returns a pair whose destination has asked the former life to register, and has no answer; and its transfer."""
    pair = Pair()
    pair.deaf = {SendRegister}
    reserved: Transfer = pair.reserve(32, source=SOURCE).transfer
    assert [action.peer for _, action in pair.lost if isinstance(action, SendRegister)] == [key_of(FORMER)]
    pair.lost.clear()
    return pair, reserved.id


def next_life(pair: Pair) -> None:
    """Lets a next life of the source introduce itself in place of the former one."""
    pair.p = Lead(NEXT)
    pair.leads[0] = pair.p
    pair.p.admit(pair.d.me)
    pair.d.admit(NEXT)


def dialled(pair: Pair) -> list[str]:
    """Returns the addresses that the destination dials."""
    return list(pair.d.state.peers.dials)


def reach(pair: Pair) -> None:
    """Lets the next life answer the destination's dial, and carries over what follows."""
    for _ in range(2):  # the first call shows the proofs of the former life
        pair.feed(pair.d, events.PeerAnswered(NEXT.address, NEXT, endpoints(NEXT)))


def reason_of(pair: Pair, transfer_id: str) -> Reason | None:
    failure = pair.d.transfer(transfer_id).failure
    return failure.reason if failure else None


@pytest.mark.parametrize("taken_by", ["", key_of(NEXT)], ids=["not answered", "taken by the next life"])
def test_a_registration_that_no_dead_life_took_goes_to_the_next_life(taken_by: str) -> None:
    pair, transfer_id = unanswered()
    if taken_by:
        pair.feed(pair.d, events.RegisterAnswered(transfer_id, taken_by, None))
    else:
        pair.feed(pair.d, events.RegisterAnswered(transfer_id, key_of(FORMER), UNREACHABLE, retryable=True))
    next_life(pair)
    assert reason_of(pair, transfer_id) is None
    assert dialled(pair) == [NEXT.address]
    assert pair.d.state.timers.when(Timer.OPEN_RETRY, transfer_id) is None
    pair.deaf.clear()
    reach(pair)
    assert [action.peer for action in pair.sent if isinstance(action, SendRegister)] == [key_of(NEXT)]
    pair.finish()
    pair.moved()
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED] * 2


def test_a_late_refusal_of_a_former_life_refuses_nothing() -> None:
    pair, transfer_id = unanswered()
    next_life(pair)
    pair.feed(pair.d, events.RegisterAnswered(transfer_id, key_of(FORMER), PreconditionFailed(Reason.DRAINING, "no")))
    assert reason_of(pair, transfer_id) is None


def test_a_registration_that_a_life_took_is_lost_with_it() -> None:
    pair, transfer_id = unanswered()
    pair.feed(pair.d, events.RegisterAnswered(transfer_id, key_of(FORMER), None))
    next_life(pair)
    assert reason_of(pair, transfer_id) is Reason.PEER_LOST


def test_a_registration_at_a_life_that_dies_without_a_next_one_is_lost() -> None:
    pair, transfer_id = unanswered()
    pair.feed(pair.d, events.PeerSilent(key_of(FORMER)))
    pair.tick(11.0)
    assert reason_of(pair, transfer_id) is Reason.PEER_LOST


def test_a_registration_that_another_life_took_is_not_lost_before_that_life_introduces_itself() -> None:
    pair, transfer_id = unanswered()
    pair.feed(pair.d, events.RegisterAnswered(transfer_id, key_of(NEXT), None))
    pair.feed(pair.d, events.PeerSilent(key_of(FORMER)))
    pair.tick(11.0)
    assert reason_of(pair, transfer_id) is None
    assert dialled(pair) == [NEXT.address]


def test_a_handshake_under_way_with_the_former_life_fails_no_registration() -> None:
    pair, transfer_id = unanswered()
    other = b"2" * 16
    pair.register(pair.reserve(32, (10, 11), key=other).token)
    pair.finish(key=other)
    pair.moved(done=False, message="it broke")  # so the next use of the former life shakes hands and maps anew
    pair.d.ask(lambda c: events.ConnectPeer(c, FORMER.address))
    pair.d._offer()
    pair.d.feed(events.PeerAnswered(FORMER.address, FORMER, endpoints(FORMER)))
    assert pair.d.seen(MapPeer)
    next_life(pair)
    assert reason_of(pair, transfer_id) is None
    assert dialled(pair) == [NEXT.address]
