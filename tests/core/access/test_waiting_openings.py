"""An opening waits for its lease, a step or a silent peer, and every wait has a deadline."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import HandedOver
from kvgrpc.core.events import CloseOutcome, Opened, PeerAlive, PeerSilent, StepDone
from kvgrpc.core.tables.accesses import AccessState
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.content import ContentClaim
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import KVGrpcError, Reason
from tests.core.access.openings import opening, reason
from tests.core.nodes import Lead, access_id, content, describe, grant, key_of, refused, snapshot

D = describe("d", 2)
E = describe("e", 3)


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("p", 1))
    made.admit(D)
    made.admit(E)
    return made


def test_an_opening_waits_for_its_lease_to_be_announced(lead: Lead) -> None:
    token = grant(lead.me, lease_id="l-late")
    call = lead.open(D, opening(token))
    lead.tick(4.9)
    assert lead.answer(call) is None
    lead.finish(lease_id="l-late")
    assert isinstance(lead.answer(call).rows[0], Opened)
    lead.tick(0.2)
    assert lead.state.access.rows[access_id()].state is AccessState.OPEN


def test_a_lease_that_is_never_announced_is_not_found_after_five_seconds(lead: Lead) -> None:
    before = snapshot(lead.state.peers.lives)
    call = lead.open(D, opening(grant(lead.me, lease_id="l-never")))
    lead.finish(lease_id="l-other")
    assert lead.answer(call) is None
    lead.tick(5.0)
    assert reason(lead.answer(call).rows[0]) is Reason.LEASE_NOT_FOUND
    assert not lead.state.access.rows
    assert snapshot(lead.state.peers.lives) == before


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
    lead.feed(StepDone(0, 5))  # a late report of an earlier step
    lead.feed(StepDone(1, 8))
    assert isinstance(lead.answer(call).rows[0], Opened)


def test_waiting_for_a_step_ends_in_a_deadline_that_names_it(lead: Lead) -> None:
    call = lead.open(D, opening(lead.finish(after_step=7).token))
    lead.tick(5.0)
    row = lead.answer(call).rows[0]
    assert reason(row) is Reason.DEADLINE
    assert row.metadata == {"phase": "open/step"}


ENDS: dict[str, tuple[Callable[[Lead, HandedOver], Any], Reason]] = {
    "released": (lambda lead, made: lead.call(lambda c: release(c, made)), Reason.LEASE_RELEASED),
    "cancelled here": (lambda lead, made: lead.call(lambda c: cancel(c, made)), Reason.LEASE_RELEASED),
    "taken back": (lambda lead, made: lead.feed(events.LeasesVoided((made.lease.id,))), Reason.LEASE_VOIDED),
    "expired": (lambda lead, made: lead.tick(2.0), Reason.LEASE_EXPIRED),
    "read by another": (
        lambda lead, made: lead.close(E, 9, outcome=CloseOutcome.CANCELLED, token=made.token),
        Reason.LEASE_RELEASED,
    ),
}


def release(call: Call, made: HandedOver) -> events.ReleaseLease:
    return events.ReleaseLease(call, events.LeaseRef(made.lease.id))


def cancel(call: Call, made: HandedOver) -> events.CancelTransfer:
    assert made.transfer is not None
    return events.CancelTransfer(call, made.transfer.id, scope=events.CancelScope.THIS_SIDE)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_lease_refuses_the_openings_that_wait_on_it(lead: Lead, end: str, silent: bool) -> None:
    ends, why = ENDS[end]
    other = lead.open(D, opening(lead.finish(after_step=5, key=b"2" * 16).token, 7))
    made = lead.finish(after_step=0 if silent else 5, ttl_s=2.0)
    if silent:
        lead.feed(PeerSilent(key_of(D)))
    calls = [lead.open(D, opening(made.token, number)) for number in (1, 2)]
    ends(lead, made)
    assert [reason(lead.answer(call).rows[0]) for call in calls] == [why, why]
    assert lead.answer(other) is None
    assert list(lead.state.access.rows.keys() - {access_id(9)}) == [access_id(7)]


def test_a_dead_peer_that_ends_a_lease_leaves_none_of_its_openings_there(lead: Lead) -> None:
    made = lead.finish()
    lead.opened(D, opening(made.token, 1))
    lead.feed(PeerSilent(key_of(D)))
    lead.tick(Limits().peer_grace_s - 1.0)
    lead.open(D, opening(made.token, 2))
    lead.tick(1.0)
    assert lead.state.send.leases.get(made.lease.id).state is LeaseState.DONE
    assert access_id(2) not in lead.state.access.rows


def test_a_life_that_is_over_refuses_waiting_openings_as_lost(lead: Lead) -> None:
    call = lead.open(D, opening(lead.finish(after_step=5).token))
    lead.begin(describe("p", 2))
    with refused(Reason.ENGINE_LOST):
        raise lead.answer(call).rows[0]


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
    lead.ask(lambda c: events.HandshakeReceived(c, D, (lead.state.peers.lives[key_of(D)].endpoints)), principal="d")
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
    assert lead.state.access.rows[access_id()].waiting_for == "step"
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
    assert len(lead.state.access.rows) == 1


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
        lambda c: events.HandshakeReceived(c, describe("d", 7), lead.state.peers.lives[key_of(D)].endpoints),
        principal="d",
    )
    assert reason(lead.answer(call).rows[0]) is Reason.ACCESS_CLOSED
    assert lead.state.access.rows[access_id()].state is AccessState.CLOSED


def test_what_waits_is_found_without_looking_at_all_that_waits(lead: Lead) -> None:
    for number in range(1, 200):
        lead.open(D, opening(grant(lead.me, lease_id=f"l-{number}"), number))
    tried: list[bytes] = []

    openings = lead.node._served._openings
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
    assert isinstance(lead.opened(D, opening(opaque.token, 2, claim=ContentClaim(32, opaque=b"x")))[0], Opened)
    assert len(lead.seen(actions.Reply)) == 1


def test_the_openings_of_one_call_have_so_many_blocks_since_their_answer_is_one_message() -> None:
    lead = Lead(describe("p", 1), Limits(blocks_per_request=4))
    lead.admit(D)
    made = [lead.finish(32, (2 * i, 2 * i + 1), key=bytes([i] * 16)) for i in range(4)]
    rows = lead.opened(D, *(opening(one.token, number) for number, one in enumerate(made, 1)))
    expected = [Opened, Opened, Reason.LIMIT_EXCEEDED, Reason.LIMIT_EXCEEDED]
    assert [row.reason if isinstance(row, KVGrpcError) else Opened for row in rows] == expected
    assert [access_id(number) in lead.state.access.rows for number in range(1, 5)] == [True, True, False, False]
    assert all(isinstance(row, Opened) for row in lead.opened(D, opening(made[2].token, 3), opening(made[3].token, 4)))
