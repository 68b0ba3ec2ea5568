"""A call that states an allocation accepts only its blocks: freed ones are refused, whoever has them now."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.events import Destination
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.nodes import KEY, Lead, access_id, content, describe, grant, lists, refused, snapshot

D = describe("d", 2)


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1, pool_kind=PoolKind.SERVER_MANAGED))


def allocate(lead: Lead, count: int = 2) -> str:
    made = lead.call(lambda c: events.AllocateBlocks(c, ((0, count),)))
    allocation_id: str = made.allocation_id
    return allocation_id


def free(lead: Lead, *blocks: int) -> None:
    lead.call(lambda c: events.FreeBlocks(c, lists(blocks)))


def give(lead: Lead, pull_id: str, allocation_id: str) -> Any:
    where = Destination(lists((0, 1)), allocation_id=allocation_id)
    return lead.call(lambda c: events.GiveDestination(c, pull_id, where))


def work(lead: Lead, name: str, allocation_id: str) -> Any:
    """Makes the call `name` about blocks 0 and 1 of that allocation."""
    where = Destination(lists((0, 1)), allocation_id=allocation_id)
    match name:
        case "hand over":
            return lead.finish(allocation_id=allocation_id)
        case "part":
            return lead.finish(allocation_id=allocation_id, waits_for=events.WaitsFor.REGISTRATION)
        case "pull":
            return lead.pull(grant(D), destination=where)
        case "give":
            pull = next(t for t in lead.state.transfers if not t.over)
            return give(lead, pull.id, allocation_id)
        case "reserve":
            return lead.call(
                lambda c: events.ReserveBlocks(c, KEY, lists((0, 1)), content(32), allocation_id=allocation_id)
            )
    return lead.call(lambda c: events.FreeBlocks(c, lists((0, 1)), allocation_id))


NAMES = ("hand over", "part", "pull", "give", "reserve", "free")


def prepare(lead: Lead, name: str) -> None:
    if name == "give":
        lead.admit(D)
        lead.pull(grant(D), number=7)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_the_allocation_that_is_stated_are_taken(lead: Lead, name: str) -> None:
    prepare(lead, name)
    assert work(lead, name, allocate(lead)) is not None


@pytest.mark.parametrize("now", ["free", "another allocation's", "partly another's"])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_were_freed_are_refused_and_nothing_changes(lead: Lead, name: str, now: str) -> None:
    prepare(lead, name)
    mine = allocate(lead)
    free(lead, *((0, 1) if now != "partly another's" else (1,)))
    if now != "free":
        allocate(lead, 2)
    before = snapshot(lead.node)
    with refused(Reason.BLOCK_NOT_ALLOCATED, PreconditionFailed):
        work(lead, name, mine)
    assert snapshot(lead.node) == before


@pytest.mark.parametrize("name", NAMES)
def test_an_allocation_of_a_pool_that_the_engine_manages_is_refused(name: str) -> None:
    lead = Lead(describe("p", 1))
    prepare(lead, name)
    before = snapshot(lead.node)
    with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
        work(lead, name, "b-1")
    assert snapshot(lead.node) == before


def test_a_pull_that_needs_no_blocks_states_none_of_an_allocation(lead: Lead) -> None:
    where = Destination((), 32, "b-gone")
    pulling = lead.call(lambda c: events.PullBlocks(c, grant(D), content(32), access_id(), destination=where))
    assert pulling.transfer is not None
