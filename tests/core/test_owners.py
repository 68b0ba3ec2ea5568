"""A pool whose blocks its engine manages: no other caller names them, or schedules for it."""

import pytest

from kvgrpc.core.values.owners import ANONYMOUS, ENGINE, SCHEDULER, Verb
from kvgrpc.errors import PermissionDenied, Reason
from tests.core.nodes import Lead, refused, snapshot


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


def test_who_speaks_for_the_engine_alone_schedules_for_its_pool() -> None:
    lead = Lead()
    lead.state.check_pool(SCHEDULER, Verb.SCHEDULE)
    with refused(Reason.NOT_OWNER, PermissionDenied):
        lead.state.check_pool(ANONYMOUS, Verb.SCHEDULE)
    lead.begin(lead.me, attached=False)
    lead.state.check_pool(ANONYMOUS, Verb.SCHEDULE)
