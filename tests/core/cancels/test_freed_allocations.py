"""A cancel also frees the allocations that it names, if they still exist."""

from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.owners import SCHEDULER
from kvgrpc.errors import NotFound, PreconditionFailed, Reason
from tests.core.nodes import KEY, Lead, describe, refused, snapshot


@pytest.fixture
def lead() -> Lead:
    return Lead(describe("p", 1, pool_kind=PoolKind.SERVER_MANAGED))


def allocate(lead: Lead, count: int = 2) -> str:
    made = lead.call(lambda c: events.AllocateBlocks(c, ((0, count),)), SCHEDULER)
    allocation_id: str = made.allocation_id
    return allocation_id


def cancel(lead: Lead, *allocations: str, **fields: Any) -> Any:
    made = {"key": KEY, "free_allocation_ids": allocations} | fields
    return lead.call(lambda c: events.CancelTransfer(c, **made), SCHEDULER)


def test_a_cancel_ends_the_transfer_and_frees_what_it_had(lead: Lead) -> None:
    first, second = allocate(lead), allocate(lead, 3)
    lead.finish(allocation_id=first)
    assert cancel(lead, first, second, first).outcome == "cancelled_before_access"
    assert not lead.state.pool.allocator.known(first)
    assert not lead.state.pool.allocator.known(second)
    assert lead.state.pool.allocator.free_count(0) == 64
    assert len(lead.state.timers) == 0


def test_what_is_freed_is_freed_also_where_the_transfer_was_over_or_unknown(lead: Lead) -> None:
    made = allocate(lead)
    assert cancel(lead, made).outcome == "tombstoned"
    assert not lead.state.pool.allocator.known(made)


def test_allocations_that_are_gone_are_passed_over(lead: Lead) -> None:
    made = allocate(lead)
    sent = lead.finish(allocation_id=made).transfer
    cancel(lead, "b-gone", made)
    assert not lead.state.pool.allocator.known(made)
    assert lead.transfer(sent.id).state is State.CANCELLED


def test_nothing_is_freed_where_the_transfer_is_unknown(lead: Lead) -> None:
    made = allocate(lead)
    with refused(Reason.TRANSFER_NOT_FOUND, NotFound):
        cancel(lead, made, key=b"", transfer_id="t-none")
    assert lead.state.pool.allocator.known(made)


def test_asking_only_frees_nothing(lead: Lead) -> None:
    made = allocate(lead)
    before = snapshot(lead.node)
    cancel(lead, made, "b-gone", validate_only=True)
    assert snapshot(lead.node) == before


def test_a_pool_that_the_engine_manages_has_no_allocations_to_free() -> None:
    lead = Lead(describe("p", 1))
    with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
        cancel(lead, "b-1")
    assert not lead.state.tombstones.keys
