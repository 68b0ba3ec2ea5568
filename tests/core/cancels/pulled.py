"""Brings a pull between two leads to each of its stages, and cancels it at either side."""

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
    """Hands blocks over at the source, for readers."""
    return pair.finish(32, (1, 2), waits_for=WaitsFor.READERS, **fields)


def pull(
    pair: Pair, token: bytes, at: Lead | None = None, number: int = 1, blocks: tuple[int, ...] = (3, 4)
) -> Transfer:
    """Pulls at a destination; without `blocks` the pull waits for them."""
    where = Destination(lists(blocks)) if blocks else None
    answer = pair.call(
        at or pair.d, lambda c: events.PullBlocks(c, token, content(32), access_id(number), destination=where)
    )
    transfer: Transfer = answer.transfer
    return transfer


STAGES = ("opening", "blocks", "wire", "settling")
"""Stages of a pull that its source knows, or is about to know."""


def at_stage(stage: str, **fields: Any) -> Pair:
    """Brings a pull to a stage."""
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
    """Calls CancelTransfer at one lead, by default for its transfers under the key."""
    fields.setdefault("key", KEY)
    fields.setdefault("message", "the user left")
    answer = pair.call(at, lambda c: CancelTransfer(c, scope=scope, **fields), "router")
    assert isinstance(answer, Cancelled)
    return answer


def newest(lead: Lead) -> Transfer:
    found: Transfer = max(lead.state.transfers, key=lambda transfer: transfer.seq)
    return found


def states(pair: Pair) -> list[State]:
    """Returns the states of the newest transfers of source and destination."""
    return [newest(pair.p).state, newest(pair.d).state]


def both_cancelled(pair: Pair, *leads: Lead) -> None:
    """Asserts that the newest transfers of `leads`, by default of both sides, ended CANCELLED and say why."""
    for lead in leads or (pair.p, pair.d):
        transfer = newest(lead)
        assert transfer.state is State.CANCELLED, transfer
        assert transfer.failure is not None
        assert transfer.failure.reason is Reason.CANCELLED
        assert "the user left" in transfer.failure.message


def nothing_left(pair: Pair) -> None:
    """Ends all postings, and asserts that no lead holds anything of the pull afterwards."""
    pair.deaf.clear()
    pair.moved()
    pair.tick(130.0)
    for lead in pair.leads:
        assert not len(lead.state.pool.pins)
        assert not lead.state.access.rows
        assert not lead.state.moves.closes.sent
        assert not len(lead.state.send.leases)
