"""Handing over: a lease pins its blocks, a SEND transfer follows it, and whatever ends one ends the other."""

from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.accesses import Opening
from kvgrpc.core.actions import BlocksReturned, Failed, HandedOver
from kvgrpc.core.content import Content
from kvgrpc.core.events import LeaseRef, LeasesVoided, ReleaseLease, RenewLeases
from kvgrpc.core.grants import Access, read_claims
from kvgrpc.core.layout import GroupKind, PoolKind
from kvgrpc.core.leases import LeaseState
from kvgrpc.core.limits import Limits
from kvgrpc.core.pins import PinKind
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Direction, Disposition, Side, State
from kvgrpc.errors import (
    AlreadyExists,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
)
from tests.core.nodes import KEY, Lead, access_id, claim, content, describe, grant, hybrid, lists, refused, snapshot

LIMITS = Limits(lease_ttl_s=30.0, lease_cap_s=100.0)
D = describe("d", 2)
E = describe("e", 3)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1), LIMITS)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def release(lead: Lead, **ref: Any) -> Any:
    return lead.call(lambda c: ReleaseLease(c, LeaseRef(**ref)))


def renew(lead: Lead, ttl_s: float | None, *ids: str) -> Any:
    return lead.call(lambda c: RenewLeases(c, tuple(LeaseRef(id_) for id_ in ids), ttl_s)).rows


def test_a_hand_over_gives_a_lease_a_transfer_and_a_grant(lead: Lead) -> None:
    made = lead.finish(40, request_id="r", call={"trace": "00-x"}, priority=7, consumers=2)
    assert made.lease.state is LeaseState.LIVE
    assert (made.lease.remaining_s, made.lease.ttl_s, made.lease.cap_remaining_s) == (30.0, 30.0, 100.0)
    assert made.lease.transfer_id == made.transfer.id
    assert (made.lease.token_count, made.lease.consumers, made.lease.request_id) == (40, 2, "r")
    assert made.lease.trace == made.transfer.trace == "00-x"
    transfer = made.transfer
    assert (transfer.direction, transfer.state, transfer.memory) == (Direction.SEND, State.PENDING, Disposition.HELD)
    assert (transfer.waiting_for, transfer.priority, transfer.consumers) == ("readers", 7, 2)
    assert (transfer.blocks, transfer.nbytes, transfer.use_tokens) == (3, 48, 40)
    claims = read_claims(made.token)
    assert (claims.engine_id, claims.incarnation, claims.address) == ("p", 1, "p:1")
    assert (claims.lease_id, claims.transfer_key, claims.access) == (made.lease.id, KEY, Access.READ)
    assert (claims.token_count, claims.block_count, claims.ttl_s) == (40, 3, 30.0)
    assert lead.state.pins.has(made.lease.id, PinKind.LEASE)


def test_bytes_are_those_of_all_ranks() -> None:
    lead = Lead(describe("p", 1, world_size=4))
    assert lead.finish(40).transfer.nbytes == 4 * 48


def test_a_lease_id_may_come_from_the_engine(lead: Lead) -> None:
    assert lead.finish(lease_id="l-mine").lease.id == "l-mine"


def test_ids_that_the_lead_mints_differ(lead: Lead) -> None:
    first = lead.finish(key=key(1)).lease.id
    assert lead.finish(key=key(2)).lease.id != first


def test_nobody_is_one_consumer(lead: Lead) -> None:
    assert lead.finish(consumers=0).lease.consumers == 1


def test_read_leases_share_blocks(lead: Lead) -> None:
    first = lead.finish(32, (1, 2), key=key(1))
    lead.finish(32, (2, 1), key=key(2))
    release(lead, lease_id=first.lease.id)
    assert lead.state.pins.unpinned(0, lists((1, 2))[0][1]).tolist() == []


@pytest.mark.parametrize(
    ("fields", "reason", "kind"),
    [
        ({"key": b"k" * 15}, Reason.INVALID_FIELD, InvalidRequest),
        ({"key": b"k" * 65}, Reason.INVALID_FIELD, InvalidRequest),
        ({"ttl_s": 0.0}, Reason.TTL_INVALID, InvalidRequest),
        ({"ttl_s": -1.0}, Reason.TTL_INVALID, InvalidRequest),
        ({"content": None}, Reason.CONTENT_REQUIRED, InvalidRequest),
        ({"lease_id": "l" * 65}, Reason.INVALID_FIELD, InvalidRequest),
        ({"blocks": lists(())}, Reason.EMPTY_FINISH, PreconditionFailed),
        ({"blocks": ()}, Reason.EMPTY_FINISH, PreconditionFailed),
        ({"blocks": lists((0, 64))}, Reason.BLOCK_OUT_OF_RANGE, OutOfRange),
        ({"blocks": lists((5, 5))}, Reason.BLOCK_DUPLICATE, InvalidRequest),
        ({"blocks": lists((0,), (1,))}, Reason.GROUP_MISMATCH, InvalidRequest),
        ({"blocks": (*lists((0,)), *lists((1,)))}, Reason.GROUP_MISMATCH, InvalidRequest),
        ({"blocks": lists((0,))}, Reason.CONTENT_RANGE, PreconditionFailed),
        ({"blocks": lists((0, 1, 2))}, Reason.CONTENT_RANGE, PreconditionFailed),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_what_is_wrong_is_refused_and_changes_nothing(
    lead: Lead, fields: dict[str, Any], reason: Reason, kind: type[KVGrpcError], validate_only: bool
) -> None:
    values = {"key": KEY, "blocks": lists((0, 1)), "content": content(32), "validate_only": validate_only, **fields}
    before = snapshot(lead.node)
    with refused(reason, kind):
        lead.call(lambda c: events.FinishedBlocks(c, **values))
    assert snapshot(lead.node) == before


def test_validate_only_checks_everything_and_changes_nothing(lead: Lead) -> None:
    before = snapshot(lead.node)
    answer = lead.finish(validate_only=True)
    assert isinstance(answer, HandedOver)
    assert (answer.token, answer.transfer, answer.lease.token_count) == (b"", None, 32)
    assert snapshot(lead.node) == before
    lead.finish()
    before = snapshot(lead.node)
    with refused(Reason.TRANSFER_EXISTS):
        lead.finish(validate_only=True)
    assert snapshot(lead.node) == before


def test_ids_too_long_for_a_grant_are_refused_before_anything_is_pinned() -> None:
    lead = Lead(describe("p" * 100, 1, address="a" * 100))
    before = snapshot(lead.node)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        lead.finish()
    assert snapshot(lead.node) == before


def test_a_key_has_one_hand_over_at_a_time(lead: Lead) -> None:
    first = lead.finish()
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        lead.finish(32, (4, 5))
    release(lead, lease_id=first.lease.id)
    lead.finish(32, (4, 5))


def test_a_lease_id_is_never_used_again(lead: Lead) -> None:
    first = lead.finish(lease_id="l-mine")
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        lead.finish(lease_id="l-mine", key=key(2))
    release(lead, lease_id=first.lease.id)
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        lead.finish(lease_id="l-mine", key=key(2))


def test_blocks_of_a_target_are_refused(lead: Lead) -> None:
    lead.pull(grant(D), 32, (0, 1))
    with refused(Reason.BLOCK_PINNED, PreconditionFailed):
        lead.finish(32, (1, 2))
    lead.finish(32, (2, 3))


def test_a_managed_pool_hands_over_only_what_it_gave_out() -> None:
    lead = Lead(describe("p", 1, pool_kind=PoolKind.SERVER_MANAGED))
    with refused(Reason.BLOCK_NOT_ALLOCATED, PreconditionFailed):
        lead.finish()
    lead.call(lambda c: events.AllocateBlocks(c, ((0, 2),)))
    lead.finish()


def test_without_a_pool_there_is_nothing_to_hand_over(lead: Lead) -> None:
    lead.begin(None, attached=False)
    with refused(Reason.NO_POOL):
        lead.call(lambda c: events.FinishedBlocks(c, KEY, lists((0, 1)), content(32)))


def test_leases_and_transfers_are_bounded() -> None:
    lead = Lead(describe("p", 1), Limits(leases=2, transfers=1))
    lead.finish(key=key(1))
    with refused(Reason.QUEUE_FULL, Exhausted) as _:
        lead.finish(key=key(2))
    lead.finish(key=key(2), transfer=False)
    with refused(Reason.QUEUE_FULL, Exhausted):
        lead.finish(key=key(3), transfer=False)


def test_every_group_lists_exactly_the_blocks_of_the_tokens() -> None:
    lead = Lead(describe("p", 1, pool=hybrid()))
    with refused(Reason.CONTENT_RANGE):
        lead.finish(33, (0, 1, 2), (0,))
    lead.finish(33, (0, 1, 2), (0, 1))


def test_a_state_is_one_block_however_long_the_prompt() -> None:
    lead = Lead(describe("p", 1, pool=hybrid(GroupKind.STATE)))
    with refused(Reason.CONTENT_RANGE):
        lead.finish(33, (0, 1, 2), (0, 1))
    lead.finish(33, (0, 1, 2), (5,))


def test_a_grant_of_a_lease_makes_no_transfer_and_may_share_a_key(lead: Lead) -> None:
    for _ in range(2):
        made = lead.finish(transfer=False, labels=(("a", "b"),))
        assert made.transfer is None
        assert made.lease.transfer_id == ""
        assert made.lease.labels == (("a", "b"),)
    assert lead.state.transfers.live == 0


# -- time


def test_a_ttl_past_the_cap_is_clamped_and_told(lead: Lead) -> None:
    made = lead.finish(ttl_s=1e9)
    assert (made.lease.ttl_s, made.lease.remaining_s) == (100.0, 100.0)


def test_a_lease_ends_at_its_very_deadline_before_an_event_of_that_moment(lead: Lead) -> None:
    made = lead.finish(ttl_s=5.0)
    lead.tick(4.999)
    assert lead.state.leases.get(made.lease.id).live
    lead.now = 105.0
    assert renew(lead, None, made.lease.id) == ((0.0, Reason.LEASE_EXPIRED),)
    assert lead.transfer(made.transfer.id).state is State.FAILED


def test_an_expired_hand_over_fails_and_returns_its_blocks(lead: Lead) -> None:
    made = lead.finish(ttl_s=5.0, request_id="r")
    lead.tick(5.0)
    failed, returned = lead.news()
    assert isinstance(failed, Failed)
    assert (failed.transfer_id, failed.request_id, failed.cancelled) == (made.transfer.id, "r", False)
    assert (failed.failure.reason, failed.failure.side) == (Reason.LEASE_EXPIRED, Side.SOURCE)
    assert returned == BlocksReturned(made.transfer.id, "r", made.lease.id)
    changed = lead.one(actions.TransferChanged)
    assert lead.done.index(changed) < lead.done.index(lead.seen(actions.TellEngine)[0]), "first ended, then told"
    transfer = lead.transfer(made.transfer.id)
    assert (transfer.state, transfer.memory, transfer.ended) == (State.FAILED, Disposition.RETURNED, 105.0)
    assert len(lead.state.pins) == 0
    assert lead.state.leases.get(made.lease.id).state is LeaseState.EXPIRED


def test_renewals_carry_a_lease_to_its_cap_and_no_further(lead: Lead) -> None:
    made = lead.finish(ttl_s=40.0)
    for remaining in (40.0, 40.0, 10.0):
        lead.tick(30.0)
        ((left, reason),) = renew(lead, None, made.lease.id)
        assert (left, reason) == (remaining, None)
    lead.tick(9.9)
    assert lead.state.leases.get(made.lease.id).live
    lead.tick(0.1)
    assert not lead.state.leases.get(made.lease.id).live


def test_a_renewal_never_shortens(lead: Lead) -> None:
    made = lead.finish(ttl_s=50.0)
    assert renew(lead, 1.0, made.lease.id) == ((50.0, None),)
    lead.tick(49.0)
    assert lead.state.leases.get(made.lease.id).live


def test_a_renewed_lease_ends_at_its_new_deadline_only(lead: Lead) -> None:
    made = lead.finish(ttl_s=10.0)
    lead.tick(9.0)
    renew(lead, None, made.lease.id)
    lead.tick(1.0)
    assert lead.node.next_deadline() == 119.0
    lead.tick(9.0)
    assert lead.state.leases.get(made.lease.id).state is LeaseState.EXPIRED


def test_renewals_are_answered_row_by_row(lead: Lead) -> None:
    first = lead.finish(key=key(1))
    second = lead.finish(key=key(2), ttl_s=1.0)
    lead.tick(1.0)
    rows = renew(lead, 60.0, first.lease.id, second.lease.id, "l-unknown", "")
    assert [reason for _, reason in rows] == [
        None, Reason.LEASE_EXPIRED, Reason.LEASE_NOT_FOUND, Reason.LEASE_NOT_FOUND
    ]  # fmt: skip
    assert rows[0][0] == 60.0


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
    assert by_grant.rows == ((30.0, None),)
    forged = made.token[:-1] + b"x"
    rows = lead.call(lambda c: RenewLeases(c, (LeaseRef(token=forged), LeaseRef(token=grant(D))))).rows
    assert [reason for _, reason in rows] == [Reason.GRANT_INVALID, Reason.GRANT_FOREIGN]
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
    assert lead.state.leases.get(made.lease.id).state is LeaseState.EXPIRED


def test_an_unknown_lease_cannot_be_released(lead: Lead) -> None:
    with refused(Reason.LEASE_NOT_FOUND, NotFound):
        release(lead, lease_id="l-unknown")


def test_blocks_that_the_engine_took_back_are_void_at_once(lead: Lead) -> None:
    made = lead.finish()
    lead.admit(D)
    lead.opened(D, Opening(access_id(), made.token, claim(32)))
    lead.feed(LeasesVoided((made.lease.id, "l-unknown")))
    assert lead.state.leases.get(made.lease.id).state is LeaseState.VOIDED
    assert len(lead.state.pins) == 0
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
    assert lead.news() == [BlocksReturned("", "r", made.lease.id)]


def test_the_engine_is_told_of_its_own_hand_overs_only(lead: Lead) -> None:
    lead.finish(principal="router")
    lead.tick(30.0)
    assert lead.news() == []
    assert lead.state.transfers.live == 0, "a transfer that no engine acknowledges goes to the history by itself"


def test_only_the_end_of_a_lease_is_remembered_and_not_its_blocks(lead: Lead) -> None:
    made = lead.finish(1024, tuple(range(64)), ttl_s=1.0)
    lead.tick(1.0)
    ended = lead.state.leases.get(made.lease.id)
    assert sum(len(blocks) for blocks in ended.blocks) == 0
    assert ended.content == Content(1024, opaque=b"forgotten")


# -- refused hand-overs


def test_whoever_waits_for_a_lease_fails_at_once_when_its_hand_over_is_refused(lead: Lead) -> None:
    lead.admit(D)
    call = lead.open(D, Opening(access_id(), grant(lead.me, lease_id="l-mine"), claim(32)))
    assert lead.answer(call) is None
    with refused(Reason.CONTENT_RANGE):
        lead.finish(32, (0,), lease_id="l-mine")
    (row,) = lead.answer(call).rows
    assert row.reason is Reason.LEASE_REFUSED
    (late,) = lead.opened(D, Opening(access_id(2), grant(lead.me, lease_id="l-mine"), claim(32)))
    assert late.reason is Reason.LEASE_REFUSED


def test_the_id_of_a_refused_lease_is_used_up(lead: Lead) -> None:
    with refused(Reason.CONTENT_RANGE):
        lead.finish(32, (0,), lease_id="l-mine")
    with refused(Reason.TRANSFER_EXISTS, AlreadyExists):
        lead.finish(lease_id="l-mine")


def test_a_refusal_is_remembered_for_the_registration_timeout(lead: Lead) -> None:
    with refused(Reason.CONTENT_RANGE):
        lead.finish(32, (0,), lease_id="l-mine")
    lead.tick(119.9)
    assert list(lead.state.refused_leases) == ["l-mine"]
    lead.tick(0.1)
    assert not lead.state.refused_leases


def test_refusing_a_lease_id_in_use_leaves_the_lease_alone(lead: Lead) -> None:
    made = lead.finish(lease_id="l-mine")
    lead.admit(D)
    with refused(Reason.TRANSFER_EXISTS):
        lead.finish(lease_id="l-mine", key=key(2))
    (row,) = lead.opened(D, Opening(access_id(), made.token, claim(32)))
    assert isinstance(row, events.Opened)


def test_what_may_pass_leaves_no_tombstone_for_a_client_that_repeats_its_call() -> None:
    lead = Lead(describe("p", 1), Limits(leases=1))
    first = lead.finish(key=key(1))
    before = snapshot(lead.node)
    with refused(Reason.QUEUE_FULL):
        lead.finish(key=key(2), lease_id="l-mine", principal="router")
    assert snapshot(lead.node) == before
    release(lead, lease_id=first.lease.id)
    lead.finish(key=key(2), lease_id="l-mine", principal="router")


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.DRAINING])
def test_whoever_waits_for_a_lease_of_the_engine_fails_at_once_when_there_is_no_room_for_it(reason: Reason) -> None:
    """The engine has given the grant away before its lead looked at the hand-over, and does not repeat it."""
    lead = Lead(describe("p", 1), Limits(leases=1))
    lead.admit(D)
    call = lead.open(D, Opening(access_id(), grant(lead.me, lease_id="l-mine"), claim(32)))
    lead.state.draining = reason is Reason.DRAINING
    if reason is Reason.QUEUE_FULL:
        lead.finish(key=key(1))
    with refused(reason):
        lead.finish(key=key(2), lease_id="l-mine")
    (row,) = lead.answer(call).rows
    assert row.reason is Reason.LEASE_REFUSED


def test_tombstones_of_leases_are_bounded_and_the_oldest_goes_first() -> None:
    lead = Lead(describe("p", 1), Limits(tombstones=2))
    for number in range(3):
        with refused(Reason.CONTENT_RANGE):
            lead.finish(32, (0,), lease_id=f"l-{number}")
    assert list(lead.state.refused_leases) == ["l-1", "l-2"]
    assert lead.state.timers.when(Timer.REFUSED_LEASE, "l-0") is None
