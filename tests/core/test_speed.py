"""The cost of the core, counted in interpreter steps, which are the same on every machine and in every run.

A step is one call of a Python or built-in function. Steps do not count work inside numpy or the garbage collector;
`python -m bench` measures seconds.
"""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import SendOpen, SendSettle
from kvgrpc.core.events import AccessAnswered, AcknowledgeTransfers, LeaseRef, PostingEnded, RenewLeases, SettleAnswered
from kvgrpc.core.state.life import RankSteps
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.values.bridge import BridgeSide
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, uniform_layout
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.obstacles import differences
from tests.core.counted import steps
from tests.core.nodes import Lead, access_id, claim, content, describe, full, grant, lists

D = describe("d", 2)
MANY = 4_000


class Quick(Lead):
    """A lead without invariant checks: they look at everything, and would be counted."""

    checked = False


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def with_leases(live: int) -> Quick:
    lead = Quick(describe("p", 1), Limits(leases=10**6, transfers=10**6))
    lead.admit(D)
    for number in range(live):
        hand_over(lead, number)
    lead.feed(events.Tick(), 5.0)
    return lead


def hand_over(lead: Quick, number: int, ttl_s: float = 600.0) -> Any:
    return lead.call(
        lambda c: events.FinishedBlocks(c, key(number), lists((number % 64,)), content(16), ttl_s=ttl_s),
    )


def lease_steps(lead: Quick) -> int:
    """Grants, renews and expires 50 leases beside the live ones, and returns the steps."""

    def cycle() -> None:
        made = [hand_over(lead, MANY + number, 5.0) for number in range(50)]
        for one in made:
            lead.call(lambda c, one=one: RenewLeases(c, (LeaseRef(one.lease.id),)))  # type: ignore[misc]
        lead.feed(events.Tick(), 5.0)
        lead.feed(events.Tick(), 5.0)
        lead.call(lambda c: AcknowledgeTransfers(c, tuple(one.transfer.id for one in made)))

    live = len(lead.state.send.leases)
    counted = steps(cycle)
    assert len(lead.state.send.leases) == live
    return counted


def test_a_lease_costs_the_same_among_few_and_many() -> None:
    few, many = lease_steps(with_leases(200)), lease_steps(with_leases(MANY))
    # Only the heap of deadlines grows with the number of leases; a heap operation counts as one step.
    assert many <= 1.05 * few


def pull(source: Quick, lead: Quick, number: int, tokens: int) -> None:
    """Runs a whole pull on both sides; the engines acknowledge its end."""
    blocks = range(-(-tokens // 16))
    whole = content(tokens)
    made = source.call(lambda c: events.FinishedBlocks(c, key(number), lists(blocks), whole))
    destination = events.Destination(lists(blocks))
    access = access_id(number + 1)
    lead.call(lambda c: events.PullBlocks(c, made.token, whole, access, destination=destination))
    opening = lead.one(SendOpen).opening
    row = source.call(lambda c: events.OpenAccess(c, "d", 2, (opening,))).rows[0]
    lead.feed(AccessAnswered(access, row))
    lead.feed(PostingEnded(f"{opening.transfer_id}/0.0", True, 16))
    settling = lead.one(SendSettle).settling
    verdict = source.call(lambda c: events.SettleAccess(c, "d", 2, (settling,))).rows[0]
    lead.feed(SettleAnswered(access, verdict))
    assert lead.news()[0].use_tokens == tokens
    lead.call(lambda c: AcknowledgeTransfers(c, (opening.transfer_id,)))
    source.call(lambda c: AcknowledgeTransfers(c, (made.transfer.id,)))


def connected(pool_blocks: int = 64) -> tuple[Quick, Quick]:
    pool = full(blocks=pool_blocks, layers=1)
    limits = Limits(leases=10**6, transfers=10**6)
    source, lead = (Quick(describe(name, number, pool=pool), limits) for name, number in (("p", 1), ("d", 2)))
    source.admit(lead.me)
    lead.admit(source.me)
    return source, lead


def test_a_pull_of_one_block_takes_few_steps() -> None:
    source, lead = connected()
    pull(source, lead, 1, 16)
    assert steps(lambda: pull(source, lead, 2, 16)) < 2_100


def test_a_pull_costs_the_same_among_many_others() -> None:
    few = connected()
    many = connected()
    waiting = [
        lead.pull(grant(source.me, lease_id="l-x"), number=10**6 + n) for source, lead in (many,) for n in range(300)
    ]
    for number in range(300):
        opening = AccessOpening(access_id(10**7 + number), grant(many[0].me, lease_id=f"l-{number}"), claim(32))
        many[0].open(many[1].me, opening)
    for pair in (few, many):
        pull(*pair, 1, 16)
    assert steps(lambda: pull(*many, 2, 16)) <= 1.05 * steps(lambda: pull(*few, 2, 16))
    assert len(waiting) == 300


def test_a_pull_of_many_blocks_takes_as_many_steps_as_one_of_few() -> None:
    few, many = connected(16), connected(4_096)
    content(16 * 4_096)
    for pair, tokens in ((few, 256), (many, 65_536)):
        pull(*pair, 1, tokens)
    # The caller makes the digests, one step for each unit.
    assert steps(lambda: pull(*many, 2, 65_536)) <= steps(lambda: pull(*few, 2, 256)) + 1.1 * steps(
        lambda: content(65_536)
    )


def test_steps_of_the_engine_look_only_at_who_waits_for_one() -> None:
    source, lead = connected()
    lead.feed(events.StepDone(0, 1))
    idle = steps(lambda: lead.feed(events.StepDone(0, 2)))
    for number in range(200):
        lead.pull(grant(source.me), number=number + 1)
        hand_over(lead, number)
    assert steps(lambda: lead.feed(events.StepDone(0, 3))) <= idle + 20


def of_groups(count: int, *, stages: int) -> PoolLayout:
    """Makes a layout of `count` groups of 4 layers, spread over `stages` stages."""
    groups = tuple(
        Group(str(i), GroupKind.FULL_ATTENTION, 4, 16, 2, 1, 1, "float16", total_kv_heads=1) for i in range(count)
    )
    regions = tuple(Region(n // 4, n % 4, 1, 128 * n, 64, 64, stage=n % stages) for n in range(4 * count))
    return PoolLayout(groups, regions, 512 * count)


@pytest.mark.parametrize("stages", [1, 2])
def test_comparing_unlike_pools_costs_by_the_size_of_what_a_peer_said(stages: int) -> None:
    def compared(count: int) -> int:
        here, there = of_groups(count, stages=1), of_groups(count, stages=stages)
        turned = tuple(replace(group, order="head_major") for group in there.groups)
        there = PoolLayout(turned, there.regions, there.total_bytes)
        return steps(lambda: assert_bridged(BridgeSide(here, 1), BridgeSide(there, stages)))

    assert compared(64) <= 4.2 * compared(16)


def assert_bridged(here: BridgeSide, there: BridgeSide) -> None:
    assert all(difference.bridgeable for difference in differences(here, there))


def test_a_step_that_is_over_costs_the_lead_little_however_many_layers_there_are() -> None:
    def costs(layers: int) -> int:
        group = Group("g", GroupKind.FULL_ATTENTION, layers, 16, 2, 1, 1, "float16")
        done = RankSteps(describe(pool=uniform_layout(group, 64), world_size=8))
        for rank in range(8):
            done.finish(rank, 1, None)
        return steps(done.done)

    assert costs(800) == costs(8)
