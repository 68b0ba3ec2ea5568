"""OpenAccess verifies everything before it returns a block id."""

from collections.abc import Callable

import pytest

from kvgrpc.core.actions import Expect
from kvgrpc.core.events import LeaseRef, Opened, ReleaseLease
from kvgrpc.core.tables.accesses import AccessOpening, AccessState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.content import ContentClaim
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.layout import GroupKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Reason
from tests.core.access.openings import opening, reason
from tests.core.nodes import Lead, access_id, claim, describe, grant, hybrid, key_of, refused, snapshot

D = describe("d", 2)
E = describe("e", 3)


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("p", 1))
    made.admit(D)
    made.admit(E)
    return made


def test_an_open_access_tells_blocks_time_and_how_much_the_content_covers(lead: Lead) -> None:
    made = lead.finish(40, (5, 6, 9), ttl_s=20.0)
    lead.tick(5.0)
    (row,) = lead.opened(D, opening(made.token, tokens=40, transfer_id="t-d"))
    assert isinstance(row, Opened)
    assert [(group, blocks.tolist()) for group, blocks in row.blocks] == [(0, [5, 6, 9])]
    assert (row.token_count, row.offer_tokens) == (40, 40)
    assert (row.remaining_s, row.ttl_s) == (15.0, 20.0)
    assert (row.transfer_id, row.lease_id, row.memory_generation) == (made.transfer.id, made.lease.id, 0)
    access = lead.state.access.rows[access_id()]
    assert access.state is AccessState.OPEN
    assert lead.state.pool.pins.has(access.owner, PinKind.ACCESS)
    assert lead.one(Expect) == Expect(access.owner, open=True)
    transfer = lead.transfer(made.transfer.id)
    assert (transfer.state, transfer.waiting_for) == (State.ACTIVE, "")
    assert (transfer.peer_engine_id, transfer.peer_transfer_id) == ("d", "t-d")
    assert [phase.name for phase in transfer.phases] == ["readers"]


def test_a_prefix_gets_the_blocks_that_hold_it_whole(lead: Lead) -> None:
    made = lead.finish(64, (5, 6, 7, 8))
    (row,) = lead.opened(D, opening(made.token, tokens=32))
    assert isinstance(row, Opened)
    assert [blocks.tolist() for _, blocks in row.blocks] == [[5, 6]]
    assert (row.token_count, row.offer_tokens) == (32, 64)
    pinned = lead.state.pool.pins.of_block(0, 7)
    assert [pin.kind for pin in pinned] == [PinKind.LEASE]


def test_a_block_that_straddles_the_prefix_moves_whole() -> None:
    lead = Lead(describe("p", 1, pool=hybrid()))
    d = describe("d", 2, pool=hybrid())
    lead.admit(d)
    made = lead.finish(64, (1, 2, 3, 4), (1, 2))
    (row,) = lead.opened(d, opening(made.token, tokens=48))
    assert isinstance(row, Opened)
    assert [blocks.tolist() for _, blocks in row.blocks] == [[1, 2, 3], [1, 2]]


def test_asking_again_gives_the_same_blocks_and_pins_nothing_more(lead: Lead) -> None:
    made = lead.finish()
    first = lead.opened(D, opening(made.token))
    pins = len(lead.state.pool.pins)
    again = lead.opened(D, opening(made.token))
    assert [b.tolist() for _, b in again[0].blocks] == [b.tolist() for _, b in first[0].blocks]
    assert len(lead.state.pool.pins) == pins
    assert lead.seen(Expect) == []


def test_every_row_is_answered_on_its_own(lead: Lead) -> None:
    made = lead.finish()
    rows = lead.opened(D, opening(b"rubbish", 1), opening(made.token, 2), opening(made.token, 3, claim=claim(32, 7)))
    assert reason(rows[0]) is Reason.GRANT_INVALID
    assert isinstance(rows[1], Opened)
    assert reason(rows[2]) is Reason.CONTENT_MISMATCH
    assert lead.opened(D) == ()


def test_the_same_access_twice_in_one_call_is_one_access(lead: Lead) -> None:
    made = lead.finish()
    rows = lead.opened(D, opening(made.token), opening(made.token))
    assert all(isinstance(row, Opened) for row in rows)
    assert len(lead.state.access.rows) == 1


def forged(token: bytes) -> bytes:
    return token[:-1] + bytes([token[-1] ^ 1])


REFUSED: dict[str, tuple[Callable[[Lead, bytes], AccessOpening], Reason]] = {
    "no grant": (lambda lead, token: opening(b""), Reason.GRANT_INVALID),
    "forged": (lambda lead, token: opening(forged(token)), Reason.GRANT_INVALID),
    "of another engine": (lambda lead, token: opening(grant(D)), Reason.GRANT_FOREIGN),
    "of another life": (lambda lead, token: opening(grant(describe("p", 9))), Reason.INCARNATION_CHANGED),
    "a WRITE grant": (lambda lead, token: opening(grant(lead.me, access=AccessKind.WRITE)), Reason.GRANT_WRONG_ACCESS),
    "no claim": (lambda lead, token: opening(token, claim=None), Reason.CONTENT_REQUIRED),
    "another form": (lambda lead, token: opening(token, claim=ContentClaim(32, opaque=b"x")), Reason.CONTENT_REQUIRED),
    "other tokens": (lambda lead, token: opening(token, claim=claim(32, first=1)), Reason.CONTENT_MISMATCH),
    "within a unit": (lambda lead, token: opening(token, claim=ContentClaim(17, b"d" * 32)), Reason.CONTENT_RANGE),
    "past the offer": (lambda lead, token: opening(token, claim=ContentClaim(48, b"d" * 32)), Reason.CONTENT_RANGE),
    "short id": (lambda lead, token: AccessOpening(b"short", token, claim(32)), Reason.INVALID_FIELD),
    "long id": (lambda lead, token: AccessOpening(b"x" * 17, token, claim(32)), Reason.INVALID_FIELD),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_row_leaves_nothing_behind(lead: Lead, name: str) -> None:
    make, expected = REFUSED[name]
    wanted = make(lead, lead.finish().token)
    before = snapshot(lead.node)
    assert reason(lead.opened(D, wanted)[0]) is expected
    assert snapshot(lead.node) == before


def test_an_ended_lease_is_refused_with_how_it_ended(lead: Lead) -> None:
    made = lead.finish(ttl_s=1.0)
    lead.tick(1.0)
    assert reason(lead.opened(D, opening(made.token))[0]) is Reason.LEASE_EXPIRED
    made = lead.finish()
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    assert reason(lead.opened(D, opening(made.token))[0]) is Reason.LEASE_RELEASED


def test_a_caller_without_a_handshake_is_told_to_shake_hands(lead: Lead) -> None:
    made = lead.finish()
    before = snapshot(lead.node)
    for stranger in (describe("x", 9), describe("d", 3)):
        call = lead.open(stranger, opening(made.token))
        with refused(Reason.NO_HANDSHAKE):
            lead.answer(call)
    assert snapshot(lead.node) == before


def test_an_access_id_belongs_to_one_consumer_grant_and_claim(lead: Lead) -> None:
    first, second = lead.finish(64, key=b"1" * 16), lead.finish(64, key=b"2" * 16)
    lead.opened(D, opening(first.token, tokens=32))
    before = snapshot(lead.node)
    assert reason(lead.opened(E, opening(first.token, tokens=32))[0]) is Reason.ACCESS_REUSED
    assert reason(lead.opened(D, opening(second.token, tokens=32))[0]) is Reason.ACCESS_REUSED
    assert reason(lead.opened(D, opening(first.token, tokens=48))[0]) is Reason.ACCESS_REUSED
    assert snapshot(lead.node) == before


def test_a_closed_access_is_not_opened_again(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    lead.opened(D, opening(made.token))
    lead.close(D)
    assert reason(lead.opened(D, opening(made.token))[0]) is Reason.ACCESS_CLOSED


def test_an_access_whose_lease_ended_is_refused_with_the_lease_s_end(lead: Lead) -> None:
    made = lead.finish(ttl_s=1.0)
    lead.opened(D, opening(made.token))
    lead.tick(1.0)
    assert reason(lead.opened(D, opening(made.token))[0]) is Reason.LEASE_EXPIRED
    assert lead.state.access.rows[access_id()].state is AccessState.STALE


def test_several_consumers_may_read_at_once(lead: Lead) -> None:
    made = lead.finish()
    lead.opened(D, opening(made.token, 1))
    lead.opened(E, opening(made.token, 2))
    lease = lead.state.send.leases.get(made.lease.id)
    assert lease.readers == {"d": 1, "e": 1}
    assert lead.state.peers.lives[key_of(D)].accesses == {access_id(1): None}


def test_states_stand_for_the_whole_offer() -> None:
    pool = hybrid(GroupKind.STATE)
    lead, d = Lead(describe("p", 1, pool=pool)), describe("d", 2, pool=pool)
    lead.admit(d)
    made = lead.finish(64, (1, 2, 3, 4), (7,))
    assert reason(lead.opened(d, opening(made.token, tokens=32))[0]) is Reason.CONTENT_RANGE
    (row,) = lead.opened(d, opening(made.token, tokens=64))
    assert isinstance(row, Opened)
    assert [blocks.tolist() for _, blocks in row.blocks] == [[1, 2, 3, 4], [7]]


def test_accesses_are_bounded() -> None:
    lead = Lead(describe("p", 1), Limits(accesses=1))
    lead.admit(D)
    made = lead.finish()
    rows = lead.opened(D, opening(made.token, 1), opening(made.token, 2))
    assert isinstance(rows[0], Opened)
    assert reason(rows[1]) is Reason.LIMIT_EXCEEDED


def test_accesses_of_one_peer_are_bounded_and_leave_room_for_others() -> None:
    lead = Lead(describe("p", 1), Limits(accesses_per_peer=1))
    lead.admit(D)
    other = describe("e", 3)
    lead.admit(other)
    made = lead.finish(consumers=2)
    rows = lead.opened(D, opening(made.token, 1), opening(made.token, 2))
    assert isinstance(rows[0], Opened)
    assert reason(rows[1]) is Reason.LIMIT_EXCEEDED
    (row,) = lead.opened(other, opening(made.token, 3))
    assert isinstance(row, Opened)
