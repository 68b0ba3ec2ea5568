"""Renewals are sent at every third of the TTL, many in one call, and no TTL that a peer states keeps the loop busy."""

from typing import Any

import pytest

from kvgrpc.core.actions import Post, SendOpen, SendRenew
from kvgrpc.core.events import (
    AccessAnswered,
    AccessClosing,
    CancelTransfer,
    CloseAccess,
    CloseOutcome,
    RenewAnswered,
    SettleAnswered,
    Tick,
)
from kvgrpc.core.receive import pull_course
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import NextStep, PreconditionFailed, Reason, Unavailable
from tests.core.nodes import Lead, access_id, answer_of, describe, grant, key_of

P = describe("p", 1)
TOKEN = grant(P)


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


def pull(lead: Lead, number: int = 1, **changes: Any) -> str:
    made = lead.pull(TOKEN, number=number)
    lead.feed(AccessAnswered(access_id(number), answer_of(P, **changes)))
    return made.id


def sent_renewals(lead: Lead, seconds: float) -> list[tuple[float, int]]:
    """Returns when renewals are sent within that time, and how many rows each has."""
    found = []
    end = lead.now + seconds
    start = lead.now
    while (due := lead.node.next_deadline()) is not None and due <= end:
        lead.now = due
        found += [(round(due - start, 6), len(a.rows)) for a in lead.feed(Tick()) if isinstance(a, SendRenew)]
    lead.now = end
    return found


def test_a_lease_is_renewed_at_every_third_of_its_ttl(lead: Lead) -> None:
    made = pull(lead)
    assert sent_renewals(lead, 35.0) == [(10.0, 1), (20.0, 1), (30.0, 1)]
    lead.feed(Tick(), 5.0)
    assert lead.one(SendRenew) == SendRenew(key_of(P), ((made, TOKEN),))


def test_what_is_left_counts_when_it_is_less_than_the_ttl(lead: Lead) -> None:
    pull(lead, remaining_s=3.0)
    assert sent_renewals(lead, 12.0) == [(1.0, 1), (11.0, 1)]


def test_renewals_that_are_due_soon_go_together(lead: Lead) -> None:
    for number in range(1, 6):
        pull(lead, number)
        lead.feed(Tick(), 0.2)
    assert sent_renewals(lead, 25.0) == [(9.0, 5), (19.0, 5)]


def test_short_leases_are_renewed_together_within_a_tenth_of_their_ttl(lead: Lead) -> None:
    pull(lead, 1, ttl_s=3.0, remaining_s=3.0)
    pull(lead, 2, ttl_s=3.0, remaining_s=2.2)
    pull(lead, 3, ttl_s=3.0, remaining_s=1.0)
    assert sent_renewals(lead, 1.1) == [(0.333333, 1), (0.733333, 2)]


def test_leases_of_other_peers_are_renewed_in_calls_of_their_own(lead: Lead) -> None:
    q = describe("q", 5)
    lead.admit(q)
    pull(lead)
    lead.pull(grant(q), number=2)
    lead.feed(AccessAnswered(access_id(2), answer_of(q)))
    lead.feed(Tick(), 10.0)
    assert sorted(action.peer for action in lead.seen(SendRenew)) == [key_of(P), key_of(q)]


@pytest.mark.parametrize("most", [{"renewals_per_call": 2}, {}])
def test_a_call_has_no_more_rows_than_fit(most: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if not most:
        monkeypatch.setattr(pull_course, "ROWS_MAX", 2)
    lead = Lead(describe("d", 2), Limits(**most))
    lead.admit(P)
    for number in range(1, 6):
        pull(lead, number)
    lead.feed(Tick(), 10.0)
    assert [len(action.rows) for action in lead.seen(SendRenew)] == [2, 2, 1]


def test_pulls_that_are_not_open_or_over_are_not_renewed(lead: Lead) -> None:
    pull(lead, 1)
    lead.pull(TOKEN, number=2)
    lead.feed(AccessAnswered(access_id(2), Unavailable(Reason.PEER_UNREACHABLE, ""), retryable=True))
    pull(lead, 3)
    ended = pull(lead, 4)
    lead.give(ended, (4, 5))
    lead.call(lambda c: CancelTransfer(c, ended))
    assert lead.transfer(ended).memory.value == "quarantined"
    lead.feed(Tick(), 10.0)
    assert len(lead.one(SendRenew).rows) == 2


def test_a_pull_is_renewed_until_it_is_over(lead: Lead) -> None:
    made = pull(lead)
    lead.give(made)
    lead.feed(SettleAnswered(access_id(), Unavailable(Reason.PEER_UNREACHABLE, ""), retryable=True))
    lead.call(lambda c: CancelTransfer(c, made))
    assert sent_renewals(lead, 60.0) == []


@pytest.mark.parametrize("changes", [{"ttl_s": 1e-300, "remaining_s": 1e-300}, {"remaining_s": 0.0}])
def test_no_ttl_that_a_peer_states_keeps_the_loop_busy(lead: Lead, changes: dict[str, Any]) -> None:
    pull(lead, **changes)
    assert 1 <= len(sent_renewals(lead, 1.0)) <= 20


def test_a_ttl_without_end_needs_no_renewal(lead: Lead) -> None:
    pull(lead, ttl_s=float("inf"), remaining_s=float("inf"))
    assert sent_renewals(lead, 500.0) == []


# ---- a source may take its blocks back from a reader that waits


def at(lead: Lead, seconds: float) -> SendRenew | None:
    """Returns the renewal that is sent within that time, if any."""
    lead.feed(Tick(), seconds)
    return next(iter(lead.seen(SendRenew)), None)


def test_the_source_learns_that_a_pull_waits_for_blocks_and_when_its_request_began(lead: Lead) -> None:
    lead.pull(TOKEN, request_time_us=7)
    opening = lead.one(SendOpen).opening
    assert (opening.waits_for_blocks, opening.request_time_us) == (True, 7)
    lead.pull(timed := grant(P, request_time_us=5), 32, range(2), number=2)
    opening = lead.one(SendOpen).opening
    assert (opening.token, opening.waits_for_blocks, opening.request_time_us) == (timed, False, 5)


def test_a_pull_that_has_waited_says_at_once_that_it_reads(lead: Lead) -> None:
    made = pull(lead)
    lead.map(P)
    lead.feed(Tick(), 2.0)
    lead.give(made, range(2))
    assert lead.one(Post)
    assert at(lead, 0.0) == SendRenew(key_of(P), ((made, TOKEN),), (access_id(),))
    again = at(lead, 10.0)
    assert again is not None
    assert again.reading == (access_id(),)


def test_one_that_has_its_blocks_soon_says_so_only_if_it_still_reads_then(lead: Lead) -> None:
    made = pull(lead)
    lead.map(P)
    lead.give(made, range(2))
    assert at(lead, Limits().firm_ttl_s / 2 - 0.01) is None
    told = at(lead, 0.01)
    assert told is not None
    assert told.reading == (access_id(),)


def test_one_that_had_its_blocks_from_the_beginning_says_nothing(lead: Lead) -> None:
    lead.map(P)
    lead.pull(TOKEN, 32, range(2))
    lead.feed(AccessAnswered(access_id(), answer_of(P)))
    assert lead.one(Post)
    assert at(lead, 9.0) is None
    told = at(lead, 1.0)
    assert told is not None
    assert told.reading == ()


def test_a_source_that_says_that_blocks_may_be_gone_is_asked_at_once(lead: Lead) -> None:
    made = pull(lead)
    closing = AccessClosing(access_id(), CloseOutcome.FAILED, quiesced=True, token=TOKEN)
    lead.call(lambda c: CloseAccess(c, P.engine_id, P.incarnation, (closing,)), "p")
    assert not lead.transfer(made).over
    assert at(lead, 0.0) == SendRenew(key_of(P), ((made, TOKEN),))
    lead.feed(RenewAnswered(made, PreconditionFailed(Reason.LEASE_RECLAIMED, "gone")))
    failure = lead.transfer(made).failure
    assert failure is not None
    assert (failure.reason, failure.next) == (Reason.LEASE_RECLAIMED, NextStep.RECOMPUTE)


def test_a_pull_that_reads_is_not_hurried_by_that(lead: Lead) -> None:
    made = pull(lead)
    lead.map(P)
    lead.give(made, range(2))
    closing = AccessClosing(access_id(), CloseOutcome.FAILED, quiesced=True, token=TOKEN)
    lead.call(lambda c: CloseAccess(c, P.engine_id, P.incarnation, (closing,)), "p")
    assert at(lead, 0.0) is None
