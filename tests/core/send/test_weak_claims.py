"""Readers that wait for blocks of their own yield to older requests that need the blocks which they keep."""

from functools import partial
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.events import AllocateBlocks, CloseOutcome, LeaseRef, ReclaimBlocks, RenewLeases
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.lacking_requests import FORGOTTEN_S, KEPT, TOLD_EVERY_S
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.grants import read_claims
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.core.values.request_times import REQUEST_AGE_MAX_US, RequestTime
from kvgrpc.errors import Reason
from tests.core.nodes import Lead, access_id, claim, content, describe, full, grant, key_of, refused

D, E = describe("d", 2), describe("e", 3)
FIRM_S = Limits().firm_ttl_s
T0 = 1_000
OLD = RequestTime(T0, "old")


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("p", 1, pool=full(blocks=16)))
    made.admit(D)
    made.admit(E)
    return made


def hand_over(lead: Lead, number: int, *blocks: int, **fields: Any) -> Any:
    """Hands over for request `number`, which began `number` microseconds after the old one."""
    more = {"request_time_us": T0 + number, "request_id": f"r{number}", **fields}
    return lead.finish(16 * len(blocks), blocks, key=number.to_bytes(16, "big"), **more)


def opening(number: int, made: Any, **fields: Any) -> AccessOpening:
    tokens, name = made.lease.content.tokens, made.lease.request_id
    return AccessOpening(access_id(number), made.token, claim(tokens), request_id=name, waits_for_blocks=True, **fields)


def waits(lead: Lead, number: int, made: Any, who: Any = D, **fields: Any) -> None:
    """Lets a reader come that has no blocks to read into."""
    (row,) = lead.opened(who, opening(number, made, **fields))
    assert isinstance(row, events.Opened)


def full_of_readers(lead: Lead, *rows: tuple[int, ...]) -> list[Any]:
    """Hands over these blocks, oldest request first, each with a reader that has waited for a firm time."""
    made = [hand_over(lead, number, *blocks) for number, blocks in enumerate(rows, 1)]
    for number, some in enumerate(made, 1):
        waits(lead, number, some)
    lead.tick(FIRM_S)
    return made


def reclaim(lead: Lead, count: int, by: RequestTime | None = OLD) -> actions.Reclaimed:
    answer = lead.call(lambda c: ReclaimBlocks(c, ((0, count),), by=by))
    assert isinstance(answer, actions.Reclaimed)
    return answer


def ended(answer: actions.Reclaimed) -> list[str]:
    return [row.request_id for row in answer.leases]


def test_the_youngest_reader_that_waits_yields_first_and_no_more_than_are_needed(lead: Lead) -> None:
    full_of_readers(lead, (0, 1), (2, 3), (4, 5))
    answer = reclaim(lead, 3)
    assert (ended(answer), answer.claimed) == (["r3", "r2"], 2)
    assert answer.freed[0].tolist() == [2, 3, 4, 5]
    assert lead.state.pool.pins.free == [14]
    assert lead.state.send.soft_leases.reclaimed_claims == 2


def test_what_nobody_has_come_for_goes_first(lead: Lead) -> None:
    hand_over(lead, 9, 6, 7)
    full_of_readers(lead, (0, 1), (2, 3))
    assert ended(reclaim(lead, 2)) == ["r9"]
    assert ended(reclaim(lead, 2)) == ["r2"]


def test_where_that_is_not_enough_nobody_yields(lead: Lead) -> None:
    full_of_readers(lead, (0, 1), (2, 3))
    assert not reclaim(lead, 5).enough
    assert len(lead.state.send.leases) == 2


def test_nobody_yields_to_a_request_that_is_not_older(lead: Lead) -> None:
    (first, _) = full_of_readers(lead, (0, 1), (2, 3))
    assert not reclaim(lead, 1, None).enough
    assert not reclaim(lead, 1, RequestTime(T0 + 2, "r2")).enough
    assert ended(reclaim(lead, 1, RequestTime(T0 + 2, "r1"))) == ["r2"]
    assert not reclaim(lead, 1, RequestTime(T0 + 1, "r1")).enough
    assert lead.state.send.leases.get(first.lease.id).live


def test_nobody_yields_in_the_firm_time_of_the_hand_over(lead: Lead) -> None:
    made = hand_over(lead, 1, 0, 1, firm_ttl_s=2 * FIRM_S)
    waits(lead, 1, made)
    lead.tick(2 * FIRM_S - 0.01)
    assert not reclaim(lead, 1).enough
    lead.tick(0.01)
    assert reclaim(lead, 1).enough


def test_nobody_yields_within_the_default_firm_time_after_coming(lead: Lead) -> None:
    made = hand_over(lead, 1, 0, 1, firm_ttl_s=0.0)
    lead.tick(FIRM_S)
    waits(lead, 1, made)
    lead.tick(FIRM_S - 0.01)
    assert not reclaim(lead, 1).enough
    lead.tick(0.01)
    assert reclaim(lead, 1).enough


def test_a_reader_that_has_blocks_does_not_yield(lead: Lead) -> None:
    made = hand_over(lead, 1, 0, 1)
    lead.opened(D, AccessOpening(access_id(1), made.token, claim(32)))
    lead.tick(FIRM_S)
    assert not reclaim(lead, 1).enough


def test_a_reader_that_says_that_it_reads_by_now_does_not_yield(lead: Lead) -> None:
    (made,) = full_of_readers(lead, (0, 1))
    refs = (LeaseRef(token=made.token),)
    reading = (access_id(1), access_id(7))
    lead.call(lambda c: RenewLeases(c, refs, for_access=True, validate_only=True, reading=reading), "d")
    assert lead.state.access.rows[access_id(1)].waits_for_blocks
    lead.call(lambda c: RenewLeases(c, refs, for_access=True, reading=reading), "d")
    assert not reclaim(lead, 1).enough


def test_a_reader_that_asks_again_with_blocks_does_not_yield(lead: Lead) -> None:
    (made,) = full_of_readers(lead, (0, 1))
    lead.opened(D, AccessOpening(access_id(1), made.token, claim(32)))
    assert not reclaim(lead, 1).enough
    waits(lead, 1, made)
    assert not reclaim(lead, 1).enough


def test_of_several_readers_all_wait_and_all_are_younger_or_none_yields(lead: Lead) -> None:
    made = hand_over(lead, 5, 0, 1, consumers=2)
    waits(lead, 1, made, request_time_us=T0 + 9)
    waits(lead, 2, made, E, request_time_us=T0 + 7)
    lead.tick(FIRM_S)
    assert not reclaim(lead, 1, RequestTime(T0 + 8, "x")).enough
    lead.opened(E, AccessOpening(access_id(2), made.token, claim(32), request_time_us=T0 + 7))
    assert not reclaim(lead, 1).enough
    lead.close(E, 2, outcome=CloseOutcome.FAILED)
    answer = reclaim(lead, 1, RequestTime(T0 + 8, "x"))
    assert answer.freed[0].tolist() == [0, 1]


def test_a_reader_is_as_old_as_it_says_but_no_older_than_what_it_reads(lead: Lead) -> None:
    early, late = hand_over(lead, 10, 0, 1), hand_over(lead, 11, 2, 3)
    waits(lead, 1, early, request_time_us=1)
    waits(lead, 2, late, request_time_us=T0 + 50)
    lead.tick(FIRM_S)
    assert ended(reclaim(lead, 1, RequestTime(T0 + 40, "x"))) == ["r11"]
    assert not reclaim(lead, 1, RequestTime(T0 + 10, "x")).enough
    assert ended(reclaim(lead, 1, RequestTime(T0 + 9, "x"))) == ["r10"]


def test_what_renewals_alone_keep_yields(lead: Lead) -> None:
    made = hand_over(lead, 1, 0, 1)
    lead.call(lambda c: RenewLeases(c, (LeaseRef(token=made.token),), 600.0), "router")
    lead.tick(FIRM_S)
    assert not reclaim(lead, 1, None).enough
    assert ended(reclaim(lead, 1)) == ["r1"]


def test_what_is_not_opened_yet_or_has_no_time_does_not_yield(lead: Lead) -> None:
    stepping = hand_over(lead, 1, 0, 1, after_step=5, firm_ttl_s=0.0)
    lead.open(D, opening(1, stepping))
    timeless = hand_over(lead, 2, 2, 3, request_time_us=0)
    waits(lead, 2, timeless)
    lead.tick(FIRM_S)
    assert not reclaim(lead, 1).enough


def test_a_push_yields_to_nobody(lead: Lead) -> None:
    hand_over(lead, 1, 0, 1, waits_for=events.WaitsFor.REGISTRATION, last=False)
    lead.tick(FIRM_S)
    assert not reclaim(lead, 1).enough


def test_a_reader_that_has_lost_its_blocks_is_told_and_gets_no_verdict_but_stale(lead: Lead) -> None:
    (made,) = full_of_readers(lead, (0, 1))
    reclaim(lead, 1)
    closing = lead.one(actions.SendClose)
    assert (closing.peer, closing.closing.access_id) == (key_of(D), access_id(1))
    assert closing.closing.outcome is CloseOutcome.FAILED
    assert lead.state.send.leases.get(made.lease.id).state is LeaseState.RECLAIMED
    failure = lead.transfer(made.transfer.id).failure
    assert failure is not None
    assert failure.reason is Reason.LEASE_RECLAIMED
    assert "older request" in failure.message
    row = lead.call(lambda c: RenewLeases(c, (LeaseRef(token=made.token),), for_access=True), "d").rows[0]
    assert row[1] is Reason.LEASE_RECLAIMED
    verdict = lead.settle(D)
    assert (verdict.valid, verdict.reason) == (False, Reason.LEASE_RECLAIMED)


def test_who_waits_and_for_how_long_can_be_seen(lead: Lead) -> None:
    first, second = full_of_readers(lead, (0, 1), (2, 3))
    lead.opened(D, AccessOpening(access_id(1), first.token, claim(32)))
    ((lease, access),) = lead.node.weak_claims.waiting()
    assert (lease.id, access.consumer) == (second.lease.id, "d")


def test_an_allocation_reclaims_from_readers_that_wait_for_an_older_request() -> None:
    lead = Lead(describe("p", 1, pool=full(blocks=4), pool_kind=PoolKind.SERVER_MANAGED))
    lead.begin(lead.me, attached=False)
    lead.admit(D)
    taken = lead.call(lambda c: AllocateBlocks(c, ((0, 4),)))
    made = hand_over(lead, 1, *taken.blocks[0].tolist())
    lead.call(lambda c: events.FreeBlocks(c, allocation_id=taken.allocation_id))
    waits(lead, 1, made)
    lead.tick(FIRM_S)
    with refused(Reason.POOL_EXHAUSTED):
        lead.call(lambda c: AllocateBlocks(c, ((0, 2),), reclaim=True))
    younger = RequestTime(T0 + 5, "younger")
    for validate_only in (True, False):
        assert lead.state.send.lacking.rows(lead.now) == []
        with refused(Reason.POOL_EXHAUSTED):
            ask = partial(AllocateBlocks, counts=((0, 2),), reclaim=True, validate_only=validate_only, by=younger)
            lead.call(ask)
    assert [row.by for row in lead.state.send.lacking.rows(lead.now)] == [younger]
    got = lead.call(lambda c: AllocateBlocks(c, ((0, 2),), reclaim=True, by=OLD))
    assert len(got.blocks[0]) == 2
    assert lead.state.send.leases.get(made.lease.id).state is LeaseState.RECLAIMED


# ---- who waits for whom


def test_who_lacks_blocks_and_for_how_long_is_known_until_nobody_asks_any_more(lead: Lead) -> None:
    full_of_readers(lead, (0, 1))
    reclaim(lead, 5)
    lead.tick(1.0)
    reclaim(lead, 4)
    reclaim(lead, 3, RequestTime(T0 - 1, "older"))
    (older, old) = lead.state.send.lacking.rows(lead.now)
    assert (older.by.request_id, older.counts, lead.now - older.since) == ("older", {0: 3}, 0.0)
    assert (old.by, old.counts, lead.now - old.since) == (OLD, {0: 4}, 1.0)
    reclaim(lead, 1)
    assert [row.by.request_id for row in lead.state.send.lacking.rows(lead.now)] == ["older"]
    lead.tick(FORGOTTEN_S)
    assert lead.state.send.lacking.rows(lead.now) == []
    reclaim(lead, 3, RequestTime(T0 - 1, "older"))
    assert lead.state.send.lacking.rows(lead.now)[0].since == lead.now


def test_of_many_that_lack_blocks_those_are_known_that_asked_last(lead: Lead) -> None:
    for number in range(KEPT + 4):
        reclaim(lead, 1, RequestTime(T0 + number, "r"))
    assert [row.by.time_us - T0 for row in lead.state.send.lacking.rows(lead.now)] == [*range(4, KEPT + 4)]


def test_what_is_only_asked_for_a_look_or_for_no_request_is_not_known(lead: Lead) -> None:
    lead.call(lambda c: ReclaimBlocks(c, ((0, 1),), validate_only=True, by=OLD))
    reclaim(lead, 1, None)
    assert lead.state.send.lacking.rows(lead.now) == []


def test_who_waits_for_whom_is_told_once_a_second_at_most(lead: Lead) -> None:
    reclaim(lead, 5)
    assert lead.seen(actions.BlocksLacking) == []
    full_of_readers(lead, (0, 1), (2, 3), (4, 5), (6, 7))
    reclaim(lead, 16)
    told = lead.one(actions.BlocksLacking)
    assert (told.request_id, told.blocks, told.reader_count) == ("old", 16, 4)
    assert told.readers == (("d", "r1", 2), ("d", "r2", 2), ("d", "r3", 2))
    lead.tick(TOLD_EVERY_S - 0.01)
    reclaim(lead, 16)
    assert lead.seen(actions.BlocksLacking) == []
    lead.tick(0.01)
    reclaim(lead, 16)
    assert lead.one(actions.BlocksLacking)


# ---- what is said of times


def test_a_caller_that_invents_a_time_is_no_older_than_it_can_be() -> None:
    lead = Lead()
    lead.begin(lead.me, attached=False)
    lead.admit(D)
    wall_us = 2 * REQUEST_AGE_MAX_US
    call = {"wall_us": wall_us}
    early = lead.finish(32, [0, 1], key=bytes(16), request_time_us=7, principal="router", call=call)
    assert read_claims(early.token).request_time_us == wall_us - REQUEST_AGE_MAX_US
    own = lead.finish(32, [2, 3], key=bytes(15) + b"1", request_time_us=7, call=call)
    assert read_claims(own.token).request_time_us == 7
    waits(lead, 1, early)
    waits(lead, 2, own)
    lead.tick(FIRM_S)
    asking = RequestTime(1, "x")
    answer = lead.call(lambda c: ReclaimBlocks(c, ((0, 1),), by=asking), wall_us=wall_us)
    assert answer.claimed == 1


def test_a_pull_is_as_old_as_its_caller_can_say(lead: Lead) -> None:
    wall_us, token = 2 * REQUEST_AGE_MAX_US, grant(D, request_time_us=3)
    for number, (stated, principal, taken) in enumerate(
        ((0, "router", 3), (5, "router", wall_us - REQUEST_AGE_MAX_US), (5, ENGINE, 5))
    ):
        call = Call(90 + number, principal, wall_us=wall_us)
        ask = events.PullBlocks(call, token, content(32), access_id(40 + number), request_time_us=stated)
        lead.feed(ask)
        assert lead.one(actions.SendOpen).opening.request_time_us == taken
