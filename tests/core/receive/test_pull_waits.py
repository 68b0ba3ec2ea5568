"""Every wait of a pull ends."""

import math

import pytest

from kvgrpc.core.actions import Post
from kvgrpc.core.events import StepDone
from kvgrpc.core.tables.transfers import Disposition, Side
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import NextStep, Reason
from tests.core.nodes import Lead, describe
from tests.core.receive.pull_stages import TOKEN, P, at_stage, cancel, failure_of, opened


@pytest.fixture
def lead() -> Lead:
    """Makes a lead that is connected to P."""
    return connected()


def connected(**limits: float) -> Lead:
    made = Lead(describe("d", 2), Limits(**{"least_bytes_per_s": math.inf, **limits}))  # type: ignore[arg-type]
    made.admit(P)
    return made


# -- time


def test_waiting_for_its_turn_ends_with_the_queue_timeout_and_names_the_phase() -> None:
    lead = Lead(describe("d", 2), Limits(connect_timeout_s=100.0))
    pull = lead.pull(TOKEN, 32, (4, 5), queue_timeout_s=7.0)
    lead.tick(7.0)
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.phase, failure.side) == (Reason.QUEUE_TIMEOUT, "handshake", Side.DESTINATION)
    assert "handshake" in failure.message
    assert failure.next is NextStep.RETRY_HERE
    assert lead.transfer(pull.id).memory is Disposition.RETURNED


@pytest.mark.parametrize(("stage", "after_s", "reason"), [
    ("opening", 30.0, Reason.QUEUE_TIMEOUT),
    ("wire", 30.0, Reason.TRANSFER_TIMEOUT),
    ("settling", 5.0, Reason.SETTLE_TIMEOUT),
    ("waiting", 3_600.0, Reason.QUEUE_TIMEOUT),
])  # fmt: skip
def test_every_wait_ends(lead: Lead, stage: str, after_s: float, reason: Reason) -> None:
    pull = at_stage(lead, stage)
    lead.tick(after_s - 0.001)
    assert not lead.transfer(pull.id).over
    lead.tick(0.001)
    assert failure_of(lead, pull).reason is reason


def test_a_timeout_is_clamped_to_the_cap(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), queue_timeout_s=1e9)
    lead.tick(3_600.0)
    assert failure_of(lead, pull).reason is Reason.QUEUE_TIMEOUT


def test_the_queue_timeout_starts_anew_when_the_blocks_are_there(lead: Lead) -> None:
    pull = lead.pull(TOKEN, queue_timeout_s=7.0)
    opened(lead)
    lead.tick(100.0)
    lead.give(pull.id, (4, 5), after_step=3)
    assert lead.transfer(pull.id).waiting_for == "step"
    lead.tick(6.9)
    assert not lead.transfer(pull.id).over
    lead.tick(0.1)
    assert failure_of(lead, pull).reason is Reason.QUEUE_TIMEOUT


def test_the_bytes_have_the_time_that_was_asked_for(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), transfer_timeout_s=2.0)
    opened(lead)
    lead.tick(2.0)
    assert failure_of(lead, pull).reason is Reason.TRANSFER_TIMEOUT


def test_bytes_have_time_by_their_number_where_nobody_says_how_much() -> None:
    lead = connected(transfer_timeout_s=30.0, least_bytes_per_s=1.0)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    nbytes = lead.transfer(pull.id).nbytes
    assert nbytes > 0
    lead.tick(30.0 + nbytes - 0.5)
    assert not lead.transfer(pull.id).over
    lead.tick(0.5)
    assert failure_of(lead, pull).reason is Reason.TRANSFER_TIMEOUT


def test_the_time_of_bytes_ends_with_the_cap() -> None:
    lead = connected(least_bytes_per_s=0.001, lease_cap_s=100.0)
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    lead.tick(100.0)
    assert failure_of(lead, pull).reason is Reason.TRANSFER_TIMEOUT


# -- steps


def test_a_pull_waits_for_the_step_that_touches_its_blocks_last(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), after_step=3)
    opened(lead)
    assert lead.transfer(pull.id).waiting_for == "step"
    lead.feed(StepDone(0, 2))
    assert lead.seen(Post) == []
    lead.feed(StepDone(0, 4))
    assert lead.one(Post)


def test_a_step_that_is_over_is_not_waited_for(lead: Lead) -> None:
    lead.feed(StepDone(0, 9))
    lead.pull(TOKEN, 32, (4, 5), after_step=9)
    opened(lead)
    assert lead.one(Post)


def test_a_pull_that_ended_while_it_waited_for_a_step_posts_nothing(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), after_step=3)
    opened(lead)
    cancel(lead, transfer_id=pull.id)
    lead.feed(StepDone(0, 3))
    assert lead.seen(Post) == []
