"""Tenants in the core: things of one tenant are unknown to callers of another, and each has its share of bytes."""

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.events import CloseOutcome, RegisterPush, RenewLeases, ReserveBlocks
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.values.grants import AccessKind, Claims, mint, read_claims
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import SCHEDULER, name_of, of_tenant, tenant_of
from kvgrpc.errors import Exhausted, InvalidRequest, NotFound, PermissionDenied, PreconditionFailed, Reason
from tests.core.nodes import KEY, SECRET, Lead, access_id, claim, content, describe, grant, lists, snapshot

RED2 = of_tenant("red", "dns:other")
RED, BLUE, HOUSE = of_tenant("red", "dns:r"), of_tenant("blue", "dns:b"), "dns:h"
D = describe("d", 2)


@pytest.fixture
def lead() -> Lead:
    return Lead()


def open_as(lead: Lead, principal: str, token: bytes) -> object:
    """Opens a grant as a peer of that name, and returns the row of the answer."""
    opening = AccessOpening(access_id(), token, claim(32))
    call = lead.ask(lambda c: events.OpenAccess(c, "d", 2, (opening,)), principal)
    return lead.answer(call).rows[0]


def closed_as(
    lead: Lead, principal: str, token: bytes, outcome: CloseOutcome = CloseOutcome.CANCELLED
) -> tuple[bool, ...]:
    """Closes an access that never opened, as a peer of that name, and returns the rows of the answer."""
    row = events.AccessClosing(access_id(), outcome, quiesced=True, token=token)
    rows: tuple[bool, ...] = lead.call(lambda c: events.CloseAccess(c, "d", 2, (row,)), principal).rows
    return rows


def test_a_principal_has_its_tenant_and_its_name() -> None:
    assert (tenant_of(RED), name_of(RED)) == ("red", "dns:r")
    assert (tenant_of(HOUSE), name_of(HOUSE)) == ("", HOUSE)


def test_a_grant_opens_for_its_tenant_and_for_the_house_alone(lead: Lead) -> None:
    lead.admit(D)
    handed = lead.finish(tenant="red")
    assert read_claims(handed.token).tenant == "red"
    refused = open_as(lead, BLUE, handed.token)
    assert isinstance(refused, NotFound)
    assert refused.reason is Reason.LEASE_NOT_FOUND
    assert isinstance(open_as(lead, RED, handed.token), events.Opened)


def test_a_bound_grant_opens_for_its_consumer_alone(lead: Lead) -> None:
    lead.admit(D)
    handed = lead.finish(tenant="red", bound_to="dns:r")
    assert read_claims(handed.token).bound_to == "dns:r"
    refused = open_as(lead, RED2, handed.token)
    assert isinstance(refused, PermissionDenied)
    assert refused.reason is Reason.GRANT_BOUND
    assert isinstance(open_as(lead, RED, handed.token), events.Opened)


@pytest.mark.parametrize("outcome", [CloseOutcome.CANCELLED, CloseOutcome.DROPPED])
@pytest.mark.parametrize("principal", [BLUE, RED2], ids=["another tenant", "another consumer"])
def test_a_close_by_who_may_not_use_the_grant_leaves_its_lease_alone(
    lead: Lead, principal: str, outcome: CloseOutcome
) -> None:
    lead.admit(D)
    handed = lead.finish(tenant="red", bound_to="dns:r")
    before = snapshot(lead.node)
    assert closed_as(lead, principal, handed.token, outcome) == (False,)
    assert snapshot(lead.node) == before
    closed_as(lead, RED, handed.token, outcome)
    assert lead.state.send.leases.get(handed.lease.id).state is LeaseState.DONE


def test_a_close_by_another_tenant_leaves_a_reservation_alone() -> None:
    lead = limited()
    lead.admit(D)
    mine = allocated(lead, RED)
    blocks = lists(mine.blocks[0].tolist())
    reserved = lead.call(lambda c: ReserveBlocks(c, KEY, blocks, content(16), allocation_id=mine.allocation_id), RED)
    closed_as(lead, BLUE, reserved.token)
    assert not lead.transfer(reserved.transfer.id).over
    closed_as(lead, RED, reserved.token)
    assert lead.transfer(reserved.transfer.id).over


def test_a_bound_grant_renews_and_releases_for_its_consumer_and_for_the_owner_alone(lead: Lead) -> None:
    handed = lead.finish(tenant="red", bound_to="dns:r")
    ref = events.LeaseRef("", handed.token)
    renewed = lead.call(lambda c: RenewLeases(c, (ref,), 30.0), RED2)
    assert renewed.rows == ((0.0, Reason.GRANT_BOUND, None),)
    with pytest.raises(PermissionDenied, match="bound to another consumer"):
        lead.call(lambda c: events.ReleaseLease(c, ref), RED2)
    for principal in (RED, SCHEDULER):
        (row,) = lead.call(lambda c: RenewLeases(c, (ref,), 30.0), principal).rows
        assert row[2] is LeaseState.LIVE
    lead.call(lambda c: events.ReleaseLease(c, ref), RED)


def test_a_bound_grant_of_a_requests_time_reads_as_it_was_made() -> None:
    claims = Claims(
        AccessKind.READ, "p", 1, "p:1", "l", KEY, 30.0, 2, 32, tenant="red", request_time_us=7, bound_to="dns:r"
    )
    assert read_claims(mint(claims, SECRET)) == claims
    with pytest.raises(InvalidRequest):
        mint(Claims(AccessKind.READ, "p", 1, "p:1", "l", KEY, 30.0, 2, 32, bound_to="x" * 256), SECRET)


def test_a_caller_hands_over_for_its_own_tenant_alone() -> None:
    lead = Lead(describe(pool_kind=PoolKind.SERVER_MANAGED))
    with pytest.raises(InvalidRequest):
        lead.finish(principal=BLUE, tenant="red")
    with pytest.raises(InvalidRequest):
        lead.finish(principal=BLUE, tenant="red", transfer=False)


def test_leases_and_transfers_of_another_tenant_are_unknown(lead: Lead) -> None:
    handed = lead.finish(tenant="red")
    for ref in (events.LeaseRef(handed.lease.id), events.LeaseRef("", handed.token)):
        with pytest.raises(NotFound):
            lead.call(lambda c, ref=ref: events.ReleaseLease(c, ref), BLUE)  # type: ignore[misc]
    with pytest.raises(NotFound):
        lead.call(lambda c: events.CancelTransfer(c, handed.transfer.id), BLUE)
    renewed = lead.call(lambda c: RenewLeases(c, (events.LeaseRef(key=KEY),), 30.0), BLUE)
    assert renewed.rows == ((0.0, Reason.LEASE_NOT_FOUND, None),)
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(handed.lease.id)), RED)


def test_a_registration_of_another_tenant_finds_no_push_and_no_hand_over(lead: Lead) -> None:
    token = grant(D, access=AccessKind.WRITE, tenant="blue")
    with pytest.raises(NotFound):
        lead.call(lambda c: RegisterPush(c, token), RED)
    lead.finish(tenant="red", takes_registrations=True)
    mine = grant(D, access=AccessKind.WRITE)
    with pytest.raises(NotFound):
        lead.call(lambda c: RegisterPush(c, mine), BLUE)


def test_a_push_of_another_tenant_is_neither_found_nor_renewed(lead: Lead) -> None:
    token = grant(D, access=AccessKind.WRITE, tenant="red")
    registered = lead.call(lambda c: RegisterPush(c, token, "", access_id(), access_id(2)), RED)
    assert isinstance(registered, actions.Registered)
    other = grant(D, access=AccessKind.WRITE, lease_id="w-2")
    with pytest.raises(NotFound):
        lead.call(lambda c: RegisterPush(c, other), BLUE)
    renewed = lead.call(lambda c: RenewLeases(c, (events.LeaseRef(key=KEY),), 30.0), BLUE)
    assert renewed.rows == ((0.0, Reason.LEASE_NOT_FOUND, None),)
    again = lead.call(lambda c: RenewLeases(c, (events.LeaseRef(key=KEY),), 30.0), RED)
    assert again.rows[0][1] is None


@pytest.mark.parametrize("outcome", [CloseOutcome.CANCELLED, CloseOutcome.DROPPED])
@pytest.mark.parametrize("tenant", ["", "blue", "red"])
def test_a_close_by_another_tenant_leaves_a_push_alone(lead: Lead, tenant: str, outcome: CloseOutcome) -> None:
    lead.admit(D)
    token = grant(describe("e", 3), access=AccessKind.WRITE, tenant="red")
    lead.call(lambda c: RegisterPush(c, token, access_id=access_id(8), reverse_access_id=access_id(9)), RED)
    before = snapshot(lead.node)
    own = grant(D, access=AccessKind.WRITE, tenant=tenant, lease_id="w-2")
    assert closed_as(lead, BLUE, own, outcome) == (False,)
    assert snapshot(lead.node) == before


def test_a_close_before_a_push_refuses_its_parts_to_no_other_tenant(lead: Lead) -> None:
    lead.admit(D)
    for tenant in ("red", "blue"):
        closed_as(lead, BLUE, grant(D, access=AccessKind.WRITE, tenant=tenant))
    lead.state.tombstones.check_key(KEY, begins=False, tenant="red")
    for tenant in ("blue", ""):
        with pytest.raises(PreconditionFailed):
            lead.state.tombstones.check_key(KEY, begins=False, tenant=tenant)


def test_a_close_lifts_no_cancel_of_another_tenant(lead: Lead) -> None:
    lead.admit(D)
    lead.call(lambda c: events.CancelTransfer(c, key=KEY), RED)
    closed_as(lead, BLUE, grant(D, access=AccessKind.WRITE))
    with pytest.raises(PreconditionFailed):
        lead.call(lambda c: RegisterPush(c, grant(D, access=AccessKind.WRITE, lease_id="w-2")), RED)


def test_a_key_that_another_tenant_cancelled_takes_a_drop(lead: Lead) -> None:
    lead.admit(D)
    lead.call(lambda c: events.CancelTransfer(c, key=KEY), BLUE)
    closed_as(lead, RED, grant(D, access=AccessKind.WRITE), CloseOutcome.DROPPED)
    (transfer,) = lead.state.transfers.with_key(KEY)
    assert transfer.tenant == "red"


def test_a_tenant_cannot_use_up_the_share_of_all_callers() -> None:
    ledger = Ledger(Limits(kept_bytes=1_000, kept_bytes_per_caller=1_000))
    ledger.enter(RowKind.LEASE, "a", RED, 300)
    with pytest.raises(Exhausted, match="this tenant"):
        ledger.enter(RowKind.LEASE, "b", of_tenant("red", "dns:other"), 300)
    ledger.enter(RowKind.LEASE, "b", BLUE, 300)
    ledger.check_sums()
    assert ledger.by_tenant == {"red": 300, "blue": 300}
    ledger.drop(RowKind.LEASE, "a")
    assert ledger.by_tenant == {"blue": 300}
    ledger.check_sums()


def limited(**limits: int) -> Lead:
    """Returns a lead whose blocks callers may allocate, and of whose limits a tenant may have half."""
    return Lead(describe(pool_kind=PoolKind.SERVER_MANAGED), Limits(**limits))


def allocated(lead: Lead, principal: str) -> actions.Allocated:
    made = lead.call(lambda c: events.AllocateBlocks(c, ((0, 1),)), principal)
    assert isinstance(made, actions.Allocated)
    return made


def test_a_tenant_has_a_share_of_the_allocations_and_another_the_rest() -> None:
    lead = limited(allocations=4)
    first = allocated(lead, RED)
    allocated(lead, RED2)
    with pytest.raises(Exhausted, match="share of 4") as refused:
        allocated(lead, RED)
    assert refused.value.metadata["limit"] == "2"
    allocated(lead, BLUE)
    lead.call(lambda c: events.FreeBlocks(c, (), first.allocation_id), RED)
    allocated(lead, RED2)


def test_a_caller_of_the_house_has_no_share() -> None:
    lead = limited(allocations=4)
    for _ in range(4):
        allocated(lead, HOUSE)


@pytest.mark.parametrize(("limit", "kind"), [("leases", "leases"), ("transfers", "transfers")])
def test_a_tenant_has_a_share_of_leases_and_transfers(limit: str, kind: str) -> None:
    lead = limited(**{limit: 2})
    given = allocated(lead, RED), allocated(lead, RED2), allocated(lead, BLUE)

    def finish(which: int, principal: str) -> actions.HandedOver:
        blocks = [ids.tolist() for ids in given[which].blocks]
        made: actions.HandedOver = lead.finish(
            16, *blocks, key=bytes([which]) * 16, allocation_id=given[which].allocation_id, principal=principal
        )
        return made

    finish(0, RED)
    with pytest.raises(Exhausted, match=kind):
        finish(1, RED2)
    finish(2, BLUE)


def test_a_limit_of_one_leaves_a_tenant_one() -> None:
    assert Limits(tenant_share=0.1).of_tenant(3) == 1
