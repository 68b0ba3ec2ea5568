"""Calls with `validate_only` change nothing, and answer without ids and grants."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import Acknowledged, PeerConnected, QuarantineReleased, Registered
from kvgrpc.core.events import LeaseRef, WaitsFor
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.errors import Reason
from tests.core.nodes import Lead, access_id, claim, describe, grant, key_of, lists, refused, snapshot
from tests.core.pairs import WRITING, Pair
from tests.core.pool.written import Written

D = describe("d", 2)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1))


@pytest.mark.parametrize("waits_for", WaitsFor)
def test_a_hand_over_shows_what_would_be_granted_without_ids(lead: Lead, waits_for: WaitsFor) -> None:
    before = snapshot(lead.node)
    found = lead.finish(waits_for=waits_for, validate_only=True, lease_id="l-mine")
    assert (found.lease.id, found.lease.transfer_id, found.transfer, found.token) == ("", "", None, b"")
    assert [ids.tolist() for ids in found.lease.blocks] == [[]]
    assert found.lease.last_ttl_s > 0
    assert snapshot(lead.node) == before


def register(lead: Lead, token: bytes, **fields: Any) -> Registered:
    answer = lead.call(lambda c: events.RegisterPush(c, token, "", access_id(1), access_id(2), **fields))
    assert isinstance(answer, Registered)
    return answer


def test_a_registration_shows_the_transfer_that_there_is(lead: Lead) -> None:
    token = grant(D, access=AccessKind.WRITE)
    before = snapshot(lead.node)
    assert register(lead, token, validate_only=True).transfer is None
    assert snapshot(lead.node) == before
    made = lead.finish(waits_for=WaitsFor.REGISTRATION)
    before = snapshot(lead.node)
    assert register(lead, token, validate_only=True).transfer == made.transfer
    assert snapshot(lead.node) == before
    register(lead, token)
    other = grant(describe("e", 3), access=AccessKind.WRITE)
    with refused(Reason.TRANSFER_EXISTS):
        register(lead, other, validate_only=True)


def test_leases_are_shown_as_they_are_and_not_renewed(lead: Lead) -> None:
    made = lead.finish(ttl_s=10.0)
    lead.tick(4.0)
    before = snapshot(lead.node)
    refs = (LeaseRef(made.lease.id), LeaseRef("l-none"))
    rows = lead.call(lambda c: events.RenewLeases(c, refs, 50.0, validate_only=True)).rows
    assert rows == ((6.0, None, LeaseState.LIVE), (0.0, Reason.LEASE_NOT_FOUND, None))
    assert snapshot(lead.node) == before


def would_free(lead: Lead, lease_id: str) -> list[int]:
    before = snapshot(lead.node)
    found = lead.call(lambda c: events.ReleaseLease(c, LeaseRef(lease_id), validate_only=True))
    assert found.lease.id == lease_id
    assert snapshot(lead.node) == before
    freed: list[int] = found.freed[0].tolist()
    return freed


def test_a_lease_tells_which_blocks_its_end_would_free(lead: Lead) -> None:
    lead.admit(D)
    made = lead.finish(48, (0, 1, 2))
    lead.opened(D, AccessOpening(access_id(), made.token, claim(32)))
    lead.finish(32, (2, 3), key=b"another key here")
    assert would_free(lead, made.lease.id) == [0, 1]
    freed = lead.call(lambda c: events.ReleaseLease(c, LeaseRef(made.lease.id))).freed
    assert freed[0].tolist() == [0, 1]
    assert would_free(lead, made.lease.id) == []


def test_blocks_that_our_own_postings_read_would_not_come_free() -> None:
    pair = Pair(WRITING)
    pair.register(pair.reserve(64).token)
    made = pair.finish(64, (0, 1), last=False)
    assert pair.posts
    pair.finish(64, (2,), last=False)
    assert would_free(pair.p, made.lease.id) == [2]
    pair.moved()
    assert pair.posts
    pair.moved()
    assert would_free(pair.p, made.lease.id) == [0, 1, 2]
    freed = pair.call(pair.p, lambda c: events.ReleaseLease(c, LeaseRef(made.lease.id))).freed
    assert freed[0].tolist() == [0, 1, 2]


def test_transfers_are_counted_and_not_acknowledged(lead: Lead) -> None:
    made = lead.finish(ttl_s=1.0)
    lead.tick(1.0)
    going_on = lead.finish(key=b"another key here")
    ids = (made.transfer.id, going_on.transfer.id, "t-none")
    before = snapshot(lead.node)
    assert lead.call(lambda c: events.AcknowledgeTransfers(c, ids, validate_only=True)) == Acknowledged(1)
    assert snapshot(lead.node) == before
    lead.call(lambda c: events.AcknowledgeTransfers(c, ids))
    assert lead.call(lambda c: events.AcknowledgeTransfers(c, ids, validate_only=True)) == Acknowledged(1)


def test_a_peer_that_is_not_connected_is_not_dialled(lead: Lead) -> None:
    before = snapshot(lead.node)
    ask = lambda c: events.ConnectPeer(c, D.address, validate_only=True)
    assert lead.call(ask) == PeerConnected("")
    assert snapshot(lead.node) == before
    number = lead.ask(lambda c: events.ConnectPeer(c, D.address))
    lead.connect(D)
    assert lead.answer(number) == lead.call(ask) == PeerConnected(key_of(D))
    with refused(Reason.WRONG_ENGINE):
        lead.call(lambda c: events.ConnectPeer(c, D.address, "x", validate_only=True))


def test_a_peer_without_an_address_is_refused(lead: Lead) -> None:
    with refused(Reason.INVALID_FIELD):
        lead.call(lambda c: events.ConnectPeer(c, "", validate_only=True))


def preview(lead: Written, **fields: Any) -> Any:
    before = snapshot(lead.node)
    call = lead.release(validate_only=True, **fields)
    assert snapshot(lead.node) == before
    return lead.answer(call)


def test_blocks_in_quarantine_that_would_be_asked_for_are_counted() -> None:
    lead = Written()
    assert preview(lead) == QuarantineReleased(0, 0, 0)
    lead.push(3, 4, number=10)
    lead.push(5, number=20)
    assert preview(lead) == preview(lead, force=True, why="its host is off") == QuarantineReleased(3, 0, 0)
    some = preview(lead, force=True, why="its host is off", transfer_ids=(lead.transfer_id,))
    assert some == QuarantineReleased(1, 2, 0)
    for reason, fields in (
        (Reason.INVALID_FIELD, {"force": True}),
        (Reason.INVALID_FIELD, {"transfer_ids": (lead.transfer_id,)}),
        (Reason.TRANSFER_NOT_FOUND, {"force": True, "why": "off", "transfer_ids": ("t-none",)}),
    ):
        with refused(reason):
            preview(lead, **fields)


def test_a_rekey_that_would_come_too_soon_is_refused() -> None:
    lead = Written()
    lead.push(3, 4)
    lead.release()
    assert preview(lead) == QuarantineReleased(2, 0, 0), "the one that goes on would do"
    lead.tick(30.0)
    lead.rekeyed(message="a peer may write on")
    with refused(Reason.QUARANTINED):
        preview(lead)


def test_a_pull_by_its_id_shows_the_transfer_as_it_is(lead: Lead) -> None:
    pull = lead.pull(grant(D))
    before = snapshot(lead.node)
    where = events.Destination(lists((0, 1)))
    found = lead.call(lambda c: events.GiveDestination(c, pull.id, where, validate_only=True))
    assert found.transfer.id == pull.id
    assert snapshot(lead.node) == before
