"""A node that raised is replaced by one that keeps only the ends of what was under way."""

from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.leases import LeaseState, ended_error
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import SCHEDULER
from kvgrpc.errors import NextStep, PreconditionFailed, Reason, Unavailable
from tests.core.nodes import KEY, SECRET, Lead, access_id, claim, content, describe, grant, key_of, lists, refused
from tests.core.pairs import WRITING, Pair

P, D = describe("p", 1), describe("d", 2)
OTHER = b"key of another one"


@pytest.fixture
def lead() -> Lead:
    return Lead(P)


def after_a_defect(lead: Lead, incarnation: int = 7) -> tuple[Lead, list[Any]]:
    """Replaces the lead's node by its successor, and returns the lead with what ended."""
    node, ended = lead.node.successor(incarnation, lead.now)
    lead.node = node
    return lead, ended


def reason(lead: Lead, transfer_id: str) -> Reason | None:
    """Returns the reason why a transfer failed."""
    failure = lead.transfer(transfer_id).failure
    return failure.reason if failure else None


def begin(lead: Lead) -> None:
    """Begins the next life with an engine."""
    lead.begin(describe("p", 9), attached=False)


def test_what_was_under_way_has_failed_and_says_so(lead: Lead) -> None:
    offered = lead.finish().transfer
    pulled = lead.pull(grant(D, key=OTHER), 32, (8, 9))
    before = lead.state.transfers.seq
    lead, ended = after_a_defect(lead)
    assert [transfer.id for transfer in ended] == [offered.id, pulled.id]
    for transfer in ended:
        assert lead.transfer(transfer.id) is transfer
        assert (transfer.state, transfer.memory) == (State.FAILED, Disposition.QUARANTINED)
        failure = transfer.failure
        assert failure is not None
        assert (failure.reason, failure.next) == (Reason.INTERNAL_DEFECT, NextStep.RECOMPUTE)
        assert transfer.ended == lead.now
        assert not transfer.waiting_for
    assert [transfer.failure.phase for transfer in ended] == ["", "handshake"]
    assert ended[1].phases[-1].end == lead.now
    assert lead.state.transfers.changes_after(before) == ended
    assert lead.state.transfers.counts[State.FAILED] == 2
    assert sum(lead.state.transfers.counts.values()) == 2


def test_what_was_over_stays_as_it_was(lead: Lead) -> None:
    lead.finish(ttl_s=1.0, principal=SCHEDULER)
    lead.finish(key=OTHER, ttl_s=1.0)
    lead.tick(1.0)
    before = {transfer.id: transfer for transfer in lead.state.transfers}
    assert [reason(lead, id_) for id_ in before] == [Reason.LEASE_EXPIRED] * 2
    lead, ended = after_a_defect(lead)
    assert not ended
    assert {transfer.id: transfer for transfer in lead.state.transfers} == before
    assert not lead.state.transfers.live, "nobody is left who acknowledges it"


def test_its_leases_are_lost_and_their_blocks_are_free(lead: Lead) -> None:
    lease = lead.finish().lease
    lead, _ = after_a_defect(lead)
    begin(lead)
    found = lead.state.send.leases.get(lease.id)
    assert (found.state, found.blocks, len(lead.state.send.leases), len(lead.state.pool.pins)) == (
        LeaseState.LOST,
        (),
        0,
        0,
    )
    assert ended_error(found).reason is Reason.INTERNAL_DEFECT
    row = lead.call(lambda c: events.RenewLeases(c, (events.LeaseRef(lease.id),))).rows[0]
    assert row[1] is Reason.INTERNAL_DEFECT, row
    released = lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(lease.id)))
    assert (released.lease.state, released.freed) == (LeaseState.LOST, ())


def test_as_many_lost_leases_are_remembered_as_of_any_end() -> None:
    lead = Lead(P, Limits(ended_leases=1))
    lead.finish()
    last = lead.finish(key=OTHER).lease
    lead, _ = after_a_defect(lead)
    assert [lease.id for lease in lead.state.send.leases._ended.values()] == [last.id]


def test_nothing_of_the_last_life_is_vouched_for(lead: Lead) -> None:
    token = lead.finish().token
    lead.admit(D)
    opening = AccessOpening(access_id(), token, claim(32))
    assert isinstance(lead.opened(D, opening)[0], events.Opened)
    lead, _ = after_a_defect(lead)
    with refused(Reason.INTERNAL_DEFECT, Unavailable):
        lead.finish(key=OTHER, blocks=lists((1, 2)))
    with refused(Reason.NO_HANDSHAKE, PreconditionFailed):
        lead.settle(D)
    begin(lead)
    with refused(Reason.NO_HANDSHAKE, PreconditionFailed):
        lead.settle(D)
    lead.admit(D)
    assert lead.opened(D, opening)[0].reason is Reason.INCARNATION_CHANGED
    assert lead.finish(key=KEY).transfer.id not in {t.id for t in lead.state.transfers.with_key(OTHER)}


def test_the_next_life_with_an_engine_tells_of_it_and_the_one_after_that_does_not(lead: Lead) -> None:
    transfer = lead.finish().transfer
    lead, _ = after_a_defect(lead)
    assert lead.state.life.defect
    lead.begin(None)
    assert lead.state.life.defect
    begin(lead)
    assert not lead.state.life.defect
    assert reason(lead, transfer.id) is Reason.INTERNAL_DEFECT
    assert lead.finish(key=OTHER).transfer.id.startswith(f"t-{9:016x}-")
    lead.begin(describe("p", 10))
    assert lead.state.transfers.find(transfer.id) is None


def test_memory_comes_back_when_it_is_proved_to_be_gone(lead: Lead) -> None:
    transfer = lead.finish().transfer
    lead, _ = after_a_defect(lead)
    begin(lead)
    assert lead.transfer(transfer.id).memory is Disposition.QUARANTINED
    assert not lead.state.transfers.quarantined
    answer = lead.call(events.ReleaseQuarantine)
    assert (answer.left, lead.state.pool.rekeying) == (0, ""), "what is of no life that goes on needs no re-key"
    lead.feed(events.MemoryGone())
    assert lead.one(actions.TransferChanged).transfer.memory is Disposition.RETURNED
    assert lead.transfer(transfer.id).settled
    assert not lead.state.transfers.live
    assert lead.feed(events.MemoryGone()) == []


def test_what_was_in_quarantine_stays_there_until_its_memory_is_gone(lead: Lead) -> None:
    transfer = lead.pull(grant(D), 32, (8, 9))
    lead.state.transfers.change(transfer.id, state=State.FAILED, memory=Disposition.QUARANTINED)
    assert lead.state.transfers.quarantined
    before = lead.transfer(transfer.id)
    lead, ended = after_a_defect(lead)
    assert not ended
    assert lead.transfer(transfer.id) == before
    lead.feed(events.MemoryGone())
    assert lead.transfer(transfer.id).settled


def test_what_closes_its_pushes_gives_their_destinations_back_their_blocks() -> None:
    pair = Pair(WRITING)
    assert not pair.p.node.unclosed()
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    (send,) = pair.p.node.unclosed()
    me = pair.p.me
    assert (send.peer, send.incarnation, send.proves) == (key_of(pair.d.me), me.incarnation, True)
    pair.d.call(lambda c: events.CloseAccess(c, me.engine_id, send.incarnation, (send.closing,)))
    received = pair.both()[1]
    assert (received.state, received.memory) == (State.FAILED, Disposition.RETURNED)
    assert not len(pair.d.state.pool.pins)


def test_one_defect_after_the_other_changes_no_end(lead: Lead) -> None:
    first = lead.finish().transfer
    lead, _ = after_a_defect(lead)
    before = lead.transfer(first.id)
    lead, ended = after_a_defect(lead, 8)
    assert (ended, lead.transfer(first.id)) == ([], before)
    begin(lead)
    second = lead.finish().transfer
    lead, ended = after_a_defect(lead, 11)
    assert [transfer.id for transfer in ended] == [second.id]
    assert lead.feed(events.MemoryGone())
    assert all(transfer.settled for transfer in lead.state.transfers)


def test_a_server_that_drains_goes_on_draining(lead: Lead) -> None:
    lead.state.life.draining = True
    lead, _ = after_a_defect(lead)
    assert lead.state.life.draining


class Raises(Node):
    """A node that raises half way through a step."""

    def _make_handlers(self) -> Any:
        def step_done(_: events.StepDone) -> None:
            self.state.send.leases._live.clear()
            self.state.access.rows.clear()
            raise RuntimeError("planted")

        return super()._make_handlers() | {events.StepDone: (step_done,)}


class Refuses(Node):
    """A node that raises a refusal where no call may hear it."""

    def _make_handlers(self) -> Any:
        def step_done(_: events.StepDone) -> None:
            raise PreconditionFailed(Reason.DRAINING, "planted")

        return super()._make_handlers() | {events.StepDone: (step_done,)}


def test_a_refusal_that_no_call_can_hear_is_a_defect() -> None:
    lead = Lead(P)
    lead.node = Refuses()
    lead.begin(P)
    with pytest.raises(PreconditionFailed, match="planted"):
        lead.node.handle(events.StepDone(0, 1), lead.now)


def test_what_was_decided_before_it_raised_is_there_with_the_deadlines_of_others() -> None:
    lead = Lead(P)
    lead.node = Raises()
    lead.begin(P)
    expires = lead.finish(ttl_s=1.0).transfer
    lives = lead.finish(key=OTHER, content=content(32), blocks=lists((5, 6))).transfer
    lead.now += 1.0
    with pytest.raises(RuntimeError, match="planted"):
        lead.node.handle(events.StepDone(0, 1), lead.now)
    told = [a.news for a in lead.state.actions if isinstance(a, actions.TellEngine)]
    assert [type(news) for news in told] == [actions.FailedNews, actions.BlocksReturnedNews]
    lead, ended = after_a_defect(lead)
    assert isinstance(lead.node, Raises)
    assert [transfer.id for transfer in ended] == [lives.id]
    assert reason(lead, expires.id) is Reason.LEASE_EXPIRED
    lead.feed(events.LifeBegan(9, SECRET, describe("p", 9), False))
    lead.finish()
