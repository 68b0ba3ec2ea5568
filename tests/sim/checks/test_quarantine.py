"""`QuarantineAudit`: a lead must re-key when too much is in quarantine, within limits on when and how long."""

import pytest

from kvgrpc.core.actions import Rekey
from kvgrpc.core.events import LifeBegan
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.values.limits import Limits
from sim import Violated
from sim.checks.quarantine import QuarantineAudit
from tests.core.nodes import describe, ids

LIMITS = Limits(quarantine_share=0.5, peer_grace_s=10.0, rekey_interval_s=60.0)


def state(*, sets_aside: bool = True) -> NodeState:
    """Returns the state of a lead with 64 blocks."""
    made = NodeState(LIMITS, frozenset(), checksums=False)
    made.begin(LifeBegan(1, b"", describe(), engine_attached=True, sets_aside=sets_aside))
    return made


def quarantine(lead: NodeState, name: str, first: int, end: int) -> None:
    lead.pool.pins.add(name, PinKind.TARGET, (ids(*range(first, end)),), lead.now)
    lead.pool.pins.quarantine(name, lead.now)


def look(overdue: QuarantineAudit, lead: NodeState, now: float) -> None:
    lead.now = now
    overdue.look([])


def rekey(overdue: QuarantineAudit, lead: NodeState) -> None:
    lead.pool.rekeying = "too much"
    overdue.look([Rekey(0)])
    lead.pool.rekeying = ""
    overdue.look([])


def test_what_is_within_the_budget_may_stay_in_quarantine() -> None:
    lead = state()
    overdue = QuarantineAudit(lead)
    quarantine(lead, "t", 0, 32)
    look(overdue, lead, 0.0)
    look(overdue, lead, 1e6)


@pytest.mark.parametrize(("sets_aside", "blocks"), [(True, 33), (False, 1)])
def test_too_much_in_quarantine_has_the_grace_and_no_more(sets_aside: bool, blocks: int) -> None:
    lead = state(sets_aside=sets_aside)
    overdue = QuarantineAudit(lead)
    quarantine(lead, "t", 0, blocks)
    look(overdue, lead, 0.0)
    look(overdue, lead, 10.0)
    with pytest.raises(Violated, match=r"too much memory is in quarantine, 1.000 s after a re-key had to begin"):
        look(overdue, lead, 11.0)


def test_a_rekey_is_not_asked_for_before_the_interval_is_over() -> None:
    lead = state()
    overdue = QuarantineAudit(lead)
    rekey(overdue, lead)
    quarantine(lead, "t", 0, 33)
    look(overdue, lead, 0.0)
    look(overdue, lead, 60.0)
    with pytest.raises(Violated):
        look(overdue, lead, 61.0)


def test_what_a_rekey_did_not_help_asks_for_no_other() -> None:
    lead = state()
    overdue = QuarantineAudit(lead)
    quarantine(lead, "t", 0, 33)
    look(overdue, lead, 0.0)
    rekey(overdue, lead)
    look(overdue, lead, 1e6)
    quarantine(lead, "u", 33, 34)
    look(overdue, lead, 1e6 + 10.0)
    with pytest.raises(Violated):
        look(overdue, lead, 1e6 + 11.0)


def test_a_new_life_owes_nothing_of_the_last_one() -> None:
    lead = state()
    overdue = QuarantineAudit(lead)
    quarantine(lead, "t", 0, 33)
    look(overdue, lead, 0.0)
    lead.begin(LifeBegan(2, b"", describe(), engine_attached=True))
    overdue.life_began()
    look(overdue, lead, 1e6)


def test_a_rekey_tells_the_ranks_when_a_transfer_has_had_its_time() -> None:
    lead = state()
    overdue = QuarantineAudit(lead)
    lead.pool.rekeying = "too much"
    look(overdue, lead, 0.0)
    look(overdue, lead, LIMITS.transfer_timeout_s)
    with pytest.raises(Violated, match=r"a re-key waits 1.000 s too long for what moves"):
        look(overdue, lead, LIMITS.transfer_timeout_s + 1.0)
