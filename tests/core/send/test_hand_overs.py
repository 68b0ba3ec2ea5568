"""A hand-over pins its blocks by a lease and makes a SEND transfer; a refused one leaves nothing behind."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import HandedOver
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Direction, Disposition, State
from kvgrpc.core.values.grants import AccessKind, read_claims
from kvgrpc.core.values.layout import GroupKind, PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import SCHEDULER
from kvgrpc.errors import AlreadyExists, Exhausted, InvalidRequest, KVGrpcError, OutOfRange, PreconditionFailed, Reason
from tests.core.nodes import KEY, Lead, access_id, claim, content, describe, grant, hybrid, lists, refused, snapshot
from tests.core.send.lent_blocks import LIMITS, D, key, release

Error = tuple[Reason, type[KVGrpcError]]


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1), LIMITS)


def test_a_hand_over_gives_a_lease_a_transfer_and_a_grant(lead: Lead) -> None:
    made = lead.finish(40, request_id="r", call={"trace": "00-x"}, priority=7, consumers=2)
    assert made.lease.state is LeaseState.LIVE
    assert (made.times.remaining_s, made.lease.last_ttl_s, made.times.cap_remaining_s) == (30.0, 30.0, 100.0)
    assert made.lease.transfer_id == made.transfer.id
    assert (made.lease.content.tokens, made.lease.consumers, made.lease.request_id) == (40, 2, "r")
    assert made.lease.trace == made.transfer.trace == "00-x"
    transfer = made.transfer
    assert (transfer.direction, transfer.state, transfer.memory) == (Direction.SEND, State.PENDING, Disposition.HELD)
    assert (transfer.waiting_for, transfer.priority, transfer.consumers) == ("readers", 7, 2)
    assert (transfer.blocks, transfer.nbytes, transfer.use_tokens) == (3, 48, 40)
    claims = read_claims(made.token)
    assert (claims.engine_id, claims.incarnation, claims.address) == ("p", 1, "p:1")
    assert (claims.lease_id, claims.transfer_key, claims.access) == (made.lease.id, KEY, AccessKind.READ)
    assert (claims.token_count, claims.block_count, claims.ttl_s) == (40, 3, 30.0)
    assert lead.state.pool.pins.has(made.lease.id, PinKind.LEASE)


def test_bytes_are_those_of_all_ranks() -> None:
    lead = Lead(describe("p", 1, world_size=4))
    assert lead.finish(40).transfer.nbytes == 4 * 48


def test_a_lease_id_may_come_from_the_engine(lead: Lead) -> None:
    assert lead.finish(lease_id="l-mine").lease.id == "l-mine"


def test_ids_that_the_lead_mints_differ(lead: Lead) -> None:
    first = lead.finish(key=key(1)).lease.id
    assert lead.finish(key=key(2)).lease.id != first


def test_no_consumer_counts_as_one(lead: Lead) -> None:
    assert lead.finish(consumers=0).lease.consumers == 1


def test_read_leases_share_blocks(lead: Lead) -> None:
    first = lead.finish(32, (1, 2), key=key(1))
    lead.finish(32, (2, 1), key=key(2))
    release(lead, lease_id=first.lease.id)
    assert lead.state.pool.pins.unpinned(0, lists((1, 2))[0][1]).tolist() == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"key": b"k" * 15}, (Reason.INVALID_FIELD, InvalidRequest)),
        ({"key": b"k" * 65}, (Reason.INVALID_FIELD, InvalidRequest)),
        ({"ttl_s": 0.0}, (Reason.TTL_INVALID, InvalidRequest)),
        ({"ttl_s": -1.0}, (Reason.TTL_INVALID, InvalidRequest)),
        ({"content": None}, (Reason.CONTENT_REQUIRED, InvalidRequest)),
        ({"lease_id": "l" * 65}, (Reason.INVALID_FIELD, InvalidRequest)),
        ({"blocks": lists(())}, (Reason.EMPTY_FINISH, PreconditionFailed)),
        ({"blocks": ()}, (Reason.EMPTY_FINISH, PreconditionFailed)),
        ({"blocks": lists((0, 64))}, (Reason.BLOCK_OUT_OF_RANGE, OutOfRange)),
        ({"blocks": lists((5, 5))}, (Reason.BLOCK_DUPLICATE, InvalidRequest)),
        ({"blocks": lists((0,), (1,))}, (Reason.GROUP_MISMATCH, InvalidRequest)),
        ({"blocks": (*lists((0,)), *lists((1,)))}, (Reason.GROUP_MISMATCH, InvalidRequest)),
        ({"blocks": lists((0,))}, (Reason.CONTENT_RANGE, PreconditionFailed)),
        ({"blocks": lists((0, 1, 2))}, (Reason.CONTENT_RANGE, PreconditionFailed)),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_a_wrong_hand_over_changes_nothing(
    lead: Lead, fields: dict[str, Any], error: Error, validate_only: bool
) -> None:
    values = {"key": KEY, "blocks": lists((0, 1)), "content": content(32), "validate_only": validate_only, **fields}
    before = snapshot(lead.node)
    with refused(*error):
        lead.call(lambda c: events.FinishedBlocks(c, **values))
    assert snapshot(lead.node) == before


def test_validate_only_checks_everything_and_changes_nothing(lead: Lead) -> None:
    before = snapshot(lead.node)
    answer = lead.finish(validate_only=True)
    assert isinstance(answer, HandedOver)
    assert (answer.token, answer.transfer, answer.lease.content.tokens) == (b"", None, 32)
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


# -- refused hand-overs


def test_openings_that_wait_for_a_lease_fail_at_once_when_its_hand_over_is_refused(lead: Lead) -> None:
    lead.admit(D)
    call = lead.open(D, AccessOpening(access_id(), grant(lead.me, lease_id="l-mine"), claim(32)))
    assert lead.answer(call) is None
    with refused(Reason.CONTENT_RANGE):
        lead.finish(32, (0,), lease_id="l-mine")
    (row,) = lead.answer(call).rows
    assert row.reason is Reason.LEASE_REFUSED
    (late,) = lead.opened(D, AccessOpening(access_id(2), grant(lead.me, lease_id="l-mine"), claim(32)))
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
    assert list(lead.state.tombstones.leases) == ["l-mine"]
    lead.tick(0.1)
    assert not lead.state.tombstones.leases


def test_refusing_a_lease_id_in_use_leaves_the_lease_alone(lead: Lead) -> None:
    made = lead.finish(lease_id="l-mine")
    lead.admit(D)
    with refused(Reason.TRANSFER_EXISTS):
        lead.finish(lease_id="l-mine", key=key(2))
    (row,) = lead.opened(D, AccessOpening(access_id(), made.token, claim(32)))
    assert isinstance(row, events.Opened)


def test_what_may_pass_leaves_no_tombstone_for_a_client_that_repeats_its_call() -> None:
    lead = Lead(describe("p", 1), Limits(leases=1))
    first = lead.finish(key=key(1))
    before = snapshot(lead.node)
    with refused(Reason.QUEUE_FULL):
        lead.finish(key=key(2), lease_id="l-mine", principal=SCHEDULER)
    assert snapshot(lead.node) == before
    release(lead, lease_id=first.lease.id)
    lead.finish(key=key(2), lease_id="l-mine", principal=SCHEDULER)


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.DRAINING])
def test_openings_of_an_engines_lease_fail_at_once_when_there_is_no_room_for_it(reason: Reason) -> None:
    """The engine gives the grant away before its lead sees the hand-over, and does not retry the hand-over."""
    lead = Lead(describe("p", 1), Limits(leases=1))
    lead.admit(D)
    call = lead.open(D, AccessOpening(access_id(), grant(lead.me, lease_id="l-mine"), claim(32)))
    lead.state.life.draining = reason is Reason.DRAINING
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
    assert list(lead.state.tombstones.leases) == ["l-1", "l-2"]
    lead.tick(120.0)
    assert not lead.state.tombstones.leases
