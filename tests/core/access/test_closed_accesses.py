"""Closing at the issuer: a close may arrive before its opening, and some state outlives an access."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import BlocksReturnedNews, Expect, FailedNews
from kvgrpc.core.events import (
    AccessAnswered,
    AccessClosing,
    AccessSettling,
    CloseOutcome,
    LeaseRef,
    PostingEnded,
    ReleaseLease,
    SettleAnswered,
)
from kvgrpc.core.peers.liveness import DEAD_KEPT
from kvgrpc.core.tables.accesses import AccessOpening, AccessState, Verdict
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import KVGrpcError, Reason
from tests.core.access.opened_accesses import D, E, lease_state, opened, opening
from tests.core.nodes import Lead, access_id, answer_of, claim, describe, grant, key_of, snapshot


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("p", 1))
    made.admit(D)
    made.admit(E)
    return made


# -- closing


def test_only_its_opener_closes_an_access(lead: Lead) -> None:
    opened(lead, lead.finish().token)
    before = snapshot(lead.node)
    assert not lead.close(E)
    assert snapshot(lead.node) == before


def test_closing_a_waiting_access_refuses_its_opening(lead: Lead) -> None:
    call = lead.open(D, opening(lead.finish(after_step=5).token))
    assert not lead.close(D), "it was never open"
    (row,) = lead.answer(call).rows
    assert isinstance(row, KVGrpcError)
    assert row.reason is Reason.ACCESS_CLOSED
    (late,) = lead.opened(D, opening(lead.finish(key=b"2" * 16).token))
    assert isinstance(late, KVGrpcError)


def test_a_close_that_overtakes_its_opening_leaves_a_tombstone(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    assert not lead.close(D, token=made.token)
    (row,) = lead.opened(D, AccessOpening(access_id(), made.token, None))
    assert isinstance(row, KVGrpcError)
    assert row.reason is Reason.ACCESS_CLOSED
    (row,) = lead.opened(D, opening(made.token))
    assert isinstance(row, KVGrpcError)
    assert row.reason is Reason.ACCESS_CLOSED
    lead.tick(120.0)
    assert not lead.state.access.rows


def test_a_drop_of_an_access_never_opened_reaches_its_lease(lead: Lead) -> None:
    made = lead.finish()
    assert not lead.close(D, outcome=CloseOutcome.DROPPED, token=made.token)
    assert lease_state(lead, made) is LeaseState.DONE


@pytest.mark.parametrize("wait", [False, True])
def test_a_drop_that_comes_before_its_lease_is_counted_when_the_lease_comes(lead: Lead, wait: bool) -> None:
    token = grant(lead.me, lease_id="l-late")
    if wait:
        lead.open(D, opening(token))
    assert not lead.close(D, outcome=CloseOutcome.DROPPED, token=token)
    lead.tick(60.0)
    made = lead.finish(lease_id="l-late", ttl_s=1.0)
    assert lease_state(lead, made) is LeaseState.DONE
    assert [type(news) for news in lead.news()] == [FailedNews, BlocksReturnedNews]


def test_an_early_failure_leaves_the_lease_alone(lead: Lead) -> None:
    lead.close(D, token=grant(lead.me, lease_id="l-late"))
    assert lease_state(lead, lead.finish(lease_id="l-late")) is LeaseState.LIVE


def test_early_closes_are_forgotten_with_their_tombstones(lead: Lead) -> None:
    for number in (1, 2):
        lead.close(D, number, outcome=CloseOutcome.DROPPED, token=grant(lead.me, lease_id="l-late"))
        lead.tick(60.0)
    assert list(lead.state.access.rows) == [access_id(2)]
    lead.tick(60.0)
    assert not lead.state.access.rows
    assert not lead.node.state.access.openings.early
    assert lease_state(lead, lead.finish(lease_id="l-late")) is LeaseState.LIVE


@pytest.mark.parametrize(
    "closing",
    [
        AccessClosing(b"short", CloseOutcome.DROPPED, True),
        AccessClosing(access_id(), CloseOutcome.DROPPED, True, b"rubbish"),
        AccessClosing(access_id(), CloseOutcome.DROPPED, True, grant(D)),
        AccessClosing(access_id(), CloseOutcome.DROPPED, True, grant(describe("p", 7))),
    ],
    ids=["malformed id", "no grant", "foreign grant", "grant of another life"],
)
def test_a_close_that_proves_nothing_leaves_nothing(lead: Lead, closing: AccessClosing) -> None:
    lead.finish()
    before = snapshot(lead.node)
    answer = lead.call(lambda c: events.CloseAccess(c, "d", 2, (closing,)), principal="d")
    assert answer.rows == (False,)
    assert snapshot(lead.node) == before


def test_tombstones_are_bounded() -> None:
    lead = Lead(describe("p", 1), Limits(accesses=1))
    lead.admit(D)
    token = lead.finish(consumers=9).token
    for number in (1, 2):
        lead.close(D, number, token=token)
    assert list(lead.state.access.rows) == [access_id(1)]


def test_tombstones_of_one_peer_are_bounded_and_make_room_when_they_are_forgotten() -> None:
    lead = Lead(describe("p", 1), Limits(closed_early_per_peer=1))
    lead.admit(D)
    token = lead.finish(consumers=9, ttl_s=600.0).token
    for number in (1, 2):
        lead.close(D, number, token=token)
    assert list(lead.state.access.rows) == [access_id(1)]
    lead.tick(120.0)
    lead.admit(D)
    lead.close(D, 3, token=token)
    assert list(lead.state.access.rows) == [access_id(3)]


def test_rows_are_answered_in_their_order(lead: Lead) -> None:
    made = lead.finish(consumers=5)
    opened(lead, made.token, 2)
    opened(lead, made.token, 3)
    rows = tuple(AccessSettling(access_id(number), last=True) for number in (1, 2, 9))
    answer = lead.call(lambda c: events.SettleAccess(c, "d", 2, rows), principal="d")
    assert [row.valid for row in answer.rows] == [False, True, False]
    closings = tuple(AccessClosing(access_id(number), CloseOutcome.FAILED, True) for number in (3, 2, 9))
    answer = lead.call(lambda c: events.CloseAccess(c, "d", 2, closings), principal="d")
    assert answer.rows == (True, False, False)


def test_an_access_lasts_longer_than_the_record_of_how_its_lease_ended() -> None:
    lead = Lead(describe("p", 1), Limits(ended_leases=1))
    lead.admit(D)
    made = lead.finish(key=b"1" * 16)
    opened(lead, made.token)
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    other = lead.finish(key=b"2" * 16)
    lead.call(lambda c: ReleaseLease(c, LeaseRef(other.lease.id)))
    assert lead.state.send.leases.find(made.lease.id) is None
    assert lead.settle(D).reason is Reason.LEASE_RELEASED
    lead.tick(120.0)
    assert not lead.state.access.rows
    assert not lead.node.state.access.openings.early


def test_an_access_lasts_longer_than_the_record_of_its_peer(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    lead.close(D, token=made.token)
    for incarnation in range(3, DEAD_KEPT + 5):
        lead.admit(describe("d", incarnation))
    assert key_of(D) not in lead.state.peers.lives
    lead.tick(120.0)
    assert not lead.state.access.rows


def test_the_accesses_that_are_open_with_a_peer_are_counted_either_way(lead: Lead) -> None:
    def counted() -> int:
        return lead.node.open_accesses(lead.state.peers.lives[key_of(D)])

    made = lead.finish(consumers=2)
    lead.open(D, AccessOpening(access_id(9), grant(lead.me, lease_id="l-late"), claim(32)))
    assert counted() == 0, "it waits for its lease"
    opened(lead, made.token)
    assert counted() == 1
    lead.settle(D)
    assert counted() == 0, "the verdict is kept, the access is not open"
    pull = lead.pull(grant(D), 32, (10, 11), number=5)
    assert counted() == 0, "it is asked for"
    lead.feed(AccessAnswered(access_id(5), answer_of(D)))
    assert counted() == 1
    lead.feed(PostingEnded(f"{pull.id}/0.0", done=True, nbytes=32))
    assert counted() == 1, "it is settled only when the source said so"
    lead.feed(SettleAnswered(access_id(5), Verdict(True)))
    assert counted() == 0


# -- messages that were long under way


def test_a_message_of_an_access_that_is_over_does_not_open_it_again(lead: Lead) -> None:
    made = lead.finish(consumers=2, ttl_s=300.0)
    opened(lead, made.token)
    assert lead.settle(D).valid
    for _ in range(4):
        lead.tick(29.0)
        (row,) = lead.opened(D, opening(made.token))
        assert isinstance(row, KVGrpcError)
        assert row.reason is Reason.ACCESS_CLOSED
        assert not lead.close(D, outcome=CloseOutcome.DROPPED, token=made.token)
    assert not lead.state.access.rows, "only its id is remembered"
    assert lead.state.send.leases.get(made.lease.id).done == 1
    lead.tick(120.0)
    lead.tick(120.0)
    assert len(lead.state.timers) == 0


def test_ids_of_accesses_that_are_over_are_bounded() -> None:
    lead = Lead(describe("p", 1), Limits(accesses=3))
    lead.admit(D)
    made = lead.finish(consumers=9, ttl_s=300.0)
    for number in range(1, 9):
        opened(lead, made.token, number)
        lead.settle(D, number)
        lead.tick(5.0)
    again = [lead.opened(D, opening(made.token, number))[0] for number in (3, 6, 7, 8)]
    assert [isinstance(row, KVGrpcError) for row in again] == [False, True, True, True]


def test_a_reader_that_never_closes_is_closed_in_the_end(lead: Lead) -> None:
    made = lead.finish(ttl_s=5.0)
    opened(lead, made.token)
    lead.tick(5.0)
    lead.tick(Limits().lease_cap_s - 1.0)
    assert lead.state.access.rows[access_id()].state is AccessState.STALE
    lead.tick(1.0)
    assert lead.one(Expect) == Expect(f"a-{access_id().hex()}", open=False)
    assert lead.settle(D).reason is Reason.LEASE_EXPIRED
