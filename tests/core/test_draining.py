"""Draining by a call refuses new work until it is cancelled, and its answer lists the work that still runs."""

from typing import Any

import pytest

from kvgrpc.core.actions import Drained
from kvgrpc.core.events import Drain, LeaseRef, ReleaseLease
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.nodes import Lead, describe, grant, refused, snapshot

D = describe("d", 2)
OTHER = b"another key here"


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1))


def drain(lead: Lead, **fields: Any) -> Drained:
    answer = lead.call(lambda c: Drain(c, **fields), "operator")
    assert isinstance(answer, Drained)
    return answer


def test_a_server_that_drains_says_what_goes_on_and_refuses_new_work_without_a_delay(lead: Lead) -> None:
    made = lead.finish()
    pull = lead.pull(grant(D), 32, (10, 11))
    assert drain(lead) == Drained(2, 1, 0, made.transfer.id)
    with pytest.raises(PreconditionFailed) as caught:
        lead.finish(key=OTHER)
    assert (caught.value.reason, caught.value.retry_delay_s) == (Reason.DRAINING, None)
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    assert drain(lead) == Drained(1, 0, 0, pull.id)


def test_a_drain_that_is_cancelled_takes_work_again(lead: Lead) -> None:
    drain(lead)
    assert drain(lead, cancel=True) == Drained(0, 0, 0, "")
    lead.finish()


def test_asking_only_what_goes_on_changes_nothing(lead: Lead) -> None:
    lead.finish()
    before = snapshot(lead.node)
    assert drain(lead, validate_only=True).transfers == 1
    assert snapshot(lead.node) == before
    drain(lead)
    drain(lead, cancel=True, validate_only=True)
    with refused(Reason.DRAINING):
        lead.finish(key=OTHER)


def test_a_server_that_was_told_to_end_drains_to_its_end(lead: Lead) -> None:
    lead.state.life.draining = lead.state.life.stopping = True
    drain(lead, cancel=True)
    with refused(Reason.DRAINING):
        lead.finish()


def test_a_server_without_an_engine_drains_too() -> None:
    lead = Lead(describe("p", 1))
    lead.begin(None)
    assert drain(lead) == Drained(0, 0, 0, "")
    lead.begin(describe("p", 9))
    with refused(Reason.DRAINING):
        lead.finish()
