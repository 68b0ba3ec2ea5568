"""A pull between two leads, at each of its stages, and the cancels of both."""

from typing import Any

from kvgrpc.core import events
from kvgrpc.core.actions import Cancelled, SendOpen, SendSettle
from kvgrpc.core.events import CancelScope, CancelTransfer, Destination, WaitsFor
from kvgrpc.core.tables.transfers import State, Transfer
from kvgrpc.errors import Reason
from tests.core.nodes import KEY, Lead, access_id, content, lists
from tests.core.pairs import Pair

BOTH = CancelScope.BOTH
THIS_SIDE = CancelScope.THIS_SIDE


def hand_over(pair: Pair, **fields: Any) -> Any:
    """The source hands blocks over to readers."""
    return pair.finish(32, (1, 2), waits_for=WaitsFor.READERS, **fields)


def pull(
    pair: Pair, token: bytes, at: Lead | None = None, number: int = 1, blocks: tuple[int, ...] = (3, 4)
) -> Transfer:
    """A destination pulls; without blocks it waits for them."""
    where = Destination(lists(blocks)) if blocks else None
    answer = pair.call(
        at or pair.d, lambda c: events.PullBlocks(c, token, content(32), access_id(number), destination=where)
    )
    transfer: Transfer = answer.transfer
    return transfer


STAGES = ("opening", "blocks", "wire", "settling")
"""Where a pull is that its source knows, or is about to know."""


def at_stage(stage: str, **fields: Any) -> Pair:
    """A pull that is there."""
    pair = Pair()
    token = hand_over(pair, **fields).token
    if stage == "opening":
        pair.deaf = {SendOpen}
    pull(pair, token, blocks=() if stage == "blocks" else (3, 4))
    if stage == "settling":
        pair.deaf = {SendSettle}
        pair.moved()
    return pair


def cancel(pair: Pair, at: Lead, scope: CancelScope = BOTH, **fields: Any) -> Cancelled:
    """CancelTransfer at one of them, of what it has under the key."""
    fields.setdefault("key", KEY)
    fields.setdefault("message", "the user left")
    answer = pair.call(at, lambda c: CancelTransfer(c, scope=scope, **fields), "router")
    assert isinstance(answer, Cancelled)
    return answer


def newest(lead: Lead) -> Transfer:
    found: Transfer = max(lead.state.transfers, key=lambda transfer: transfer.seq)
    return found


def states(pair: Pair) -> list[State]:
    """Of the newest transfers of source and destination."""
    return [newest(pair.p).state, newest(pair.d).state]


def both_cancelled(pair: Pair, *leads: Lead) -> None:
    """The newest transfers of all of them ended CANCELLED, and say why."""
    for lead in leads or (pair.p, pair.d):
        transfer = newest(lead)
        assert transfer.state is State.CANCELLED, transfer
        assert transfer.failure is not None
        assert transfer.failure.reason is Reason.CANCELLED
        assert "the user left" in transfer.failure.message


def nothing_left(pair: Pair) -> None:
    """Once nothing is in flight no lead holds anything of it."""
    pair.deaf.clear()
    pair.moved()
    pair.tick(130.0)
    for lead in pair.leads:
        assert not len(lead.state.pins)
        assert not lead.state.accesses
        assert not lead.state.closes.sent
        assert not len(lead.state.leases)
