"""Draining by a call refuses new work until it is cancelled; what drains keeps its beginning and its reason."""

from typing import Any

import pytest

from kvgrpc.core.actions import DrainChanged
from kvgrpc.core.events import CancelDrain, LeaseRef, ReleaseLease, StartDrain
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.nodes import Lead, describe, grant, refused, snapshot

D = describe("d", 2)
OTHER = b"another key here"


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1))


def start(lead: Lead, **fields: Any) -> bool:
    """Starts a drain. Returns whether the lead drains then."""
    answer = lead.call(lambda c: StartDrain(c, **fields), "operator")
    assert isinstance(answer, DrainChanged)
    return answer.draining


def cancel(lead: Lead, **fields: Any) -> bool:
    """Cancels a drain. Returns whether the lead drains then."""
    answer = lead.call(lambda c: CancelDrain(c, **fields), "operator")
    assert isinstance(answer, DrainChanged)
    return answer.draining


def test_a_server_that_drains_refuses_new_work_without_a_delay_and_lets_the_old_end(lead: Lead) -> None:
    made = lead.finish()
    lead.pull(grant(D), 32, (10, 11))
    assert start(lead)
    with pytest.raises(PreconditionFailed) as caught:
        lead.finish(key=OTHER)
    assert (caught.value.reason, caught.value.retry_delay_s) == (Reason.DRAINING, None)
    assert lead.state.transfers.going_on == 2
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    assert lead.state.transfers.going_on == 1


def test_a_drain_that_is_cancelled_takes_work_again(lead: Lead) -> None:
    start(lead, reason="a new kernel")
    assert not cancel(lead)
    assert lead.state.life.drain_reason == ""
    lead.finish()


def test_a_drain_that_is_only_checked_changes_nothing(lead: Lead) -> None:
    lead.finish()
    before = snapshot(lead.node)
    assert not start(lead, validate_only=True)
    assert snapshot(lead.node) == before
    start(lead)
    assert cancel(lead, validate_only=True)
    with refused(Reason.DRAINING):
        lead.finish(key=OTHER)


def test_a_repeated_drain_keeps_its_beginning_and_its_reason_unless_it_states_one(lead: Lead) -> None:
    start(lead, reason="a new kernel")
    began = lead.state.life.drain_began
    lead.now += 5.0
    start(lead)
    assert (lead.state.life.drain_began, lead.state.life.drain_reason) == (began, "a new kernel")
    start(lead, reason="the host goes")
    assert (lead.state.life.drain_began, lead.state.life.drain_reason) == (began, "the host goes")


def test_a_server_that_was_told_to_end_drains_to_its_end(lead: Lead) -> None:
    lead.state.life.drain("SIGTERM", lead.now, stopping=True)
    start(lead, reason="a new kernel")
    assert cancel(lead)
    assert lead.state.life.drain_reason == "SIGTERM"
    with refused(Reason.DRAINING):
        lead.finish()


def test_a_life_after_a_defect_goes_on_draining_for_the_same_reason(lead: Lead) -> None:
    start(lead, reason="a new kernel")
    successor, _ = lead.node.successor(7, lead.now)
    life = successor.state.life
    assert (life.draining, life.drain_began, life.drain_reason) == (True, lead.state.life.drain_began, "a new kernel")


def test_a_server_without_an_engine_drains_too() -> None:
    lead = Lead(describe("p", 1))
    lead.begin(None)
    assert start(lead)
    lead.begin(describe("p", 9))
    with refused(Reason.DRAINING):
        lead.finish()
