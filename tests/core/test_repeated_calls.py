"""Calls that are repeated under their key, and cancels by transfer or by key."""

from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import Cancelled, FailedNews
from kvgrpc.core.events import AllocateBlocks, CancelTransfer, ConnectPeer, LeaseRef, ReleaseLease
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import SCHEDULER
from kvgrpc.errors import AlreadyExists, Exhausted, InvalidRequest, NotFound, PreconditionFailed, Reason
from tests.core.nodes import KEY, Lead, access_id, content, describe, grant, lists, refused, snapshot

D = describe("d", 2)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1))


def cancel(lead: Lead, **which: Any) -> Cancelled:
    answer = lead.call(lambda c: CancelTransfer(c, **which))
    assert isinstance(answer, Cancelled)
    return answer


# -- idempotency


def test_a_repeated_call_gets_the_first_answer_and_acts_once(lead: Lead) -> None:
    call = {"key": "k", "method": "FinishedBlocks", "body": b"1"}
    first = lead.finish(call=call)
    before = snapshot(lead.state.send.leases)
    assert lead.finish(call=call) is first
    assert snapshot(lead.state.send.leases) == before
    with refused(Reason.IDEMPOTENCY_KEY_REUSED, AlreadyExists):
        lead.finish(call={**call, "body": b"2"})
    assert lead.finish(call=call) is first


def test_a_refused_call_may_succeed_under_its_key(lead: Lead) -> None:
    call = {"key": "k", "method": "FinishedBlocks", "body": b"1"}
    other = lead.finish()
    before = snapshot(lead.node)
    with refused(Reason.TRANSFER_EXISTS):
        lead.finish(call=call)
    assert snapshot(lead.node) == before
    lead.call(lambda c: ReleaseLease(c, LeaseRef(other.lease.id)))
    assert isinstance(lead.finish(call=call), actions.HandedOver)


def test_a_call_that_still_runs_is_joined_and_both_are_answered(lead: Lead) -> None:
    call: dict[str, Any] = {"key": "k", "method": "ConnectPeer", "body": b"1"}
    numbers = [lead.ask(lambda c: ConnectPeer(c, "d:1"), **call)]
    offers = lead.done
    numbers.append(lead.ask(lambda c: ConnectPeer(c, "d:1"), **call))
    assert lead.done == []
    lead.done = offers
    lead.connect(D)
    assert lead.answer(numbers[0]) is lead.answer(numbers[1])
    late = lead.ask(lambda c: ConnectPeer(c, "d:1"), **call)
    assert lead.answer(late) is lead.answer(numbers[0])


def test_a_refusal_reaches_all_that_joined(lead: Lead) -> None:
    call: dict[str, Any] = {"key": "k", "method": "ConnectPeer", "body": b"1"}
    numbers = [lead.ask(lambda c: ConnectPeer(c, "d:1"), **call) for _ in range(2)]
    lead.tick(10.0)
    for number in numbers:
        with refused(Reason.PEER_UNREACHABLE):
            lead.answer(number)


def test_a_key_is_kept_as_long_as_what_it_created_and_at_least_a_minute() -> None:
    lead = Lead(describe("p", 1), Limits(idempotency_s=60.0, lease_cap_s=600.0))
    call = {"key": "k", "method": "FinishedBlocks", "body": b"1"}
    lead.finish(call=call, ttl_s=150.0)
    lead.tick(149.0)
    assert len(lead.state.keys) == 1
    lead.tick(1.0)
    assert lead.state.transfers.live == 1, "the engine has not acknowledged it"
    lead.tick(29.0)
    assert len(lead.state.keys) == 1
    lead.tick(1.0)
    assert len(lead.state.keys) == 0


def test_keys_of_pulls_and_allocations_live_with_them() -> None:
    lead = Lead(describe("p", 1, pool_kind=PoolKind.SERVER_MANAGED))
    made = lead.call(lambda c: AllocateBlocks(c, ((0, 2),), ttl_s=90.0), key="a")
    pull = lead.call(
        lambda c: events.PullBlocks(c, grant(D), content(32), access_id(), queue_timeout_s=500.0), key="p"
    ).transfer
    lead.connect(D)
    lead.call(lambda c: events.GiveDestination(c, pull.id, events.Destination(lists((0, 1)))), key="g")
    assert len(lead.state.keys) == 3
    lead.tick(60.0)
    assert len(lead.state.keys) == 3
    cancel(lead, transfer_id=pull.id)
    lead.tick(60.0)
    assert not lead.state.pool.allocator.known(made.allocation_id)
    assert len(lead.state.keys) == 0


def test_a_server_managed_pool_renews_while_it_drains() -> None:
    lead = Lead(describe("p", 1, pool_kind=PoolKind.SERVER_MANAGED))
    made = lead.call(lambda c: AllocateBlocks(c, ((0, 2),), ttl_s=9.0))
    lead.state.life.draining = True
    assert lead.call(lambda c: AllocateBlocks(c, (), 20.0, made.allocation_id)).remaining_s == 20.0


def test_keys_of_leases_without_a_transfer_live_with_the_lease(lead: Lead) -> None:
    made = lead.finish(transfer=False, ttl_s=90.0, call={"key": "k"})
    lead.finish(validate_only=True, call={"key": "v"})
    lead.tick(60.0)
    assert len(lead.state.keys) == 1
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    lead.tick(60.0)
    assert len(lead.state.keys) == 0


def test_full_keys_refuse_rather_than_forget() -> None:
    lead = Lead(describe("p", 1), Limits(idempotency_keys=1))
    lead.finish(call={"key": "a"})
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        lead.finish(key=b"2" * 16, call={"key": "b"})
    lead.finish(key=b"3" * 16)


# -- cancel


def test_a_cancel_names_one_thing(lead: Lead) -> None:
    before = snapshot(lead.node)
    for which in ({}, {"transfer_id": "t", "key": KEY}, {"key": b"short"}, {"key": b"x" * 65}):
        with refused(Reason.INVALID_FIELD, InvalidRequest):
            cancel(lead, **which)
    with refused(Reason.TRANSFER_NOT_FOUND, NotFound):
        cancel(lead, transfer_id="t-unknown")
    assert snapshot(lead.node) == before


def test_cancelling_a_hand_over_releases_its_lease(lead: Lead) -> None:
    made = lead.finish()
    answer = cancel(lead, transfer_id=made.transfer.id)
    assert answer.outcome == "cancelled_before_access"
    assert answer.transfers[0].state is State.CANCELLED
    assert not lead.state.send.leases.get(made.lease.id).live
    (failed, _) = lead.news()
    assert isinstance(failed, FailedNews)
    assert failed.cancelled


def test_an_unknown_key_is_remembered_and_its_transfers_refused_when_they_come(lead: Lead) -> None:
    assert cancel(lead, key=KEY, message="gone").outcome == "tombstoned"
    for make in (lead.finish, lambda: lead.pull(grant(D))):
        with pytest.raises(PreconditionFailed, match=r"CANCELLED.*gone"):
            make()
    lead.finish(key=b"another key here")
    lead.tick(60.0)
    assert cancel(lead, key=KEY).outcome == "tombstoned"
    lead.tick(119.0)
    with refused(Reason.CANCELLED):
        lead.pull(grant(D))
    lead.tick(1.0)
    lead.pull(grant(D))


def test_a_key_cancels_both_directions_and_the_worst_outcome_is_told(lead: Lead) -> None:
    lead.admit(D)
    sent = lead.finish().transfer
    pull = lead.pull(grant(D), 32, (10, 11))
    lead.feed(events.AccessAnswered(access_id(), _answer()))
    answer = cancel(lead, key=KEY)
    assert answer.outcome == "cancelled_in_flight"
    assert [t.id for t in answer.transfers] == [sent.id, pull.id]
    assert [t.memory for t in answer.transfers] == [Disposition.RETURNED, Disposition.QUARANTINED]
    assert cancel(lead, key=KEY).outcome == "already_ended"


def _answer() -> events.Opened:
    return events.Opened(lists((0, 1)), 32, 32, 30.0, 30.0, 0)


def test_a_transfer_that_is_not_acknowledged_is_told_with_its_end(lead: Lead) -> None:
    sent = lead.finish(principal=SCHEDULER).transfer
    answer = cancel(lead, key=KEY)
    assert [(t.id, t.state) for t in answer.transfers] == [(sent.id, State.CANCELLED)]


def test_tombstones_of_keys_are_bounded_and_the_oldest_goes_first() -> None:
    lead = Lead(describe("p", 1), Limits(tombstones=2))
    keys = [bytes([i]) * 16 for i in range(3)]
    for key in keys:
        cancel(lead, key=key)
    cancel(lead, key=keys[2])
    assert list(lead.state.tombstones.keys) == keys[1:]
    lead.tick(120.0)
    assert not lead.state.tombstones.keys
