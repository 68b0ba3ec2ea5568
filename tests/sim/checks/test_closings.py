"""`CloseAudit`: a lead has to tell its peers when an access is over."""

import pytest

from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.values.bridge import bridges
from kvgrpc.core.values.compatibility import side_of
from kvgrpc.core.values.limits import Limits
from sim import Violated
from sim.checks.closings import CloseAudit
from tests.core.nodes import describe, endpoints, key_of

SOURCE = describe("p", 1)
LIFE = key_of(SOURCE)
ACCESS = b"a" * 16


def audit() -> CloseAudit:
    both = bridges(side_of(SOURCE), side_of(SOURCE))
    return CloseAudit(Limits(), {LIFE: Peer(SOURCE, endpoints(SOURCE), both, 0.0, state=PeerState.CONNECTED)})


def test_a_source_is_told_that_its_access_is_over() -> None:
    made = audit()
    made.granted(ACCESS, "t", LIFE)
    made.ended("t", 1.0)
    with pytest.raises(Violated, match="is not told"):
        made.check(2.0)
    made.over(ACCESS)
    made.check(2.0)


def test_a_source_that_asks_again_for_what_is_over_is_told_nothing_new() -> None:
    made = audit()
    made.granted(ACCESS, "t", LIFE)
    made.over(ACCESS)
    made.granted(ACCESS, "t", LIFE)
    made.ended("t", 1.0)
    made.check(2.0)
    made.life_began()
    made.granted(ACCESS, "t", LIFE)
    made.ended("t", 1.0)
    with pytest.raises(Violated, match="is not told"):
        made.check(2.0)
