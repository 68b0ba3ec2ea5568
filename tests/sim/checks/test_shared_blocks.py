"""Engines whose groups share blocks: what their block managers give out, and what is checked of their leads."""

import pytest

from kvgrpc.core.events import LifeBegan
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.values.limits import Limits
from sim import Violated, World, drawn
from sim.checks.pinned import check_free
from sim.checks.quarantine import QuarantineAudit
from sim.engine.blocks import BlockManager
from sim.world.memory import layout
from tests.core.nodes import describe, ids

POOL = layout(8, aliased=True)


def state() -> NodeState:
    made = NodeState(Limits(quarantine_share=0.5, peer_grace_s=10.0), frozenset(), checksums=False)
    made.begin(LifeBegan(1, b"", describe(pool=POOL), engine_attached=True))
    return made


def test_no_block_is_given_to_two_groups_that_share_it() -> None:
    manager = BlockManager(POOL)
    taken = manager.take(64)
    assert taken is not None
    fine, coarse = taken
    assert sorted([*fine, *coarse]) == [2, 3, 4, 5, 6, 7]
    assert [manager.in_use(group, int(coarse[0])) for group in range(2)] == [False, True]
    assert manager.lacks(64) == ((0, 4),)
    assert manager.take(64) is None
    manager.free((fine[:1], coarse))
    assert manager.lacks(64) == ((0, 1),)
    again = manager.take(32)
    assert again is not None
    assert {*again[0].tolist(), *again[1].tolist()} <= {0, 1, int(fine[0]), *coarse.tolist()}


def test_blocks_that_are_counted_free_for_a_group_though_another_one_has_them_are_found() -> None:
    lead = state()
    lead.pool.pins.add("l", PinKind.LEASE, (ids(1), ids(2, 3)), 0.0)
    check_free(lead, POOL)
    lead.pool.pins = PinTable((8, 8))
    lead.pool.pins.add("l", PinKind.LEASE, (ids(1), ids(2, 3)), 0.0)
    with pytest.raises(Violated, match="7 blocks are said to be free for group fine, and 5 are"):
        check_free(lead, POOL)


def test_too_much_in_quarantine_is_counted_over_all_groups_of_a_space() -> None:
    lead = state()
    audit = QuarantineAudit(lead)
    for name, first in (("a", (ids(0, 1), ids(2, 3))), ("b", (ids(4), ids()))):
        audit.look([])
        lead.now += 60.0
        audit.look([])
        lead.pool.pins.add(name, PinKind.TARGET, first, lead.now)
        lead.pool.pins.quarantine(name, lead.now)
    audit.look([])
    lead.now += 60.0
    with pytest.raises(Violated, match="too much memory is in quarantine"):
        audit.look([])


def test_some_worlds_have_such_engines_and_all_their_hosts_do() -> None:
    setups = [drawn(seed, 100) for seed in range(100)]
    assert 10 < sum(setup.aliased for setup in setups) < 40
    world = World(1, engines=3, aliased=True)
    assert all(host.description.pool.shared_spaces == ((0, 1),) for host in world.hosts)
