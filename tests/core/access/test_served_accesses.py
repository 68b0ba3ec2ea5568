"""Settling at the issuer: a verdict is given once, and consumers are counted by engine id."""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core.actions import BlocksReturnedNews, Expect, FailedNews
from kvgrpc.core.events import CloseOutcome, HandshakeReceived, LeaseRef, PeerSilent, ReleaseLease, RenewLeases
from kvgrpc.core.tables.accesses import AccessState, Verdict
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.errors import Reason
from tests.core.access.opened_accesses import D, E, lease_state, opened, opening
from tests.core.nodes import Lead, access_id, describe, endpoints, key_of, refused, snapshot
from tests.core.send.lent_blocks import release


@pytest.fixture
def lead() -> Lead:
    made = Lead(describe("p", 1))
    made.admit(D)
    made.admit(E)
    return made


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
    assert lead.news() == [BlocksReturnedNews(transfer.id, "r", made.lease.id)]
    assert lead.one(Expect) == Expect(f"a-{access_id().hex()}", open=False)
    assert len(lead.state.pool.pins) == 0


def test_a_peer_that_shakes_hands_again_may_read_by_another_data_path_than_it_said(lead: Lead) -> None:
    made = lead.finish()
    lead.opened(D, replace(opening(made.token), data_paths=("cma",)))
    lead.ask(lambda c: HandshakeReceived(c, D, endpoints(D)), principal="peer")
    assert [(action.open, action.paths) for action in lead.seen(Expect)] == [(False, ("cma",)), (True, ())]


def test_a_settle_that_is_not_the_last_leaves_the_access_open(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token)
    assert lead.settle(D, last=False) == Verdict(True)
    assert lead.state.access.rows[access_id()].state is AccessState.OPEN
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
    assert lead.state.access.rows[access_id()].state is AccessState.STALE
    assert lead.settle(D) == verdict
    assert lead.state.access.rows[access_id()].state is AccessState.CLOSED


def test_the_end_of_a_lease_drops_the_pins_of_its_readers_at_once(lead: Lead) -> None:
    made = lead.finish()
    opened(lead, made.token)
    lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))
    assert len(lead.state.pool.pins) == 0
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
    assert lead.state.access.rows[access_id()].state is AccessState.WAITING


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
    assert lead.state.moves.bytes_sent == 62


def test_bytes_of_a_lease_without_a_transfer_count_too(lead: Lead) -> None:
    opened(lead, lead.finish(transfer=False, consumers=2).token)
    assert lead.settle(D, nbytes=30).valid
    assert lead.state.moves.bytes_sent == 30


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
    assert lead.close(D, outcome=CloseOutcome.DROPPED)
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
    assert not lead.state.access.rows[access_id()].held
    assert lead.one(Expect).open is False


def test_a_hand_over_that_every_consumer_dropped_is_cancelled(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    for number, peer in ((1, D), (2, E)):
        opened(lead, made.token, number, peer)
        lead.close(peer, number, outcome=CloseOutcome.DROPPED)
    transfer = lead.transfer(made.transfer.id)
    assert transfer.state is State.CANCELLED
    assert transfer.failure is not None
    assert transfer.failure.reason is Reason.CANCELLED
    (failed, _) = lead.news()
    assert isinstance(failed, FailedNews)
    assert failed.cancelled


def test_a_hand_over_that_one_consumer_received_succeeded(lead: Lead) -> None:
    made = lead.finish(consumers=2)
    opened(lead, made.token, 1, D)
    opened(lead, made.token, 2, E)
    lead.settle(D, 1)
    lead.close(E, 2, outcome=CloseOutcome.DROPPED)
    assert lead.transfer(made.transfer.id).state is State.SUCCEEDED


def standing_for(lead: Lead, *others: Any) -> Any:
    """Hands over two blocks under a lease that stands for the leases of others, one block each."""
    return lead.finish(32, key=b"together".ljust(16), stands_for=tuple(made.lease.id for made in others))


def test_what_is_read_under_a_lease_is_read_under_those_that_it_stands_for(lead: Lead) -> None:
    made = [lead.finish(16, [i], key=bytes([i] * 16)) for i in range(2)]
    together = standing_for(lead, *made)
    opened(lead, together.token)
    lead.settle(D, nbytes=32)
    for each in (together, *made):
        assert lease_state(lead, each) is LeaseState.DONE
        transfer = lead.transfer(each.transfer.id)
        assert (transfer.state, transfer.consumers_done, transfer.nbytes_done) == (State.SUCCEEDED, 1, transfer.nbytes)
    assert len(lead.state.pool.pins) == 0


@pytest.mark.parametrize("outcome", [CloseOutcome.FAILED, CloseOutcome.DROPPED, CloseOutcome.CANCELLED])
def test_what_is_not_read_under_a_lease_is_still_there_under_those_that_it_stands_for(
    lead: Lead, outcome: CloseOutcome
) -> None:
    made = lead.finish(16, [0])
    together = standing_for(lead, made)
    opened(lead, together.token)
    lead.close(D, outcome=outcome)
    release(lead, lease_id=together.lease.id)
    assert lease_state(lead, made) is LeaseState.LIVE
    assert lead.transfer(made.transfer.id).state is State.PENDING


def test_a_lease_lasts_as_long_as_one_that_stands_for_it(lead: Lead) -> None:
    made = lead.finish(16, [0], ttl_s=1.0)
    together = standing_for(lead, made)
    opened(lead, together.token)
    lead.tick(25.0)
    lead.call(lambda c: RenewLeases(c, (LeaseRef(together.lease.id),), None))
    lead.tick(25.0)
    lead.settle(D, nbytes=32)
    assert lease_state(lead, made) is LeaseState.DONE
    assert lead.transfer(made.transfer.id).state is State.SUCCEEDED


def test_a_lease_lasts_no_longer_than_its_cap_though_another_one_stands_for_it(lead: Lead) -> None:
    made = lead.finish(16, [0])
    cap_s = made.times.cap_remaining_s
    lead.tick(20.0)
    renew = RenewLeases
    lead.call(lambda c: renew(c, (LeaseRef(made.lease.id),), cap_s))
    together = standing_for(lead, made)
    lead.call(lambda c: renew(c, (LeaseRef(together.lease.id),), cap_s))
    lead.tick(cap_s - 20.0)
    assert (lease_state(lead, together), lease_state(lead, made)) == (LeaseState.LIVE, LeaseState.EXPIRED)


def test_a_lease_that_others_stood_for_and_that_is_over_stays_as_it_ended(lead: Lead) -> None:
    made = lead.finish(16, [0])
    together = standing_for(lead, made)
    opened(lead, together.token)
    release(lead, lease_id=made.lease.id)
    lead.settle(D, nbytes=32)
    assert (lease_state(lead, together), lease_state(lead, made)) == (LeaseState.DONE, LeaseState.RELEASED)
