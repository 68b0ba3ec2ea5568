"""Renewals: at every third of the TTL, many in one call, and never so often that a peer's word stops the loop."""

from typing import Any

import pytest

from kvgrpc.core.actions import SendRenew
from kvgrpc.core.events import AccessAnswered, CancelTransfer, SettleAnswered, Tick
from kvgrpc.core.receive import renewals
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Reason, Unavailable
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
    """When renewals are sent within that time, and how many rows each has."""
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
        monkeypatch.setattr(renewals, "ROWS_MAX", 2)
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
