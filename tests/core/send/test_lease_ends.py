"""The time and the end of a lease: the end of a lease or of its transfer ends the other too."""

from typing import Any

import pytest

from kvgrpc.core import actions
from kvgrpc.core.actions import BlocksReturnedNews, FailedNews
from kvgrpc.core.events import LeaseRef, LeasesVoided, RenewLeases
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.transfers import Disposition, Side, State
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import SCHEDULER
from kvgrpc.errors import InvalidRequest, NotFound, OutOfRange, PermissionDenied, Reason
from tests.core.nodes import Lead, access_id, claim, describe, grant, refused
from tests.core.send.lent_blocks import LIMITS, D, key, release


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1), LIMITS)


def renew(lead: Lead, ttl_s: float | None, *ids: str) -> Any:
    return lead.call(lambda c: RenewLeases(c, tuple(LeaseRef(id_) for id_ in ids), ttl_s)).rows


# -- time


def test_a_ttl_past_the_cap_is_clamped_and_told(lead: Lead) -> None:
    made = lead.finish(ttl_s=1e9)
    assert (made.lease.last_ttl_s, made.times.remaining_s) == (100.0, 100.0)


def test_a_lease_ends_at_its_very_deadline_before_an_event_of_that_moment(lead: Lead) -> None:
    made = lead.finish(ttl_s=5.0)
    lead.tick(4.999)
    assert lead.state.send.leases.get(made.lease.id).live
    lead.now = 105.0
    assert renew(lead, None, made.lease.id) == ((0.0, Reason.LEASE_EXPIRED, LeaseState.EXPIRED),)
    assert lead.transfer(made.transfer.id).state is State.FAILED


def test_an_expired_hand_over_fails_and_returns_its_blocks(lead: Lead) -> None:
    made = lead.finish(ttl_s=5.0, request_id="r")
    lead.tick(5.0)
    failed, returned = lead.news()
    assert isinstance(failed, FailedNews)
    assert (failed.transfer_id, failed.request_id, failed.cancelled) == (made.transfer.id, "r", False)
    assert (failed.failure.reason, failed.failure.side) == (Reason.LEASE_EXPIRED, Side.SOURCE)
    assert returned == BlocksReturnedNews(made.transfer.id, "r", made.lease.id)
    changed = lead.one(actions.TransferChanged)
    assert lead.done.index(changed) < lead.done.index(lead.seen(actions.TellEngine)[0]), "first ended, then told"
    transfer = lead.transfer(made.transfer.id)
    assert (transfer.state, transfer.memory, transfer.ended) == (State.FAILED, Disposition.RETURNED, 105.0)
    assert len(lead.state.pool.pins) == 0
    assert lead.state.send.leases.get(made.lease.id).state is LeaseState.EXPIRED


def test_renewals_carry_a_lease_to_its_cap_and_no_further(lead: Lead) -> None:
    made = lead.finish(ttl_s=40.0)
    for remaining in (40.0, 40.0, 10.0):
        lead.tick(30.0)
        assert renew(lead, None, made.lease.id) == ((remaining, None, LeaseState.LIVE),)
    lead.tick(9.9)
    assert lead.state.send.leases.get(made.lease.id).live
    lead.tick(0.1)
    assert not lead.state.send.leases.get(made.lease.id).live


def test_a_renewal_never_shortens(lead: Lead) -> None:
    made = lead.finish(ttl_s=50.0)
    assert renew(lead, 1.0, made.lease.id) == ((50.0, None, LeaseState.LIVE),)
    lead.tick(49.0)
    assert lead.state.send.leases.get(made.lease.id).live


def test_a_renewed_lease_ends_at_its_new_deadline_only(lead: Lead) -> None:
    made = lead.finish(ttl_s=10.0)
    lead.tick(9.0)
    renew(lead, None, made.lease.id)
    lead.tick(1.0)
    assert lead.node.next_deadline() == 119.0
    lead.tick(9.0)
    assert lead.state.send.leases.get(made.lease.id).state is LeaseState.EXPIRED


def test_renewals_are_answered_row_by_row(lead: Lead) -> None:
    first = lead.finish(key=key(1))
    second = lead.finish(key=key(2), ttl_s=1.0)
    lead.tick(1.0)
    third = lead.finish(key=key(3))
    lead.admit(D)
    lead.opened(D, AccessOpening(access_id(), third.token, claim(32)))
    lead.settle(D)
    assert renew(lead, 60.0, first.lease.id, second.lease.id, third.lease.id, "l-unknown", "") == (
        (60.0, None, LeaseState.LIVE),
        (0.0, Reason.LEASE_EXPIRED, LeaseState.EXPIRED),
        (0.0, Reason.LEASE_RELEASED, LeaseState.DONE),
        (0.0, Reason.LEASE_NOT_FOUND, None),
        (0.0, Reason.LEASE_NOT_FOUND, None),
    )


@pytest.mark.parametrize("ttl_s", [0.0, -5.0])
def test_a_renewal_for_no_time_is_refused(lead: Lead, ttl_s: float) -> None:
    made = lead.finish()
    with refused(Reason.TTL_INVALID, InvalidRequest):
        renew(lead, ttl_s, made.lease.id)


def test_one_call_renews_a_bounded_number() -> None:
    lead = Lead(describe("p", 1), Limits(renewals_per_call=2))
    renew(lead, None, "a", "b")
    with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
        renew(lead, None, "a", "b", "c")


def test_a_grant_names_its_lease_too_when_it_is_ours(lead: Lead) -> None:
    made = lead.finish()
    by_grant = lead.call(lambda c: RenewLeases(c, (LeaseRef(token=made.token),)))
    assert by_grant.rows == ((30.0, None, LeaseState.LIVE),)
    forged = made.token[:-1] + b"x"
    rows = lead.call(lambda c: RenewLeases(c, (LeaseRef(token=forged), LeaseRef(token=grant(D))))).rows
    assert [reason for _, reason, _ in rows] == [Reason.GRANT_INVALID, Reason.GRANT_FOREIGN]
    with refused(Reason.GRANT_FOREIGN, PermissionDenied):
        release(lead, token=grant(D))
    assert release(lead, token=made.token).lease.state is LeaseState.RELEASED


# -- ends


def test_a_release_says_what_came_free_and_may_be_repeated(lead: Lead) -> None:
    made = lead.finish(32, (1, 2), key=key(1))
    lead.finish(32, (2, 3), key=key(2))
    answer = release(lead, lease_id=made.lease.id)
    assert answer.lease.state is LeaseState.RELEASED
    assert [blocks.tolist() for blocks in answer.freed] == [[1]]
    transfer = lead.transfer(made.transfer.id)
    assert (transfer.state, transfer.memory) == (State.CANCELLED, Disposition.RETURNED)
    again = release(lead, lease_id=made.lease.id)
    assert again.lease.state is LeaseState.RELEASED
    assert lead.news() == []


def test_an_ended_lease_stays_as_it_ended(lead: Lead) -> None:
    made = lead.finish(ttl_s=1.0)
    lead.tick(1.0)
    assert release(lead, lease_id=made.lease.id).lease.state is LeaseState.EXPIRED
    lead.feed(LeasesVoided((made.lease.id,)))
    assert lead.state.send.leases.get(made.lease.id).state is LeaseState.EXPIRED


def test_an_unknown_lease_cannot_be_released(lead: Lead) -> None:
    with refused(Reason.LEASE_NOT_FOUND, NotFound):
        release(lead, lease_id="l-unknown")


def test_blocks_that_the_engine_took_back_are_void_at_once(lead: Lead) -> None:
    made = lead.finish()
    lead.admit(D)
    lead.opened(D, AccessOpening(access_id(), made.token, claim(32)))
    lead.feed(LeasesVoided((made.lease.id, "l-unknown")))
    assert lead.state.send.leases.get(made.lease.id).state is LeaseState.VOIDED
    assert len(lead.state.pool.pins) == 0
    verdict = lead.settle(D)
    assert (verdict.valid, verdict.reason) == (False, Reason.LEASE_VOIDED)
    transfer = lead.transfer(made.transfer.id)
    assert (transfer.state, transfer.failure.reason if transfer.failure else None) == (
        State.CANCELLED,
        Reason.LEASE_VOIDED,
    )


def test_the_end_of_a_lease_without_a_transfer_is_told_by_its_id(lead: Lead) -> None:
    made = lead.finish(transfer=False, request_id="r")
    lead.tick(30.0)
    assert lead.news() == [BlocksReturnedNews("", "r", made.lease.id)]


def test_the_engine_is_told_of_its_own_hand_overs_only(lead: Lead) -> None:
    lead.finish(principal=SCHEDULER)
    lead.tick(30.0)
    assert lead.news() == []
    assert lead.state.transfers.live == 0, "a transfer that no engine acknowledges goes to the history by itself"


def test_only_the_end_of_a_lease_is_remembered_and_not_its_blocks(lead: Lead) -> None:
    made = lead.finish(1024, tuple(range(64)), ttl_s=1.0)
    lead.tick(1.0)
    ended = lead.state.send.leases.get(made.lease.id)
    assert sum(len(blocks) for blocks in ended.blocks) == 0
    assert ended.content == ContentId(1024, opaque=b"forgotten")
