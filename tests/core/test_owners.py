"""Blocks of an engine-managed pool are named and scheduled by callers that speak for the engine, and by no others."""

import pytest

from kvgrpc.core import events
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.owners import ANONYMOUS, ENGINE, SCHEDULER, Verb
from kvgrpc.errors import PermissionDenied, Reason
from tests.core.nodes import Lead, describe, refused, snapshot


@pytest.mark.parametrize("principal", [ANONYMOUS, "router"])
def test_no_other_caller_hands_over_blocks_that_the_engine_manages(principal: str) -> None:
    lead = Lead()
    before = snapshot(lead.node)
    with refused(Reason.NOT_OWNER, PermissionDenied):
        lead.finish(32, principal=principal)
    assert snapshot(lead.node) == before


def test_who_speaks_for_the_engine_hands_over_its_blocks() -> None:
    for principal in (ENGINE, SCHEDULER):
        assert Lead().finish(32, principal=principal).lease.id


def managed() -> Lead:
    return Lead(describe("p", 1, pool_kind=PoolKind.SERVER_MANAGED))


def test_no_other_caller_hands_over_under_a_lease_id_that_the_engine_may_have_minted() -> None:
    lead = managed()
    lead.call(lambda c: events.AllocateBlocks(c, ((0, 2),)), ANONYMOUS)
    before = snapshot(lead.node)
    with refused(Reason.NOT_OWNER, PermissionDenied):
        lead.finish(32, principal=ANONYMOUS, lease_id="l-engine")
    assert snapshot(lead.node) == before
    assert lead.finish(32, principal=ANONYMOUS).lease.id


def test_a_refused_hand_over_of_another_caller_does_not_take_the_engine_s_lease_id() -> None:
    lead = managed()
    lead.call(lambda c: events.AllocateBlocks(c, ((0, 2),)))
    with refused(Reason.BLOCK_NOT_ALLOCATED):
        lead.finish(32, principal=ANONYMOUS, lease_id="l-engine")
    assert lead.finish(32, lease_id="l-engine").lease.id == "l-engine"


def test_who_speaks_for_the_engine_alone_schedules_for_its_pool() -> None:
    lead = Lead()
    lead.state.pool.check_owner(SCHEDULER, Verb.SCHEDULE)
    with refused(Reason.NOT_OWNER, PermissionDenied):
        lead.state.pool.check_owner(ANONYMOUS, Verb.SCHEDULE)
    lead.begin(lead.me, attached=False)
    lead.state.pool.check_owner(ANONYMOUS, Verb.SCHEDULE)
