"""The node as a whole: deadlines before events, one answer for every call, acknowledging, draining, and new lives."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import Acknowledged, Cancelled, Expect, Refuse, Reply, TellEngine, TransferChanged
from kvgrpc.core.events import (
    AcknowledgeTransfers,
    AllocateBlocks,
    CancelTransfer,
    ConnectPeer,
    Event,
    LeaseRef,
    ReleaseLease,
    StepDone,
    Tick,
)
from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.transfers import Disposition, State
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.errors import Aborted, PreconditionFailed, Reason, Unavailable
from tests.core.nodes import (
    KEY,
    SECRET,
    Lead,
    access_id,
    claim,
    content,
    describe,
    grant,
    lists,
    refused,
    snapshot,
)
from tests.core.shown import showing

D = describe("d", 2)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1))


def cancel(lead: Lead, **which: Any) -> Cancelled:
    answer = lead.call(lambda c: CancelTransfer(c, **which))
    assert isinstance(answer, Cancelled)
    return answer


def test_every_event_has_a_handler() -> None:
    kinds = set(Event.__args__)
    assert set(Node()._handlers) == kinds


def test_a_node_without_a_life_refuses_work() -> None:
    node = Node()
    (refusal,) = node.handle(ConnectPeer(events.Call(1, "router"), "p:1"), 1.0)
    assert isinstance(refusal, Refuse)
    assert refusal.error.reason is Reason.NO_POOL
    assert node.next_deadline() is None


def test_tables_say_how_many_rows_of_each_index_are_left(lead: Lead) -> None:
    state = lead.node.state
    assert not any({**state.moves.left(), **state.send.pushes.left(), **state.moves.turns.left()}.values())
    token = grant(describe("new", 1), access=AccessKind.WRITE)
    lead.ask(lambda c: events.RegisterPush(c, token, "", access_id(1), access_id(2)))
    (push,) = state.send.pushes
    assert state.moves.left() == dict.fromkeys(state.moves.left(), 0) | {"by_name": 1, "by_access": 1, "by_address": 1}
    assert state.send.pushes.left() == dict.fromkeys(state.send.pushes.left(), 1)
    assert state.send.pushes.find(push.transfer_id) is push


def test_a_lease_is_found_by_its_id_and_seen_as_it_is_now(lead: Lead) -> None:
    lease_id = lead.finish(ttl_s=5.0).lease.id
    lead.tick(2.0)
    found = lead.node.find_lease(LeaseRef(lease_id))
    times = lead.node.lease_times(found)
    assert (found.id, times.remaining_s, times.age_s) == (lease_id, 3.0, 2.0)


def test_time_never_goes_back(lead: Lead) -> None:
    with pytest.raises(AssertionError):
        lead.node.handle(Tick(), lead.now - 1.0)


def test_deadlines_fire_in_their_order_at_their_times_before_the_event(lead: Lead) -> None:
    first = lead.finish(ttl_s=5.0, key=b"1" * 16).transfer
    second = lead.finish(ttl_s=3.0, key=b"2" * 16).transfer
    third = lead.finish(ttl_s=9.0, key=b"3" * 16).transfer
    lead.feed(StepDone(0, 1), 7.0)
    ends = [action.transfer for action in lead.seen(TransferChanged)]
    assert [(t.id, t.ended) for t in ends] == [(second.id, 103.0), (first.id, 105.0)]
    assert not lead.transfer(third.id).over
    assert lead.state.now == 107.0


def test_the_same_events_at_the_same_times_give_the_same_actions() -> None:
    def story() -> list[Any]:
        lead = Lead(describe("p", 1))
        lead.admit(D)
        made = lead.finish(40, ttl_s=5.0)
        lead.opened(D, AccessOpening(access_id(), made.token, claim(32)))
        lead.pull(grant(D), 32, (10, 11))
        lead.tick(100.0)
        return [snapshot(lead.done), snapshot(lead.node)]

    assert story() == story()


# -- acknowledging


def test_the_engine_s_transfers_stay_until_it_acknowledges_them(lead: Lead) -> None:
    made = lead.finish(ttl_s=1.0)
    lead.tick(1.0)
    assert lead.state.transfers.live == 1
    answer = lead.call(lambda c: AcknowledgeTransfers(c, (made.transfer.id, "t-unknown")))
    assert answer == Acknowledged(1)
    assert lead.state.transfers.live == 0
    assert lead.transfer(made.transfer.id).state is State.FAILED


def test_what_is_not_over_cannot_be_acknowledged(lead: Lead) -> None:
    made = lead.finish()
    assert lead.call(lambda c: AcknowledgeTransfers(c, (made.transfer.id,))) == Acknowledged(0)
    assert lead.state.transfers.live == 1


# -- draining


def test_a_server_that_drains_takes_no_new_work_and_ends_the_old(lead: Lead) -> None:
    lead.begin(describe("p", 1, pool_kind=PoolKind.SERVER_MANAGED))
    lead.admit(D)
    lead.call(lambda c: AllocateBlocks(c, ((0, 20),)))
    made = lead.finish()
    pull = lead.pull(grant(D))
    lead.state.life.draining = True
    before = snapshot(lead.node)
    for work in (
        lambda: lead.finish(key=b"another key here"),
        lambda: lead.pull(grant(D), number=2),
        lambda: lead.call(lambda c: AllocateBlocks(c, ((0, 1),))),
    ):
        with refused(Reason.DRAINING, PreconditionFailed):
            work()
    assert snapshot(lead.node) == before
    lead.give(pull.id, (10, 11))
    (row,) = lead.opened(D, AccessOpening(access_id(), made.token, claim(32)))
    assert isinstance(row, events.Opened)
    assert lead.settle(D).valid
    assert cancel(lead, transfer_id=pull.id).outcome == "cancelled_before_access"


# -- lives


def test_a_new_life_ends_all_that_the_old_one_had(lead: Lead) -> None:
    lead.admit(D)
    made = lead.finish(consumers=2)
    lead.opened(D, AccessOpening(access_id(1), made.token, claim(32)))
    waiting = lead.open(D, AccessOpening(access_id(2), grant(lead.me, lease_id="l-late"), claim(32)))
    done = lead.begin(describe("p", 9))
    (change,) = lead.seen(TransferChanged)
    assert (change.transfer.state, change.transfer.memory) == (State.FAILED, Disposition.RETURNED)
    assert change.transfer.failure is not None
    assert change.transfer.failure.reason is Reason.ENGINE_LOST
    (row,) = lead.answer(waiting).rows
    assert isinstance(row, Unavailable)
    assert [action.open for action in done if isinstance(action, Expect)] == [False]
    assert not any(isinstance(action, TellEngine) for action in done)
    state = lead.state
    assert (len(state.pool.pins), len(state.send.leases), len(state.access.rows), len(state.peers.lives)) == (
        0,
        0,
        0,
        0,
    )
    assert (state.transfers.live, len(state.timers), state.life.incarnation) == (0, 0, 9)


def test_nothing_of_the_old_life_is_valid_in_the_new(lead: Lead) -> None:
    made = lead.finish()
    lead.begin(describe("p", 9))
    lead.admit(D)
    (row,) = lead.opened(D, AccessOpening(access_id(), made.token, claim(32)))
    assert row.reason is Reason.INCARNATION_CHANGED
    for which in ({"transfer_id": made.transfer.id},):
        with refused(Reason.TRANSFER_NOT_FOUND):
            cancel(lead, **which)
    with refused(Reason.LEASE_NOT_FOUND):
        lead.call(lambda c: ReleaseLease(c, LeaseRef(made.lease.id)))


def test_a_life_without_an_engine_tells_no_engine(lead: Lead) -> None:
    lead.feed(events.LifeBegan(9, SECRET, describe("p", 9)))
    lead.finish(ttl_s=1.0)
    lead.tick(1.0)
    assert lead.news() == []


def test_the_pins_of_lives_one_after_another_never_mix(lead: Lead) -> None:
    for incarnation in range(10, 20):
        lead.begin(describe("p", incarnation))
        lead.finish(32)
        lead.pull(grant(D), 32, (10, 11))


# -- every call that is refused


def calls() -> dict[str, Any]:
    """Returns one refused call of each kind, by name."""
    token = grant(D)
    return {
        "FinishedBlocks": lambda c: events.FinishedBlocks(c, KEY, lists((0, 1)), content(48)),
        "PullBlocks": lambda c: events.PullBlocks(c, token, content(32), access_id(), 17),
        "GiveDestination": lambda c: events.GiveDestination(c, "t-unknown", events.Destination(())),
        "RenewLeases": lambda c: events.RenewLeases(c, (), 0.0),
        "ReleaseLease": lambda c: ReleaseLease(c, LeaseRef("l-unknown")),
        "CancelTransfer": lambda c: CancelTransfer(c, "t-unknown"),
        "AllocateBlocks": lambda c: AllocateBlocks(c, ((0, 1),)),
        "FreeBlocks": lambda c: events.FreeBlocks(c, lists((0,))),
        "ConnectPeer": lambda c: ConnectPeer(c, ""),
        "HandshakeReceived": lambda c: events.HandshakeReceived(c, D, ()),
        "OpenAccess": lambda c: events.OpenAccess(c, "x", 1, ()),
        "SettleAccess": lambda c: events.SettleAccess(c, "x", 1, ()),
        "CloseAccess": lambda c: events.CloseAccess(c, "x", 1, ()),
    }


@pytest.mark.parametrize("key", ["", "k"], ids=["without a key", "with a key"])
@pytest.mark.parametrize("name", calls())
def test_a_refused_call_changes_nothing_and_is_answered_once(lead: Lead, name: str, key: str) -> None:
    lead.admit(D)
    lead.finish(40, key=b"another key here")
    before = snapshot(lead.node)
    number = lead.ask(calls()[name], key=key, method=name, body=b"b")
    (refusal,) = lead.done
    assert isinstance(refusal, Refuse)
    assert refusal.call_id == number
    assert snapshot(lead.node) == before


@pytest.mark.parametrize("key", ["", "k"], ids=["without a key", "with a key"])
@pytest.mark.parametrize("name", ["FinishedBlocks", "PullBlocks", "GiveDestination", "FreeBlocks"])
def test_block_ids_of_another_life_are_refused_before_anything_else(lead: Lead, name: str, key: str) -> None:
    before = snapshot(lead.node)
    with refused(Reason.INCARNATION_CHANGED, Aborted):
        lead.call(calls()[name], key=key, method=name, body=b"b", incarnation=lead.state.life.incarnation + 1)
    assert snapshot(lead.node) == before


def test_block_ids_of_this_life_are_taken(lead: Lead) -> None:
    assert lead.finish(call={"incarnation": lead.state.life.incarnation}).lease.id


def test_a_call_with_any_number_is_answered() -> None:
    lead = Lead(describe("p", 1))
    lead.admit(D)
    made = lead.finish()
    opening = events.OpenAccess(events.Call(0, "d"), "d", 2, (AccessOpening(access_id(), made.token, claim(32)),))
    assert [
        action.call_id
        for action in lead.node.handle(showing(opening, lead.node), lead.now)
        if isinstance(action, Reply)
    ] == [0]
