"""Pulls end by the verdict of the source, its loss, a cancel, or the end of this lead's life."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import (
    BlocksReturnedNews,
    FailedNews,
    MakeOffer,
    ReceivedNews,
    SendClose,
    SendSettle,
    TellEngine,
    TransferChanged,
)
from kvgrpc.core.events import (
    CloseAnswered,
    LifeBegan,
    PeerAlive,
    PeerSilent,
    PostingEnded,
    RenewAnswered,
    SettleAnswered,
    Tick,
)
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason
from tests.core.nodes import KEY, SECRET, Lead, access_id, describe, endpoints, key_of
from tests.core.receive.pull_stages import LOST, STAGES, TOKEN, P, at_stage, cancel, failure_of, opened, posted, settled


@pytest.fixture
def lead() -> Lead:
    """Makes a lead that is connected to P."""
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


# -- settling


@pytest.mark.parametrize(
    "reason", [Reason.LEASE_EXPIRED, Reason.LEASE_VOIDED, Reason.MEMORY_CHANGED, Reason.ACCESS_NOT_FOUND]
)
def test_a_stale_settle_fails_and_the_bytes_are_never_offered(lead: Lead, reason: Reason) -> None:
    pull = at_stage(lead, "settling")
    settled(lead, Verdict(False, reason, "why"))
    failure = failure_of(lead, pull)
    assert (failure.reason, failure.phase, failure.message) == (reason, "settle", "why")
    assert [type(news) for news in lead.news()] == [FailedNews, BlocksReturnedNews]
    assert lead.seen(SendClose) == [], "the settle has closed it"


def test_a_verdict_without_a_reason_is_a_failure_of_the_peer(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    settled(lead, Verdict(False))
    assert failure_of(lead, pull).reason is Reason.PEER_FAILED


def test_a_lost_settle_is_asked_again(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    first = lead.one(SendSettle)
    settled(lead, LOST, retryable=True)
    lead.tick(0.2)
    assert lead.one(SendSettle) == first
    settled(lead)
    assert lead.transfer(pull.id).state is State.SUCCEEDED


def test_no_answer_counts_as_failure(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    for _ in range(40):
        settled(lead, LOST, retryable=True)
        lead.tick(0.2)
    assert failure_of(lead, pull).reason is Reason.SETTLE_TIMEOUT
    assert ReceivedNews not in [type(news) for news in lead.news()]


def test_a_settle_that_is_refused_fails(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    settled(lead, InvalidRequest(Reason.INVALID_FIELD, "what?"))
    assert failure_of(lead, pull).reason is Reason.INVALID_FIELD


def test_a_source_that_does_not_know_us_when_we_settle_vouches_for_nothing(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    settled(lead, PreconditionFailed(Reason.NO_HANDSHAKE, "who?"))
    assert failure_of(lead, pull).reason is Reason.INCARNATION_CHANGED
    assert lead.seen(SendClose) == []
    lead.pull(TOKEN, 32, (4, 5), number=2)
    assert lead.one(MakeOffer), "the next pull shakes hands first"


# -- the source is lost


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_dead_source_fails_the_pull_at_every_stage(lead: Lead, stage: str) -> None:
    pull = at_stage(lead, stage)
    lead.feed(PeerSilent(key_of(P)))
    for _ in range(30):
        lead.tick(1.0)
        if stage == "settling" and not lead.transfer(pull.id).over:
            settled(lead, LOST, retryable=True)
        if lead.transfer(pull.id).over:
            break
    reason = Reason.SETTLE_TIMEOUT if stage == "settling" else Reason.PEER_LOST
    assert failure_of(lead, pull).reason is reason
    at_rest = Disposition.QUARANTINED if stage == "wire" else Disposition.RETURNED
    assert lead.transfer(pull.id).memory is at_rest


def test_what_a_dead_source_holds_is_closed_when_it_comes_back(lead: Lead) -> None:
    at_stage(lead, "wire")
    lead.feed(PeerSilent(key_of(P)))
    lead.tick(10.0)
    assert lead.seen(SendClose) == []
    call = lead.ask(lambda c: events.HandshakeReceived(c, P, endpoints(P)), principal="p")
    assert lead.one(SendClose).closing.access_id == access_id()
    assert call


def test_silence_shorter_than_the_grace_changes_nothing(lead: Lead) -> None:
    pull = at_stage(lead, "wire")
    lead.feed(PeerSilent(key_of(P)))
    lead.feed(PeerAlive(key_of(P)), 9.0)
    posted(lead, pull)
    settled(lead)
    assert lead.transfer(pull.id).state is State.SUCCEEDED


@pytest.mark.parametrize("reason", [Reason.LEASE_EXPIRED, Reason.LEASE_NOT_FOUND, Reason.INCARNATION_CHANGED])
def test_a_lease_that_ends_fails_a_pull_that_waits_at_once(lead: Lead, reason: Reason) -> None:
    pull = at_stage(lead, "waiting")
    lead.feed(RenewAnswered(pull.id, PreconditionFailed(reason, "gone")))
    assert failure_of(lead, pull).reason is reason


@pytest.mark.parametrize("stage", ["opening", "wire", "settling"])
def test_while_it_reads_settle_tells_and_no_renewal_does(lead: Lead, stage: str) -> None:
    pull = at_stage(lead, stage)
    assert lead.feed(RenewAnswered(pull.id, PreconditionFailed(Reason.LEASE_EXPIRED, "gone"))) == []
    assert not lead.transfer(pull.id).over


def test_a_renewal_that_was_lost_or_went_well_changes_nothing(lead: Lead) -> None:
    pull = at_stage(lead, "waiting")
    for error in (None, LOST):
        assert lead.feed(RenewAnswered(pull.id, error)) == []
    assert lead.feed(RenewAnswered("t-unknown", LOST)) == []


# -- cancel


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by_key", [False, True])
def test_a_pull_is_cancelled_at_every_stage(lead: Lead, stage: str, by_key: bool) -> None:
    pull = at_stage(lead, stage)
    answer = cancel(lead, key=KEY) if by_key else cancel(lead, transfer_id=pull.id)
    in_flight = stage == "wire"
    assert answer.outcome == ("cancelled_in_flight" if in_flight else "cancelled_before_access")
    (after,) = answer.transfers
    assert after.state is State.CANCELLED
    assert after.memory is (Disposition.QUARANTINED if in_flight else Disposition.RETURNED)
    assert failure_of(lead, pull).reason is Reason.CANCELLED
    kinds = [type(news) for news in lead.news()]
    assert kinds == ([FailedNews] if in_flight else [FailedNews, BlocksReturnedNews])
    closings = [send.closing for send in lead.seen(SendClose)]
    if stage == "connecting":
        assert closings == []
    else:
        closing = events.AccessClosing(access_id(), events.CloseOutcome.CANCELLED, not in_flight, TOKEN, "cancelled")
        assert closings == [closing]


@pytest.mark.parametrize("stage", STAGES)
def test_answers_that_come_after_a_cancel_change_nothing(lead: Lead, stage: str) -> None:
    pull = at_stage(lead, stage)
    cancel(lead, transfer_id=pull.id)
    after = lead.transfer(pull.id)
    opened(lead)
    settled(lead)
    lead.feed(RenewAnswered(pull.id, LOST))
    assert lead.transfer(pull.id) == after
    assert ReceivedNews not in [type(news) for news in lead.news()]
    lead.feed(CloseAnswered(access_id(), answered=True))
    posted(lead, pull)
    assert lead.transfer(pull.id).memory is Disposition.RETURNED
    assert lead.transfer(pull.id).failure == after.failure


def test_cancelling_what_is_over_says_so(lead: Lead) -> None:
    pull = at_stage(lead, "settling")
    settled(lead)
    for which in ({"transfer_id": pull.id}, {"key": KEY}):
        answer = cancel(lead, **which)
        assert answer.outcome == "already_ended"
        assert [t.state for t in answer.transfers] == [State.SUCCEEDED]


# -- the end of our own life


@pytest.mark.parametrize("stage", STAGES)
def test_the_end_of_our_life_fails_every_pull_and_closes_its_access(lead: Lead, stage: str) -> None:
    at_stage(lead, stage)
    incarnation = lead.me.incarnation
    done = lead.feed(LifeBegan(77, SECRET, describe("d", 77), engine_attached=True))
    (change,) = [action.transfer for action in done if isinstance(action, TransferChanged)]
    assert change.state is State.FAILED
    assert change.failure is not None
    assert change.failure.reason is Reason.ENGINE_LOST
    assert change.memory is (Disposition.QUARANTINED if stage == "wire" else Disposition.RETURNED)
    closings = [action for action in done if isinstance(action, SendClose)]
    assert [(send.closing.outcome, send.incarnation) for send in closings] == (
        [] if stage == "connecting" else [(events.CloseOutcome.DROPPED, incarnation)]
    )
    assert lead.seen(TellEngine) == [], "the engine that asked is gone"
    assert (len(lead.state.pool.pins), lead.state.timers.next_deadline()) == (0, None)
    for event in (PostingEnded(f"{change.id}/0.0", True), SettleAnswered(access_id(), Verdict(True)), Tick()):
        assert lead.feed(event) == []
