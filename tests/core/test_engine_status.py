"""Engine status for routers: free blocks and queued work agree with the tables, at a cost independent of their size."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from kvgrpc.core import events
from kvgrpc.core.state.engine_status import EngineStatus, GroupLoad, engine_status
from kvgrpc.core.tables.allocator import Allocator, Terms
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import Exhausted, PreconditionFailed
from tests.core.cancels.pulled import hand_over, newest, pull
from tests.core.counted import steps
from tests.core.nodes import Lead, answer_of, describe, grant, hybrid, ids, key_of
from tests.core.pairs import MODES, Pair, Writers

D = describe("d", 2)


def pin(kind: PinKind) -> Any:
    def add(pins: PinTable, _: Allocator, owner: str, blocks: Blocks) -> None:
        if not pins.has(owner, kind):
            pins.add(owner, kind, blocks, 0.0)

    return add


def drop(pins: PinTable, _: Allocator, owner: str, __: Blocks) -> None:
    for kind in PinKind:
        pins.drop(owner, kind)


def take(_: PinTable, allocator: Allocator, name: str, blocks: Blocks) -> None:
    if not allocator.known(name):
        allocator.take(name, allocator.choose({0: len(blocks[0])}), Terms(ENGINE))


def free(_: PinTable, allocator: Allocator, name: str, __: Blocks) -> None:
    allocator.free_allocation(name)


PINNED: dict[str, Callable[[PinTable, Allocator, str, Blocks], None]] = {"drop": drop, "take": take, "free": free}
PINNED |= {"lease": pin(PinKind.LEASE), "target": pin(PinKind.TARGET)}


def status(lead: Lead) -> EngineStatus:
    """Returns the status; asserts that its sums are those of the tables."""
    state = lead.node.state
    found = engine_status(state)
    assert found.queued_bytes == sum(transfer.queued_bytes for transfer in state.transfers)
    assert found.transfers == len(state.transfers.unfinished())
    return found


def test_a_server_without_an_engine_has_nothing() -> None:
    lead = Lead()
    lead.begin(None)
    assert status(lead) == EngineStatus()


def test_blocks_that_are_leased_are_not_free_and_come_back_with_the_lease() -> None:
    lead = Lead(describe("p", 1))
    assert status(lead).groups == (GroupLoad(64, 64, 0),)
    made = lead.finish(48)
    lead.finish(32, (2, 3), key=b"another key here")
    assert (status(lead).groups, status(lead).leases) == ((GroupLoad(64, 60),), 2)
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(made.lease.id)))
    assert (status(lead).groups, status(lead).leases) == ((GroupLoad(64, 62),), 1)


def test_blocks_that_are_allocated_are_not_free_and_those_that_are_freed_are_once_nothing_pins_them() -> None:
    lead = Lead(describe("p", 1, pool_kind=PoolKind.SERVER_MANAGED))
    made = lead.call(lambda c: events.AllocateBlocks(c, ((0, 4),)))
    assert status(lead).groups == (GroupLoad(64, 60),)
    lease = lead.finish(32, (0, 1)).lease
    assert status(lead).groups == (GroupLoad(64, 60),)
    lead.call(lambda c: events.FreeBlocks(c, allocation_id=made.allocation_id))
    assert status(lead).groups == (GroupLoad(64, 62),)
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(lease.id)))
    assert status(lead).groups == (GroupLoad(64, 64),)


def test_bytes_are_queued_from_the_opening_of_the_access_until_they_have_moved() -> None:
    pair = Pair()
    token = hand_over(pair).token
    waits = pull(pair, token, blocks=())
    assert (status(pair.d).transfers, status(pair.d).queued_bytes) == (1, 0), "how much it takes is not known"
    where = events.Destination(((0, ids(3, 4)),))
    pair.call(pair.d, lambda c: events.GiveDestination(c, waits.id, where))
    assert status(pair.d).queued_bytes == status(pair.p).queued_bytes == 32
    pair.moved()
    assert newest(pair.d).state is State.SUCCEEDED
    assert (status(pair.d).queued_bytes, status(pair.p).queued_bytes, status(pair.d).transfers) == (0, 0, 0)


def test_a_pull_of_several_groups_whose_blocks_are_not_known_has_no_bytes_yet() -> None:
    lead = Lead(describe("d", 2, pool=hybrid()))
    source = describe("p", 1, pool=hybrid())
    assert lead.pull(grant(source)).nbytes == 0
    assert lead.pull(grant(source), 32, (1, 2), (3,), number=2).nbytes == 24


def test_moves_that_wait_for_their_turn_are_counted() -> None:
    source = describe("p", 1)
    lead = Lead(D)
    lead.node = type(lead.node)(type(lead.node.state.limits)(in_flight_bytes=1))
    lead.begin(D)
    lead.pull(grant(source), 32, (1, 2), number=1)
    lead.connect(source)
    lead.feed(events.AccessAnswered((1).to_bytes(16, "big"), answer_of(source)))
    lead.pull(grant(source), 32, (3, 4), number=2)
    lead.feed(events.AccessAnswered((2).to_bytes(16, "big"), answer_of(source)))
    found = status(lead)
    assert (found.waiting_turns, found.queued_bytes) == (1, 64)
    lead.feed(events.PeerSilent(key_of(source)))
    lead.tick(10.0)
    assert (status(lead).waiting_turns, status(lead).queued_bytes) == (0, 0)


@MODES
def test_the_bytes_of_a_push_are_queued_at_both_ends(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, (3, 4)).token)
    assert status(pair.d).queued_bytes == 0
    pair.finish(32, (1,), last=False)
    assert (status(pair.p).queued_bytes, status(pair.d).queued_bytes) == (16, 32)
    pair.moved()
    pair.finish(32, (2,))
    pair.moved()
    assert (status(pair.p).queued_bytes, status(pair.d).queued_bytes) == (0, 0)


def test_it_costs_no_more_however_much_there_is() -> None:
    lead = Lead(describe("p", 1))
    few = steps(lambda: engine_status(lead.node.state))
    lead.checked = False
    for number in range(60):
        lead.finish(16, (number,), key=bytes([number]) * 16)
    assert steps(lambda: engine_status(lead.node.state)) == few


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(PINNED)), st.integers(0, 3), st.sets(st.integers(0, 9), min_size=1)),
        max_size=40,
    )
)
def test_free_blocks_are_counted_as_pins_and_allocations_come_and_go(done: list[tuple[str, int, set[int]]]) -> None:
    pins = PinTable((10,))
    allocator = Allocator((10,), pins)
    for what, number, blocks in done:
        with contextlib.suppress(PreconditionFailed, Exhausted):
            PINNED[what](pins, allocator, str(number), (np.array(sorted(blocks), dtype=np.int64),))
        pins.check()
        assert pins.free == [allocator.free_count(0)]
