"""Starts a push, and checks both leads after its destination has ended."""

from typing import Any

from kvgrpc.core.actions import SendClose
from kvgrpc.errors import Reason
from tests.core.pairs import Pair, Writers


def started(writers: Writers, **fields: Any) -> Pair:
    """Starts a push whose bytes are in flight."""
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2), **fields)
    assert len(pair.posts) == 1
    return pair


def waits_for_another(pair: Pair, why: Reason) -> None:
    """Asserts that only the destination ended: the source waits for another one until the registration timeout."""
    source, destination = pair.both()
    assert (source.over, source.waiting_for) == (False, "registration")
    assert pair.reasons()[1] in (why, Reason.SOURCE_FAILED, Reason.PEER_FAILED)
    assert not pair.p.state.send.leases.get(source.lease_id).accesses
    assert not destination or destination.over
    pair.deaf = {SendClose}
    pair.tick(125.0)
    failure = pair.both()[0].failure
    assert failure is not None
    assert failure.reason is Reason.REGISTRATION_TIMEOUT
    assert "engine d: " in failure.message
    assert not len(pair.p.state.pool.pins)
