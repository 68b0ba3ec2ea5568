"""Rows that calls add are refused when there is no room, before anything is made, and go with what was made."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import BlocksReturnedNews, FailedNews
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.ledger import LedgerShare, RowKind
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE, PEER
from kvgrpc.errors import Exhausted, Reason
from tests.core.nodes import (
    Lead,
    access_id,
    claim,
    content,
    describe,
    full,
    grant,
    key_of,
    lists,
    refused,
    snapshot,
)

D = describe("d", 2)
LIMITS = Limits(kept_bytes=80_000, kept_bytes_per_caller=40_000, engine_kept_bytes=60_000)
CALLS: dict[str, dict[str, Any]] = {
    "one": {"principal": "anonymous", "connection": "ipv4:1"},
    "two": {"principal": "anonymous", "connection": "ipv4:2"},
    "three": {"principal": "anonymous", "connection": "ipv4:3"},
}


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def lead() -> Lead:
    made = describe("p", 1, pool=full(4_096), pool_kind=PoolKind.SERVER_MANAGED)
    lead = Lead(made, LIMITS)
    lead.begin(made, attached=False)
    return lead


@pytest.fixture
def engine() -> Lead:
    """Makes a lead without an attached engine, whose pool all callers share: one test has callers of every share."""
    made = describe("p", 1, pool=full(4_096))
    lead = Lead(made, LIMITS)
    lead.begin(made, attached=False)
    return lead


def hand_over(lead: Lead, number: int, call: dict[str, Any], **fields: Any) -> Any:
    return lead.call(lambda c: events.FinishedBlocks(c, key(number), lists((number,)), content(16), **fields), **call)


def release(lead: Lead, lease_id: str) -> None:
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(lease_id)), **CALLS["one"])


def cancel(lead: Lead, transfer_key: bytes) -> None:
    lead.call(lambda c: events.CancelTransfer(c, key=transfer_key), **CALLS["one"])


def free_all(lead: Lead, allocation_id: str) -> None:
    lead.call(lambda c: events.FreeBlocks(c, (), allocation_id), **CALLS["one"])


def fill(lead: Lead, call: dict[str, Any], first: int = 0) -> list[Any]:
    """Hands blocks over until there is no room, and returns the hand-overs."""
    made = []
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        for number in range(first, first + 100):
            made.append(hand_over(lead, number, call))
    assert made
    return made


def check_refused(lead: Lead, make: Any, **call: Any) -> None:
    before = snapshot(lead.state)
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        lead.call(make, **call)
    assert snapshot(lead.state) == before


def test_a_caller_that_has_its_part_is_refused_and_others_are_not(engine: Lead) -> None:
    fill(engine, CALLS["one"])
    assert engine.state.ledger.by_payer["ipv4:1"] <= LIMITS.kept_bytes_per_caller
    fill(engine, CALLS["two"], 200)
    with pytest.raises(Exhausted, match="all callers"):
        hand_over(engine, 400, CALLS["three"])
    hand_over(engine, 400, {"principal": ENGINE})


def test_what_ends_makes_room(engine: Lead) -> None:
    made = fill(engine, CALLS["one"])
    release(engine, made[0].lease.id)
    hand_over(engine, 300, CALLS["one"])
    engine.tick(40.0)
    assert engine.state.ledger.by_share[LedgerShare.CALLERS] == 0


def test_an_engine_that_is_full_hears_that_its_hand_over_failed(engine: Lead) -> None:
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        for number in range(100):
            hand_over(engine, number, {"principal": ENGINE}, lease_id=f"l-{number}")
    assert engine.state.tombstones.leases
    assert not any(isinstance(news, FailedNews | BlocksReturnedNews) for news in engine.news())


def test_every_call_that_keeps_something_is_refused(engine: Lead) -> None:
    made = engine.pull(grant(D, lease_id="l-x"), 32, number=77, principal="anonymous")
    fill(engine, CALLS["one"])
    fill(engine, CALLS["two"], 200)
    free = lists((1_000, 1_001))
    three = CALLS["three"]
    for make in (
        lambda c: events.ReserveBlocks(c, key(900), free, content(32)),
        lambda c: events.PullBlocks(c, grant(D, lease_id="l-y"), content(32), access_id(9)),
        lambda c: events.FinishedBlocks(
            c, key(901), free, content(32), last=False, waits_for=events.WaitsFor.REGISTRATION
        ),
        lambda c: events.RegisterPush(c, _write_grant(), "", access_id(20), access_id(21)),
    ):
        check_refused(engine, make, **three)
    many = lists(range(2_000, 3_500, 2))
    with refused(Reason.BLOCK_COUNT_MISMATCH):
        engine.call(lambda c: events.GiveDestination(c, made.id, events.Destination(many, 0)), **three)


def _write_grant() -> bytes:
    lead = Lead(D)
    made = lead.call(lambda c: events.ReserveBlocks(c, key(77), lists((1,)), content(16)))
    token: bytes = made.token
    return token


def test_allocations_are_weighed(lead: Lead) -> None:
    made = []
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        for _ in range(100):
            made.append(lead.call(lambda c: events.AllocateBlocks(c, ((0, 10),)), **CALLS["one"]))
    lead.call(lambda c: events.FreeBlocks(c, ((0, made[0].blocks[0][:3]),)), **CALLS["one"])
    for one in made:
        free_all(lead, one.allocation_id)
    assert not lead.state.ledger.by_kind[RowKind.ALLOCATION]


def test_keys_are_weighed_with_what_was_answered(engine: Lead) -> None:
    named = {**CALLS["one"], "method": "FinishedBlocks", "body": b"x"}
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        for number in range(100):
            hand_over(engine, number, {**named, "key": str(number)})
    assert engine.state.ledger.by_kind[RowKind.KEY]
    engine.tick(700.0)
    assert not engine.state.ledger.by_kind[RowKind.KEY]


def test_accesses_of_peers_have_a_share_of_their_own(engine: Lead) -> None:
    engine.admit(D)
    fill(engine, CALLS["one"])
    fill(engine, CALLS["two"], 200)
    made = hand_over(engine, 500, {"principal": ENGINE}, transfer=False)
    payer = PEER + key_of(D)
    count = 0
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        while count < 40:
            (row,) = engine.opened(D, AccessOpening(access_id(count + 1), made.token, claim(16)))
            if not isinstance(row, events.Opened):
                raise row
            count += 1
    assert count
    assert engine.state.ledger.by_payer[payer] <= LIMITS.kept_bytes_per_caller
    for number in range(1, 40):
        engine.close(D, number, token=made.token)
    engine.tick(700.0)
    assert payer not in engine.state.ledger.by_payer


def test_a_call_of_a_peer_that_waits_is_weighed(engine: Lead) -> None:
    engine.admit(D)
    engine.open(D, AccessOpening(access_id(1), grant(engine.me, lease_id="l-later"), claim(16)))
    assert engine.state.ledger.by_kind[RowKind.OPENING]
    engine.tick(6.0)
    assert not engine.state.ledger.by_kind[RowKind.OPENING]


def test_what_is_over_is_remembered_in_few_bytes() -> None:
    limits = Limits(remembered_bytes=40_000, ended_leases=1_000, transfer_history=1_000)
    lead = Lead(describe("p", 1, pool=full(4_096)), limits)
    lead.begin(lead.me, attached=False)
    lease_id = ""
    for number in range(60):
        lease_id = hand_over(lead, number, CALLS["one"]).lease.id
        release(lead, lease_id)
        cancel(lead, key(number + 100))
    by_kind = lead.state.ledger.by_kind
    for kind in (RowKind.ENDED_LEASE, RowKind.PAST_TRANSFER, RowKind.TOMBSTONE):
        assert 20_000 < by_kind[kind] <= 40_000, kind
    assert lead.state.send.leases.find(lease_id) is not None


def test_replies_of_every_kind_are_weighed(lead: Lead) -> None:
    made = lead.call(lambda c: events.AllocateBlocks(c, ((0, 4),)), **CALLS["one"], key="a", method="AllocateBlocks")
    labels = (("router", "r-1"),)
    lease = hand_over(lead, 0, CALLS["one"], labels=labels).lease
    calls: dict[str, Callable[[Call], events.Event]] = {
        "f": lambda c: events.FreeBlocks(c, lists(made.blocks[0][2:])),
        "r": lambda c: events.ReclaimBlocks(c, ((0, 1),)),
        "n": lambda c: events.RenewLeases(c, (events.LeaseRef(lease.id),)),
        "c": lambda c: events.CancelTransfer(c, key=key(50)),
        "e": lambda c: events.ReleaseLease(c, events.LeaseRef(lease.id)),
    }
    for key_, make in calls.items():
        before = lead.state.ledger.by_kind[RowKind.KEY]
        call = {**CALLS["one"], "key": key_, "method": key_, "body": b"x"}
        answer = lead.call(make, **call)
        assert lead.state.ledger.by_kind[RowKind.KEY] > before + 1_000
        assert lead.call(make, **call) is answer


def test_what_a_defect_ended_is_weighed_in_the_next_lives(engine: Lead) -> None:
    made = hand_over(engine, 0, {"principal": ENGINE})
    engine.call(lambda c: events.ReserveBlocks(c, key(900), lists((7, 8)), content(32)))
    engine.node, _ = engine.node.successor(5, engine.now)
    engine.node.check()
    assert engine.state.ledger.by_kind[RowKind.ENDED_LEASE]
    engine.begin(describe("p", 6, pool=full(4_096)))
    assert engine.state.send.leases.find(made.lease.id) is not None
    assert engine.state.ledger.by_kind[RowKind.ENDED_LEASE]
    assert engine.state.ledger.total
