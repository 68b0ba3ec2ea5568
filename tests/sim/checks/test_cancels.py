"""`CancelAudit`: a cancelled lead has to tell the other side, and a lead that hears of a cancel has to act on it."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import Action, SendClose
from kvgrpc.core.events import CancelScope, CloseOutcome, Event
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.transfers import State
from sim import Violated
from sim.checks.cancels import CancelAudit
from tests.core.cancels.pulled import at_stage, hand_over, newest, pull
from tests.core.nodes import KEY, Lead, access_id
from tests.core.pairs import MODES, Pair, Writers
from tests.core.shown import showing


def heard(lead: Lead, event: Event, after_s: float = 0.0) -> CancelAudit:
    """Returns an audit that has heard the event from a caller that shows its proof."""
    audit = CancelAudit(lead.node)
    audit.hears(showing(event, lead.node), lead.now + after_s)
    return audit


def told(lead: Lead, event: Event) -> list[Action]:
    """Returns the actions of a lead, after its audit agreed with them."""
    audit = heard(lead, event)
    done = lead.node.handle(showing(event, lead.node), lead.now)
    audit.says(done)
    return done


def cancel(scope: CancelScope = CancelScope.BOTH, **fields: Any) -> events.CancelTransfer:
    made = fields or {"key": KEY}
    return events.CancelTransfer(events.Call(900, "router"), scope=scope, **made)


def closes(outcome: CloseOutcome, number: int, engine_id: str, incarnation: int) -> events.CloseAccess:
    row = events.AccessClosing(access_id(number), outcome, quiesced=True)
    return events.CloseAccess(events.Call(901, "peer"), engine_id, incarnation, (row,))


def push(writers: Writers) -> Pair:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    return pair


@pytest.mark.parametrize(
    ("at", "scope", "outcomes"),
    [
        ("p", CancelScope.BOTH, {CloseOutcome.CANCELLED}),
        ("p", CancelScope.ON_ABORT, {CloseOutcome.CANCELLED}),
        ("p", CancelScope.THIS_SIDE, set()),
        ("d", CancelScope.BOTH, {CloseOutcome.CANCELLED}),
        ("d", CancelScope.ON_ABORT, {CloseOutcome.DROPPED}),
        ("d", CancelScope.THIS_SIDE, {CloseOutcome.FAILED}),
    ],
)
def test_a_lead_that_is_cancelled_tells_the_other_side_by_its_scope(
    at: str, scope: CancelScope, outcomes: set[CloseOutcome]
) -> None:
    pair = at_stage("wire")
    done = told(getattr(pair, at), cancel(scope))
    assert {action.closing.outcome for action in done if isinstance(action, SendClose)} == outcomes


@MODES
@pytest.mark.parametrize("at", ["p", "d"])
def test_so_it_does_of_a_push(at: str, writers: Writers) -> None:
    pair = push(writers)
    assert told(getattr(pair, at), cancel(transfer_id=newest(getattr(pair, at)).id))


@pytest.mark.parametrize("what", ["silence", "a failure"])
@pytest.mark.parametrize("at", ["p", "d"])
def test_a_lead_that_tells_nothing_or_something_else_is_found(at: str, what: str) -> None:
    pair = at_stage("wire")
    lead = getattr(pair, at)
    audit = heard(lead, cancel())
    done = lead.node.handle(cancel(), lead.now)
    kept = [action for action in done if not isinstance(action, SendClose)]
    if what == "a failure":
        row = events.AccessClosing(access_id(1), CloseOutcome.FAILED, quiesced=True)
        kept.append(SendClose("x", row, 1, ""))
    with pytest.raises(Violated, match="is not told so"):
        audit.says(kept)


def test_nothing_is_looked_at_where_something_is_due_before() -> None:
    pair = at_stage("wire")
    audit = heard(pair.p, cancel(), after_s=1_000.0)
    pair.p.node.handle(cancel(), pair.p.now)
    audit.says([])


def test_a_cancel_that_names_nothing_known_has_nobody_to_tell() -> None:
    lead = Pair().p
    told(lead, cancel(transfer_id="t-none"))
    told(lead, cancel())


def test_a_reader_that_hears_of_it_ends() -> None:
    pair = at_stage("wire")
    told(pair.d, closes(CloseOutcome.CANCELLED, 1, "p", 1))
    assert newest(pair.d).state is State.CANCELLED
    pair = at_stage("wire")
    audit = heard(pair.d, closes(CloseOutcome.CANCELLED, 1, "p", 1))
    with pytest.raises(Violated, match="goes on although its source was cancelled"):
        audit.says([])


@MODES
def test_a_destination_that_hears_of_it_ends(writers: Writers) -> None:
    pair = push(writers)
    told(pair.d, closes(CloseOutcome.CANCELLED, 10, "p", 1))
    assert newest(pair.d).state is State.CANCELLED


def test_a_source_counts_the_consumer_and_goes_on_for_the_others() -> None:
    pair = Pair()
    token = hand_over(pair, consumers=2).token
    pull(pair, token)
    pull(pair, token, at=pair.e, number=2, blocks=(8, 9))
    told(pair.p, closes(CloseOutcome.CANCELLED, 1, "d", 2))
    assert not newest(pair.p).over
    audit = heard(pair.p, closes(CloseOutcome.CANCELLED, 2, "e", 3))
    with pytest.raises(Violated, match="still waits for it"):
        audit.says([])
    audit = heard(pair.p, closes(CloseOutcome.CANCELLED, 2, "e", 3))
    lease = pair.p.state.send.leases.get(newest(pair.p).lease_id)
    lease.state = LeaseState.DONE
    with pytest.raises(Violated, match="has ended for all of 2 consumers"):
        audit.says([])


@pytest.mark.parametrize("outcome", [CloseOutcome.DROPPED, CloseOutcome.FAILED])
def test_other_words_and_strangers_are_not_looked_at(outcome: CloseOutcome) -> None:
    pair = at_stage("wire")
    told(pair.p, closes(outcome, 1, "d", 2))
    pair = at_stage("wire")
    for stranger in (closes(CloseOutcome.CANCELLED, 1, "e", 3), closes(CloseOutcome.CANCELLED, 1, "x", 9)):
        audit = heard(pair.p, stranger)
        audit.says([])


def test_nobody_is_heard_that_does_not_show_the_proof_of_the_life_that_it_names() -> None:
    pair = at_stage("wire")
    audit = CancelAudit(pair.d.node)
    said = closes(CloseOutcome.CANCELLED, 1, "p", 1)
    audit.hears(said, pair.d.now)
    audit.says(pair.d.node.handle(said, pair.d.now))
    assert not newest(pair.d).over
