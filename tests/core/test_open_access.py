"""OpenAccess: all is verified before a block id is said, and what cannot be answered yet waits, but not for ever."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.accesses import AccessState, Opening
from kvgrpc.core.actions import Expect
from kvgrpc.core.content import Claim
from kvgrpc.core.events import LeaseRef, Opened, PeerAlive, PeerSilent, ReleaseLease, StepDone
from kvgrpc.core.grants import Access
from kvgrpc.core.layout import GroupKind
from kvgrpc.core.limits import Limits
from kvgrpc.core.pins import PinKind
from kvgrpc.core.transfers import State
from kvgrpc.errors import KVGrpcError, Reason
from tests.core.nodes import (
    Lead,
    access_id,
    claim,
    content,
    describe,
    grant,
    hybrid,
    key_of,
    refused,
    snapshot,
)

D = describe("d", 2)
E = describe("e", 3)


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("p", 1))
    made.admit(D)
    made.admit(E)
    return made


def opening(token: bytes, number: int = 1, tokens: int = 32, **fields: Any) -> Opening:
    fields.setdefault("claim", claim(tokens))
    return Opening(access_id(number), token, **fields)


def reason(row: object) -> Reason:
    assert isinstance(row, KVGrpcError)
    return row.reason


def test_an_open_access_tells_blocks_time_and_how_much_the_content_covers(lead: Lead) -> None:
    made = lead.finish(40, (5, 6, 9), ttl_s=20.0)
    lead.tick(5.0)
    (row,) = lead.opened(D, opening(made.token, tokens=40, transfer_id="t-d"))
    assert isinstance(row, Opened)
    assert [(group, blocks.tolist()) for group, blocks in row.blocks] == [(0, [5, 6, 9])]
    assert (row.token_count, row.offer_tokens) == (40, 40)
    assert (row.remaining_s, row.ttl_s) == (15.0, 20.0)
    assert (row.transfer_id, row.lease_id, row.memory_generation) == (made.transfer.id, made.lease.id, 0)
    access = lead.state.accesses[access_id()]
    assert access.state is AccessState.OPEN
    assert lead.state.pins.has(access.owner, PinKind.ACCESS)
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
    pinned = lead.state.pins.of_block(0, 7)
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
    pins = len(lead.state.pins)
    again = lead.opened(D, opening(made.token))
    assert [b.tolist() for _, b in again[0].blocks] == [b.tolist() for _, b in first[0].blocks]
    assert len(lead.state.pins) == pins
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
    assert len(lead.state.accesses) == 1


def forged(token: bytes) -> bytes:
    return token[:-1] + bytes([token[-1] ^ 1])


REFUSED: dict[str, tuple[Callable[[Lead, bytes], Opening], Reason]] = {
    "no grant": (lambda lead, token: opening(b""), Reason.GRANT_INVALID),
    "forged": (lambda lead, token: opening(forged(token)), Reason.GRANT_INVALID),
    "of another engine": (lambda lead, token: opening(grant(D)), Reason.GRANT_FOREIGN),
    "of another life": (lambda lead, token: opening(grant(describe("p", 9))), Reason.INCARNATION_CHANGED),
    "a WRITE grant": (lambda lead, token: opening(grant(lead.me, access=Access.WRITE)), Reason.GRANT_WRONG_ACCESS),
    "no claim": (lambda lead, token: opening(token, claim=None), Reason.CONTENT_REQUIRED),
    "another form": (lambda lead, token: opening(token, claim=Claim(32, opaque=b"x")), Reason.CONTENT_REQUIRED),
    "other tokens": (lambda lead, token: opening(token, claim=claim(32, first=1)), Reason.CONTENT_MISMATCH),
    "within a unit": (lambda lead, token: opening(token, claim=Claim(17, b"d" * 32)), Reason.CONTENT_RANGE),
    "past the offer": (lambda lead, token: opening(token, claim=Claim(48, b"d" * 32)), Reason.CONTENT_RANGE),
    "short id": (lambda lead, token: Opening(b"short", token, claim(32)), Reason.INVALID_FIELD),
    "long id": (lambda lead, token: Opening(b"x" * 17, token, claim(32)), Reason.INVALID_FIELD),
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
    assert lead.state.accesses[access_id()].state is AccessState.STALE


def test_several_consumers_may_read_at_once(lead: Lead) -> None:
    made = lead.finish()
    lead.opened(D, opening(made.token, 1))
    lead.opened(E, opening(made.token, 2))
    lease = lead.state.leases.get(made.lease.id)
    assert lease.readers == {"d": 1, "e": 1}
    assert lead.state.peers[key_of(D)].accesses == {access_id(1): None}


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


# -- waiting


def test_an_opening_waits_for_its_lease_to_be_announced(lead: Lead) -> None:
    token = grant(lead.me, lease_id="l-late")
    call = lead.open(D, opening(token))
    lead.tick(4.9)
    assert lead.answer(call) is None
    lead.finish(lease_id="l-late")
    assert isinstance(lead.answer(call).rows[0], Opened)
    lead.tick(0.2)
    assert lead.state.accesses[access_id()].state is AccessState.OPEN


def test_a_lease_that_is_never_announced_is_not_found_after_five_seconds(lead: Lead) -> None:
    before = snapshot(lead.state.peers)
    call = lead.open(D, opening(grant(lead.me, lease_id="l-never")))
    lead.finish(lease_id="l-other")
    assert lead.answer(call) is None
    lead.tick(5.0)
    assert reason(lead.answer(call).rows[0]) is Reason.LEASE_NOT_FOUND
    assert not lead.state.accesses
    assert snapshot(lead.state.peers) == before


def test_an_opening_waits_for_the_step_that_writes_the_blocks(lead: Lead) -> None:
    made = lead.finish(after_step=7)
    call = lead.open(D, opening(made.token))
    lead.feed(StepDone(0, 6))
    assert lead.answer(call) is None
    lead.feed(StepDone(0, 7))
    assert isinstance(lead.answer(call).rows[0], Opened)


def test_a_step_is_over_when_every_rank_has_reported_it() -> None:
    lead, d = Lead(describe("p", 1, world_size=2)), describe("d", 2, world_size=2)
    lead.admit(d)
    call = lead.open(d, opening(lead.finish(after_step=7).token))
    for rank, step in ((0, 9), (1, 6)):
        lead.feed(StepDone(rank, step))
        assert lead.answer(call) is None
    lead.feed(StepDone(0, 5))  # late news of an earlier step
    lead.feed(StepDone(1, 8))
    assert isinstance(lead.answer(call).rows[0], Opened)


def test_waiting_for_a_step_ends_in_a_deadline_that_names_it(lead: Lead) -> None:
    call = lead.open(D, opening(lead.finish(after_step=7).token))
    lead.tick(5.0)
    row = lead.answer(call).rows[0]
    assert reason(row) is Reason.DEADLINE
    assert row.metadata == {"phase": "open/step"}


def test_an_opening_of_a_silent_peer_waits_until_it_is_heard_again(lead: Lead) -> None:
    made = lead.finish()
    lead.feed(PeerSilent(key_of(D)))
    call = lead.open(D, opening(made.token))
    assert lead.answer(call) is None
    lead.feed(PeerAlive(key_of(E)))
    assert lead.answer(call) is None
    lead.feed(PeerAlive(key_of(D)))
    assert isinstance(lead.answer(call).rows[0], Opened)


def test_a_handshake_is_being_heard_too(lead: Lead) -> None:
    made = lead.finish()
    lead.feed(PeerSilent(key_of(D)))
    call = lead.open(D, opening(made.token))
    lead.ask(lambda c: events.HandshakeReceived(c, D, (lead.state.peers[key_of(D)].endpoints)), principal="d")
    assert isinstance(lead.answer(call).rows[0], Opened)


def test_waiting_for_a_silent_peer_ends_too(lead: Lead) -> None:
    made = lead.finish()
    lead.feed(PeerSilent(key_of(D)))
    call = lead.open(D, opening(made.token))
    lead.tick(5.0)
    row = lead.answer(call).rows[0]
    assert (reason(row), row.metadata) == (Reason.DEADLINE, {"phase": "open/liveness"})


def test_an_access_that_is_open_is_told_again_even_while_its_peer_is_silent(lead: Lead) -> None:
    made = lead.finish()
    lead.opened(D, opening(made.token))
    lead.feed(PeerSilent(key_of(D)))
    assert isinstance(lead.opened(D, opening(made.token))[0], Opened)


def test_one_wait_follows_another_within_one_deadline(lead: Lead) -> None:
    call = lead.open(D, opening(grant(lead.me, lease_id="l-late")))
    lead.tick(3.0)
    lead.finish(lease_id="l-late", after_step=7)
    assert lead.answer(call) is None
    assert lead.state.accesses[access_id()].waiting_for == "step"
    lead.tick(2.0)
    assert reason(lead.answer(call).rows[0]) is Reason.DEADLINE


def test_a_lease_that_ends_while_its_step_runs_ends_the_wait_with_the_step(lead: Lead) -> None:
    made = lead.finish(after_step=7, ttl_s=1.0)
    call = lead.open(D, opening(made.token))
    lead.tick(1.0)
    lead.feed(StepDone(0, 7))
    assert reason(lead.answer(call).rows[0]) is Reason.LEASE_EXPIRED


def test_asking_again_while_it_waits_joins_the_wait(lead: Lead) -> None:
    token = grant(lead.me, lease_id="l-late")
    calls = [lead.open(D, opening(token)), lead.open(D, opening(token), opening(b"", 2))]
    lead.finish(lease_id="l-late")
    assert isinstance(lead.answer(calls[0]).rows[0], Opened)
    rows = lead.answer(calls[1]).rows
    assert isinstance(rows[0], Opened)
    assert reason(rows[1]) is Reason.GRANT_INVALID
    assert len(lead.state.accesses) == 1


def test_several_accesses_wait_for_one_lease(lead: Lead) -> None:
    token = grant(lead.me, lease_id="l-late")
    calls = [lead.open(peer, opening(token, number)) for number, peer in ((1, D), (2, E), (3, D))]
    lead.close(D, 1)
    assert lead.answer(calls[1]) is None
    lead.finish(lease_id="l-late", consumers=5)
    assert isinstance(lead.answer(calls[1]).rows[0], Opened)
    assert isinstance(lead.answer(calls[2]).rows[0], Opened)


def test_a_call_is_answered_when_its_last_row_is(lead: Lead) -> None:
    made = lead.finish(after_step=2)
    call = lead.open(D, opening(made.token, 1), opening(grant(lead.me, lease_id="l-late"), 2))
    lead.feed(StepDone(0, 2))
    assert lead.answer(call) is None
    lead.tick(5.0)
    rows = lead.answer(call).rows
    assert isinstance(rows[0], Opened)
    assert reason(rows[1]) is Reason.LEASE_NOT_FOUND


def test_a_peer_that_dies_while_it_waits_is_answered_and_forgotten(lead: Lead) -> None:
    call = lead.open(D, opening(lead.finish(after_step=2, consumers=2).token))
    lead.feed(PeerSilent(key_of(D)))
    lead.tick(4.0)
    lead.ask(
        lambda c: events.HandshakeReceived(c, describe("d", 7), lead.state.peers[key_of(D)].endpoints), principal="d"
    )
    assert reason(lead.answer(call).rows[0]) is Reason.ACCESS_CLOSED
    assert lead.state.accesses[access_id()].state is AccessState.CLOSED


def test_what_waits_is_found_without_looking_at_all_that_waits(lead: Lead) -> None:
    for number in range(1, 200):
        lead.open(D, opening(grant(lead.me, lease_id=f"l-{number}"), number))
    tried: list[bytes] = []

    openings = lead.node._serving._openings
    original = openings._try

    def seen(access: Any) -> None:
        tried.append(access.id)
        original(access)

    openings._try = seen  # type: ignore[method-assign]
    lead.finish(lease_id="l-7")
    lead.feed(StepDone(0, 1))
    lead.feed(PeerAlive(key_of(D)))
    assert tried == [access_id(7)]


def test_openings_of_the_other_content_form_match_whole(lead: Lead) -> None:
    made = lead.finish(32, content=content(32))
    opaque = lead.finish(32, key=b"2" * 16, content=type(content(32))(32, opaque=b"x"))
    assert isinstance(lead.opened(D, opening(made.token))[0], Opened)
    assert isinstance(lead.opened(D, opening(opaque.token, 2, claim=Claim(32, opaque=b"x")))[0], Opened)
    assert len(lead.seen(actions.Reply)) == 1


def test_the_openings_of_one_call_have_so_many_blocks_since_their_answer_is_one_message() -> None:
    lead = Lead(describe("p", 1), Limits(blocks_per_request=4))
    lead.admit(D)
    made = [lead.finish(32, (2 * i, 2 * i + 1), key=bytes([i] * 16)) for i in range(4)]
    rows = lead.opened(D, *(opening(one.token, number) for number, one in enumerate(made, 1)))
    assert [row.reason if isinstance(row, KVGrpcError) else Opened for row in rows] == [
        Opened, Opened, Reason.LIMIT_EXCEEDED, Reason.LIMIT_EXCEEDED
    ]  # fmt: skip
    assert [access_id(number) in lead.state.accesses for number in range(1, 5)] == [True, True, False, False]
    assert all(isinstance(row, Opened) for row in lead.opened(D, opening(made[2].token, 3), opening(made[3].token, 4)))
