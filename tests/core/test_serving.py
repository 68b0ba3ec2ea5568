"""Settling and closing at the issuer: a verdict is given once, and consumers are counted by identity."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.accesses import AccessState, Opening, Verdict
from kvgrpc.core.actions import BlocksReturned, Expect, Failed
from kvgrpc.core.events import (
    AccessAnswered,
    Closing,
    LeaseRef,
    Opened,
    PeerSilent,
    PostingEnded,
    ReleaseLease,
    SettleAnswered,
    Settling,
)
from kvgrpc.core.grants import OnAbort
from kvgrpc.core.leases import LeaseState
from kvgrpc.core.limits import Limits
from kvgrpc.core.lives import DEAD_KEPT
from kvgrpc.core.transfers import Disposition, State
from kvgrpc.errors import KVGrpcError, Reason
from tests.core.nodes import Lead, access_id, answer_of, claim, describe, grant, key_of, refused, snapshot

D = describe("d", 2)
E = describe("e", 3)


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("p", 1))
    made.admit(D)
    made.admit(E)
    return made


def opening(token: bytes, number: int = 1) -> Opening:
    return Opening(access_id(number), token, claim(32))


def opened(lead: Lead, token: bytes, number: int = 1, peer: Any = D) -> None:
    (row,) = lead.opened(peer, opening(token, number))
    assert isinstance(row, Opened)


def lease_state(lead: Lead, made: Any) -> LeaseState:
    state: LeaseState = lead.state.leases.get(made.lease.id).state
    return state


# -- settling


def test_a_valid_settle_ends_the_lease_when_its_consumer_was_the_last(lead: Lead) -> None:
    made = lead.finish(request_id="r")
    opened(lead, made.token)
    assert lead.settle(D, nbytes=32) == Verdict(True)
    assert lease_state(lead, made) is LeaseState.DONE
    transfer = lead.transfer(made.transfer.id)
    assert (transfer.state, transfer.memory, transfer.consumers_done) == (State.SUCCEEDED, Disposition.RETURNED, 1)
    assert transfer.failure is None
    assert [phase.end for phase in transfer.phases] == [lead.now]
    assert lead.news() == [BlocksReturned(transfer.id, "r", made.lease.id)]
    assert lead.one(Expect) == Expect(f"a-{access_id().hex()}", open=False)
    assert len(lead.state.pins) == 0


def test_a_settle_that_is_not_the_last_leaves_the_access_open(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token)
    assert lead.settle(D, last=False) == Verdict(True)
    assert lead.state.accesses[access_id()].state is AccessState.OPEN
    assert lead.settle(D) == Verdict(True)


def test_a_verdict_is_kept_and_given_again_when_its_reply_was_lost(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token)
    assert lead.settle(D) == Verdict(True)
    lead.tick(4.9)
    assert lead.settle(D) == Verdict(True)
    lead.tick(0.2)
    verdict = lead.settle(D)
    assert (verdict.valid, verdict.reason) == (False, Reason.ACCESS_NOT_FOUND), "no answer counts as failure"


def test_a_source_never_vouches_after_its_lease_ended(lead: Lead) -> None:
    made = lead.finish(ttl_s=5.0)
    opened(lead, made.token)
    lead.tick(4.0)
    assert lead.settle(D, last=False).valid
    lead.now += 1.0
    verdict = lead.settle(D)
    assert (verdict.valid, verdict.reason) == (False, Reason.LEASE_EXPIRED), "expiry fires before the settle"
    assert lead.settle(D) == verdict
    assert lead.transfer(made.transfer.id).state is State.FAILED


def test_a_stale_verdict_is_given_before_the_last_settle_and_stays(lead: Lead) -> None:
    made = lead.finish(ttl_s=5.0)
    opened(lead, made.token)
    lead.tick(5.0)
    verdict = lead.settle(D, last=False)
    assert not verdict.valid
    assert lead.state.accesses[access_id()].state is AccessState.STALE
    assert lead.settle(D) == verdict
    assert lead.state.accesses[access_id()].state is AccessState.CLOSED


def test_the_end_of_a_lease_drops_the_pins_of_its_readers_at_once(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token)
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    assert len(lead.state.pins) == 0
    assert lead.seen(Expect) == [], "reads may go on until the access is closed"
    assert lead.settle(D).reason is Reason.LEASE_RELEASED


def test_only_its_opener_settles_an_access(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token)
    before = snapshot(lead.node)
    assert lead.settle(E).reason is Reason.ACCESS_NOT_FOUND
    assert lead.settle(D, 9).reason is Reason.ACCESS_NOT_FOUND
    assert snapshot(lead.node) == before


def test_an_access_that_waits_cannot_be_settled(lead: Lead) -> None:
    lead.open(D, opening(lead.finish(after_step=5).token))
    assert lead.settle(D).reason is Reason.ACCESS_NOT_FOUND
    assert lead.state.accesses[access_id()].state is AccessState.WAITING


def test_settling_goes_on_while_the_peer_is_silent(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token)
    lead.feed(PeerSilent(key_of(D)))
    assert lead.settle(D).valid


def test_settling_what_was_closed_is_stale(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    opened(lead, made.token)
    assert lead.close(D)
    assert lead.settle(D).reason is Reason.ACCESS_CLOSED
    assert lead.settle(D).reason is Reason.ACCESS_CLOSED


def test_a_stranger_can_neither_settle_nor_close(lead: Lead) -> None:
    opened(lead, lead.finish().token)
    before = snapshot(lead.node)
    for call in (lead.settle, lead.close):
        with refused(Reason.NO_HANDSHAKE):
            call(describe("d", 9))
    assert snapshot(lead.node) == before


def test_bytes_of_readers_are_added_up_but_never_believed_beyond_what_there_was(lead: Lead) -> None:
    made = lead.finish(consumers=3)
    opened(lead, made.token, 1, D)
    opened(lead, made.token, 2, E)
    lead.settle(D, 1, nbytes=30)
    lead.settle(D, 1, nbytes=30)
    lead.settle(E, 2, nbytes=2**60)
    assert lead.transfer(made.transfer.id).nbytes_done == 30 + 32
    assert lead.state.bytes_sent == 62


def test_bytes_of_a_lease_without_a_transfer_count_too(lead: Lead) -> None:
    opened(lead, lead.finish(transfer=False, consumers=2).token)
    assert lead.settle(D, nbytes=30).valid
    assert lead.state.bytes_sent == 30


# -- consumers


def test_a_consumer_that_settles_twice_counts_once(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    for number in (1, 2):
        opened(lead, made.token, number)
        lead.settle(D, number)
    assert lease_state(lead, made) is LeaseState.LIVE
    assert lead.transfer(made.transfer.id).consumers_done == 1
    opened(lead, made.token, 3, E)
    lead.settle(E, 3)
    assert lease_state(lead, made) is LeaseState.DONE


def test_a_consumer_with_another_open_access_is_not_done(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token, 1)
    opened(lead, made.token, 2)
    assert lead.settle(D, 1).valid
    assert lease_state(lead, made) is LeaseState.LIVE
    assert lead.close(D, 2)
    assert lease_state(lead, made) is LeaseState.DONE, "what it received before still counts"
    assert lead.transfer(made.transfer.id).state is State.SUCCEEDED


def test_the_first_of_more_consumers_than_declared_end_the_lease(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token, 1, D)
    opened(lead, made.token, 2, E)
    assert lead.settle(E, 2).valid
    assert lead.settle(D, 1).reason is Reason.LEASE_RELEASED


def test_a_failed_consumer_does_not_count_and_another_may_try(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token, 1, D)
    assert lead.close(D, 1)
    assert not lead.close(D, 1)
    assert lease_state(lead, made) is LeaseState.LIVE
    opened(lead, made.token, 2, E)
    assert lead.settle(E, 2).valid
    assert lease_state(lead, made) is LeaseState.DONE


@pytest.mark.parametrize(("on_abort", "state"), [(OnAbort.RELEASE, LeaseState.DONE), (OnAbort.KEEP, LeaseState.LIVE)])
def test_what_a_dropped_consumer_means_is_the_grant_s_to_say(lead: Lead, on_abort: OnAbort, state: LeaseState) -> None:
    made = lead.finish(on_abort=on_abort)
    opened(lead, made.token)
    assert lead.close(D, dropped=True)
    assert lease_state(lead, made) is state


@pytest.mark.parametrize(("on_abort", "state"), [(OnAbort.RELEASE, LeaseState.DONE), (OnAbort.KEEP, LeaseState.LIVE)])
def test_what_the_death_of_a_consumer_means_too(lead: Lead, on_abort: OnAbort, state: LeaseState) -> None:
    made = lead.finish(on_abort=on_abort, ttl_s=60.0)
    opened(lead, made.token)
    lead.feed(PeerSilent(key_of(D)))
    lead.tick(9.9)
    assert lease_state(lead, made) is LeaseState.LIVE
    lead.tick(0.1)
    assert lease_state(lead, made) is state
    assert not lead.state.accesses[access_id()].held
    assert lead.one(Expect).open is False


def test_a_hand_over_that_every_consumer_dropped_is_cancelled(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    for number, peer in ((1, D), (2, E)):
        opened(lead, made.token, number, peer)
        lead.close(peer, number, dropped=True)
    transfer = lead.transfer(made.transfer.id)
    assert transfer.state is State.CANCELLED
    assert transfer.failure is not None
    assert transfer.failure.reason is Reason.CANCELLED
    (failed, _) = lead.news()
    assert isinstance(failed, Failed)
    assert failed.cancelled


def test_a_hand_over_that_one_consumer_received_succeeded(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    opened(lead, made.token, 1, D)
    opened(lead, made.token, 2, E)
    lead.settle(D, 1)
    lead.close(E, 2, dropped=True)
    assert lead.transfer(made.transfer.id).state is State.SUCCEEDED


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


def test_a_closing_that_overtakes_its_opening_leaves_a_tombstone(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    assert not lead.close(D, token=made.token)
    (row,) = lead.opened(D, Opening(access_id(), made.token, None))
    assert isinstance(row, KVGrpcError)
    assert row.reason is Reason.ACCESS_CLOSED
    (row,) = lead.opened(D, opening(made.token))
    assert isinstance(row, KVGrpcError)
    assert row.reason is Reason.ACCESS_CLOSED
    lead.tick(120.0)
    assert not lead.state.accesses


def test_a_drop_of_an_access_never_opened_reaches_its_lease(lead: Lead) -> None:
    made = lead.finish()
    assert not lead.close(D, dropped=True, token=made.token)
    assert lease_state(lead, made) is LeaseState.DONE


@pytest.mark.parametrize("wait", [False, True])
def test_a_drop_that_comes_before_its_lease_is_counted_when_the_lease_comes(lead: Lead, wait: bool) -> None:
    token = grant(lead.me, lease_id="l-late")
    if wait:
        lead.open(D, opening(token))
    assert not lead.close(D, dropped=True, token=token)
    lead.tick(60.0)
    made = lead.finish(lease_id="l-late", ttl_s=1.0)
    assert lease_state(lead, made) is LeaseState.DONE
    assert [type(news) for news in lead.news()] == [Failed, BlocksReturned]


def test_an_early_failure_leaves_the_lease_alone(lead: Lead) -> None:
    lead.close(D, token=grant(lead.me, lease_id="l-late"))
    assert lease_state(lead, lead.finish(lease_id="l-late")) is LeaseState.LIVE


def test_early_closings_are_forgotten_with_their_tombstones(lead: Lead) -> None:
    for number in (1, 2):
        lead.close(D, number, dropped=True, token=grant(lead.me, lease_id="l-late"))
        lead.tick(60.0)
    assert list(lead.state.accesses) == [access_id(2)]
    lead.tick(60.0)
    assert not lead.state.accesses
    assert not lead.node._serving._early
    assert lease_state(lead, lead.finish(lease_id="l-late")) is LeaseState.LIVE


@pytest.mark.parametrize(
    "closing",
    [
        Closing(b"short", True, True),
        Closing(access_id(), True, True, b"rubbish"),
        Closing(access_id(), True, True, grant(D)),
        Closing(access_id(), True, True, grant(describe("p", 7))),
    ],
    ids=["malformed id", "no grant", "foreign grant", "grant of another life"],
)
def test_a_closing_that_proves_nothing_leaves_nothing(lead: Lead, closing: Closing) -> None:
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
    assert list(lead.state.accesses) == [access_id(1)]


def test_tombstones_of_one_peer_are_bounded_and_make_room_when_they_are_forgotten() -> None:
    lead = Lead(describe("p", 1), Limits(closed_early_per_peer=1))
    lead.admit(D)
    token = lead.finish(consumers=9, ttl_s=600.0).token
    for number in (1, 2):
        lead.close(D, number, token=token)
    assert list(lead.state.accesses) == [access_id(1)]
    lead.tick(120.0)
    lead.admit(D)
    lead.close(D, 3, token=token)
    assert list(lead.state.accesses) == [access_id(3)]


def test_rows_are_answered_in_their_order(lead: Lead) -> None:
    made = lead.finish(consumers=5)
    opened(lead, made.token, 2)
    opened(lead, made.token, 3)
    rows = tuple(Settling(access_id(number), last=True) for number in (1, 2, 9))
    answer = lead.call(lambda c: events.SettleAccess(c, "d", 2, rows), principal="d")
    assert [row.valid for row in answer.rows] == [False, True, False]
    closings = tuple(Closing(access_id(number), False, True) for number in (3, 2, 9))
    answer = lead.call(lambda c: events.CloseAccess(c, "d", 2, closings), principal="d")
    assert answer.rows == (True, False, False)


def test_an_access_outlives_the_memory_of_how_its_lease_ended() -> None:
    lead = Lead(describe("p", 1), Limits(ended_leases=1))
    lead.admit(D)
    made = lead.finish(key=b"1" * 16)
    opened(lead, made.token)
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    other = lead.finish(key=b"2" * 16)
    lead.call(lambda c: ReleaseLease(c, LeaseRef(other.lease.id)))
    assert lead.state.leases.find(made.lease.id) is None
    assert lead.settle(D).reason is Reason.LEASE_RELEASED
    lead.tick(120.0)
    assert not lead.state.accesses
    assert not lead.node._serving._early


def test_an_access_outlives_the_memory_of_its_peer(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    lead.close(D, token=made.token)
    for incarnation in range(3, DEAD_KEPT + 5):
        lead.admit(describe("d", incarnation))
    assert key_of(D) not in lead.state.peers
    lead.tick(120.0)
    assert not lead.state.accesses


def test_the_accesses_that_are_open_with_a_peer_are_counted_either_way(lead: Lead) -> None:
    def counted() -> int:
        (peer,) = (peer for peer in lead.node.peers() if peer.engine_id == "d")
        return peer.open_accesses

    made = lead.finish(consumers=2)
    lead.open(D, Opening(access_id(9), grant(lead.me, lease_id="l-late"), claim(32)))
    assert counted() == 0, "it waits for its lease"
    opened(lead, made.token)
    assert counted() == 1
    lead.settle(D)
    assert counted() == 0, "the verdict is kept, the access is not open"
    pull = lead.pull(grant(D), 32, (10, 11), number=5)
    assert counted() == 0, "it is asked for"
    lead.feed(AccessAnswered(access_id(5), answer_of(D)))
    assert counted() == 1
    lead.feed(PostingEnded(f"{pull.id}/0", done=True, nbytes=32))
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
        assert not lead.close(D, dropped=True, token=made.token)
    assert not lead.state.accesses, "only its id is remembered"
    assert lead.state.leases.get(made.lease.id).done == 1
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
    lead.tick(599.0)
    assert lead.state.accesses[access_id()].state is AccessState.STALE
    lead.tick(1.0)
    assert lead.one(Expect) == Expect(f"a-{access_id().hex()}", open=False)
    assert lead.settle(D).reason is Reason.LEASE_EXPIRED
