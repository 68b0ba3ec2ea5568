"""Answers of a source to the opening of a pull's access, and what each does to the pull."""

from typing import Any

import pytest

from kvgrpc.core.actions import BlocksReturnedNews, Dial, FailedNews, MakeOffer, Post, SendClose, SendOpen
from kvgrpc.core.events import AccessAnswered
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.transfers import Side, State
from kvgrpc.errors import Aborted, KVGrpcError, PermissionDenied, PreconditionFailed, Reason
from tests.core.nodes import Lead, access_id, describe, grant, ids, lists
from tests.core.receive.pull_stages import LOST, TOKEN, P, failure_of, opened, posted, settled


@pytest.fixture
def lead() -> Lead:
    """Makes a lead that is connected to P."""
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


@pytest.mark.parametrize("error", [
    PreconditionFailed(Reason.CONTENT_MISMATCH, "other tokens"),
    PreconditionFailed(Reason.LEASE_EXPIRED, "too late"),
    Aborted(Reason.INCARNATION_CHANGED, "it restarted"),
    PermissionDenied(Reason.GRANT_INVALID, "forged"),
], ids=lambda error: error.reason.value)  # fmt: skip
def test_a_refused_opening_fails_the_pull_and_returns_its_blocks(lead: Lead, error: KVGrpcError) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    lead.feed(AccessAnswered(access_id(), error))
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.phase, failure.side) == (error.reason, "open", Side.SOURCE)
    assert [type(news) for news in lead.news()] == [FailedNews, BlocksReturnedNews]
    assert len(lead.state.pool.pins) == 0


def test_an_opening_without_an_answer_is_tried_again(lead: Lead) -> None:
    lead.pull(TOKEN, 32, (4, 5))
    first = lead.one(SendOpen)
    lead.feed(AccessAnswered(access_id(), LOST, retryable=True))
    assert lead.tick(0.19) == []
    lead.tick(0.02)
    assert lead.one(SendOpen) == first
    opened(lead)
    assert lead.one(Post)


def test_a_source_that_waited_as_long_as_it_may_is_asked_again_until_the_pull_s_own_timeout(lead: Lead) -> None:
    waited = PreconditionFailed(Reason.DEADLINE, "opening the access waited too long for: step")
    pull = lead.pull(TOKEN, 32, (4, 5), queue_timeout_s=6.0)
    first = lead.one(SendOpen)
    lead.tick(5.0)
    lead.feed(AccessAnswered(access_id(), waited))
    lead.tick(0.2)
    assert lead.one(SendOpen) == first
    lead.tick(0.8)
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.phase) == (Reason.QUEUE_TIMEOUT, "open")


def test_an_answer_that_comes_twice_is_heard_once(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead)
    assert opened(lead) == []
    assert lead.feed(AccessAnswered(access_id(), LOST)) == []
    posted(lead, pull)
    settled(lead)
    assert settled(lead, Verdict(False, Reason.LEASE_EXPIRED)) == []
    assert lead.transfer(pull.id).state is State.SUCCEEDED


def test_a_retry_that_was_planned_dies_with_its_reason(lead: Lead) -> None:
    lead.pull(TOKEN, 32, (4, 5))
    lead.feed(AccessAnswered(access_id(), LOST, retryable=True))
    lead.feed(AccessAnswered(access_id(), PreconditionFailed(Reason.NO_HANDSHAKE, "who?")))
    lead.tick(0.2)
    assert lead.seen(SendOpen) == []
    lead.pull(TOKEN, 32, (6, 7), number=2)
    lead.feed(AccessAnswered(access_id(2), LOST, retryable=True))
    opened(lead, 2)
    lead.tick(0.2)
    assert lead.seen(SendOpen) == []


def test_a_source_that_does_not_know_us_is_introduced_again(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    lead.feed(AccessAnswered(access_id(), PreconditionFailed(Reason.NO_HANDSHAKE, "who?")))
    assert lead.transfer(pull.id).waiting_for == "handshake"
    assert lead.one(MakeOffer)
    lead.connect(P)
    assert lead.one(SendOpen).opening.access_id == access_id()
    opened(lead)
    assert lead.one(Post)
    phases = [phase.name for phase in lead.transfer(pull.id).phases]
    assert phases == ["handshake", "open", "handshake", "open", "queue", "wire"]


def test_a_source_that_never_knows_us_is_given_up_after_the_queue_timeout(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5), queue_timeout_s=5.0)
    for _ in range(9):
        lead.feed(AccessAnswered(access_id(), PreconditionFailed(Reason.NO_HANDSHAKE, "who?")), 1.0)
        if lead.transfer(pull.id).over:
            break
        lead.connect(P)
    assert failure_of(lead, pull).reason is Reason.QUEUE_TIMEOUT


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"token_count": 48}, "48 tokens"),
    ({"blocks": ()}, "every group"),
    ({"blocks": lists((0, 1), (0,))}, "every group"),
    ({"blocks": ((1, ids(0, 1)),)}, "every group"),
    ({"blocks": lists((0,))}, "1 blocks"),
    ({"blocks": lists((0, 64))}, "does not exist"),
    ({"blocks": lists((3, 3))}, "twice"),
    ({"ttl_s": 0.0}, "no time"),
    ({"ttl_s": float("nan")}, "no time"),
    ({"remaining_s": -1.0}, "no time"),
    ({"remaining_s": float("nan")}, "no time"),
], ids=str)  # fmt: skip
def test_an_answer_that_makes_no_sense_fails_the_pull(lead: Lead, changes: dict[str, Any], complaint: str) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead, **changes)
    failure = failure_of(lead, pull)
    assert failure.reason is Reason.PEER_FAILED
    assert complaint in failure.message
    assert lead.one(SendClose).closing.access_id == access_id()


def test_memory_of_another_generation_than_was_mapped_is_not_read(lead: Lead) -> None:
    pull = lead.pull(TOKEN, 32, (4, 5))
    opened(lead, memory_generation=1)
    assert failure_of(lead, pull).reason is Reason.MEMORY_CHANGED
    lead.pull(TOKEN, 32, (4, 5), number=2)
    assert lead.one(MakeOffer), "the next pull shakes hands first"


def test_a_grant_without_an_address_works_for_a_peer_that_dialled_us_only(lead: Lead) -> None:
    hidden = describe("p", 1, address="")
    lead.pull(grant(hidden), 32, (4, 5))
    assert lead.seen(SendOpen)
    pull = lead.pull(grant(describe("x", 9, address="")), 32, (6, 7), number=2)
    assert failure_of(lead, pull).reason is Reason.PEER_UNREACHABLE
    assert lead.seen(Dial) == []
    assert lead.seen(MakeOffer) == []
