"""Engines whose two groups, one with a window, lie on the same bytes and share block ids. The right bytes move, no
other byte changes, and no block belongs to both groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from kvgrpc.cli.app import app
from kvgrpc.core.values.layout import GroupKind, PoolKind, PoolLayout
from kvgrpc.engine import BlocksReturned, Failed, Received, content
from kvgrpc.errors import Exhausted, InvalidRequest, PreconditionFailed, Reason
from kvgrpc.v1 import admin_pb2, pool_pb2
from tests.engine.conftest import Attach, Leads
from tests.engine.made import BLOCKS, LAYERS, layout
from tests.engine.support import Side, failure, new_key, refused, tokens
from tests.service.values import ids_of

PROMPT = tokens(70)
"""Five blocks. The last 32 tokens lie in the last three blocks."""
SOURCE = [[1, 2, 9, 12, 4], [5, 6, 20]]
TARGET = [[30, 31, 5, 8, 9], [40, 4, 42]]
Blocks = Sequence[Sequence[int]]


def aliased() -> PoolLayout:
    """Returns the pool of all engines here: full attention, and a window of two blocks on the same bytes."""
    dense = layout()
    full = replace(dense.groups[0], space="kv")
    window = replace(full, name="window", kind=GroupKind.SLIDING_WINDOW, window_tokens=32)
    regions = (*dense.regions, *(replace(region, group=1) for region in dense.regions))
    return PoolLayout((full, window), regions, dense.total_bytes)


@pytest.fixture
def pair(leads: Leads, attach: Attach) -> tuple[Side, Side]:
    """Returns an engine on each lead, with different bytes in all of their memory."""
    p, d = (attach(lead, pool=aliased()) for lead in leads)
    for seed, side in enumerate((p, d), 1):
        side.fill(range(BLOCKS), seed)
    return p, d


def filled(source: Side, destination: Side, given: Blocks, taken: Blocks) -> NDArray[np.uint8]:
    """Returns the destination's expected memory after it got these blocks of the source, with all else unchanged."""
    expected = destination.view().copy()
    for theirs, ours in zip(given, taken, strict=True):
        expected[:, list(ours)] = source.view()[:, list(theirs)]
    return expected


@pytest.mark.parametrize("count", [20, 33, 70], ids=["within the window", "a token more", "longer"])
def test_a_pull_fills_the_blocks_of_both_groups_and_no_other_byte(pair: tuple[Side, Side], count: int) -> None:
    source, destination = pair
    groups, prompt = source.engine.pool.groups, content(PROMPT[:count])
    given, taken = (
        [ids[: group.blocks_of(count)] for ids, group in zip(blocks, groups, strict=True)]
        for blocks in (SOURCE, TARGET)
    )
    expected = filled(source, destination, given, taken)
    handed = source.hand_over(given, PROMPT[:count])
    pull = destination.engine.pull(handed.grant, prompt)
    pull.start(taken)
    assert destination.finish(pull)[-1] == Received(pull, count)
    assert source.finish(handed) == [BlocksReturned(handed)]
    assert np.array_equal(destination.view(), expected)


@pytest.mark.parametrize(("have", "missing"), [(32, ([2, 3, 4], [0, 1, 2])), (48, ([3, 4], [1, 2]))])
def test_a_pull_after_a_cached_prefix_fills_what_each_group_lacks(
    pair: tuple[Side, Side], have: int, missing: tuple[list[int], list[int]]
) -> None:
    source, destination = pair
    given, taken = (
        [[ids[at] for at in lacks] for ids, lacks in zip(blocks, missing, strict=True)] for blocks in (SOURCE, TARGET)
    )
    expected = filled(source, destination, given, taken)
    handed = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handed.grant, content(PROMPT))
    pull.start(taken, have_tokens=have)
    assert destination.finish(pull)[-1] == Received(pull, 70)
    source.finish(handed)
    assert np.array_equal(destination.view(), expected)


def test_the_next_turn_goes_back_into_blocks_of_either_group(pair: tuple[Side, Side]) -> None:
    """Blocks of the full group become blocks of the window, and vice versa."""
    p, d = pair
    first = p.hand_over(SOURCE, PROMPT)
    pull = d.engine.pull(first.grant, content(PROMPT))
    pull.start(TARGET)
    d.finish(pull)
    p.finish(first)
    turn = tokens(100)
    given = [[*TARGET[0], 40, 4], [42, 52, 53]]
    taken = [[20, 6], [1, 2]]
    back = d.hand_over(given, turn)
    expected = filled(d, p, [given[0][5:], given[1][1:]], taken)
    pull = p.engine.pull(back.grant, content(turn))
    pull.start(taken, have_tokens=80)
    assert p.finish(pull)[-1] == Received(pull, 100)
    assert np.array_equal(p.view(), expected)
    d.finish(back)


@pytest.mark.parametrize("by_layer", [False, True], ids=["in chunks", "in layers"])
def test_a_push_with_parts_fills_the_blocks_of_both_groups_and_no_other_byte(
    pair: tuple[Side, Side], by_layer: bool
) -> None:
    source, destination = pair
    expected = filled(source, destination, SOURCE, TARGET)
    key = new_key()
    reservation = destination.engine.reserve(TARGET, content(PROMPT), transfer_key=key)
    destination.poll_until(bool)
    push = source.engine.push(content(PROMPT), transfer_key=key)
    push.register(reservation.grant)
    if by_layer:
        for layer in range(LAYERS):
            push.finished(SOURCE, layers=(layer, 1), last=layer == LAYERS - 1)
    else:
        for full, window, last in ((SOURCE[0][:2], [], False), (SOURCE[0][2:3], SOURCE[1][:1], False)):
            push.finished([full, window], last=last)
        push.finished([SOURCE[0][3:], SOURCE[1][1:]], last=True)
    source.engine.flush()
    assert destination.poll_until(lambda _: reservation.over)[-1] == Received(reservation, 70)
    assert source.poll_until(lambda _: push.over) == [BlocksReturned(push)]
    assert np.array_equal(destination.view(), expected)


def test_a_block_in_two_groups_is_refused_and_nothing_is_pinned(pair: tuple[Side, Side]) -> None:
    source, destination = pair
    twice = [[1, 2, 9, 12, 4], [5, 6, 12]]
    assert failure(source.finish(source.hand_over(twice, PROMPT))).reason is Reason.BLOCK_DUPLICATE
    handed = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handed.grant, content(PROMPT))
    pull.start([[30, 31, 5, 8, 9], [40, 41, 9]])
    (failed, *_) = destination.poll_until(bool)
    assert isinstance(failed, Failed)
    assert failed.reason is Reason.BLOCK_DUPLICATE
    assert destination.lead.status().counts.pinned_block_count == 0
    other = source.hand_over([[5], [7]], PROMPT[:16])
    assert failure(source.poll_until(lambda _: other.over)).reason is Reason.BLOCK_PINNED


def test_counts_are_those_of_the_space(pair: tuple[Side, Side]) -> None:
    source, _ = pair
    handed = source.hand_over(SOURCE, PROMPT)
    source.known(handed)
    api = source.lead.api
    full, window = api.pool.GetPoolStatus(pool_pb2.GetPoolStatusRequest()).groups
    assert (full.free_block_count, full.pinned_block_count, full.leased_block_count) == (BLOCKS - 8, 8, 8)
    window.name = full.name
    assert full == window
    assert source.lead.status().counts.pinned_block_count == 8
    for block in ({"group": 0, "block": 5}, {"group": 1, "block": 5}):
        (pin,) = api.admin.ListPins(admin_pb2.ListPinsRequest(block=admin_pb2.BlockRef(**block))).pins
        assert pin.owner == handed.lease_id
    (described,) = api.pool.DescribePools(pool_pb2.DescribePoolsRequest()).pools
    assert [group.space for group in described.groups] == ["kv", "kv"]
    shown = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["status", source.engine.address]).stdout
    assert "pool groups full, window, which share 64 blocks, 56 free, 0 allocated, 8 leased" in shown
    assert ".LL.LLL..L..L" in shown


def test_reclaiming_takes_blocks_of_whichever_group_back(pair: tuple[Side, Side]) -> None:
    source, _ = pair
    handed = source.hand_over(SOURCE, PROMPT, firm_ttl_s=0.0)
    assert not source.engine.reclaim(9, group=1).enough
    answer = source.engine.reclaim(7, group=1)
    assert [row.lease_id for row in answer.leases] == [handed.lease_id]
    assert [ids.tolist() for ids in answer.freed] == [sorted(ids) for ids in SOURCE]
    assert source.poll_until(lambda _: handed.over)[-1] == BlocksReturned(handed)


def test_a_server_gives_different_blocks_to_groups_of_one_space(leads: Leads, attach: Attach) -> None:
    side = attach(leads[0], pool=aliased(), kind=PoolKind.SERVER_MANAGED)
    api = side.api

    def allocate(full: int, window: int, **fields: Any) -> list[list[int]]:
        counts = [pool_pb2.GroupBlockCount(group=i, block_count=n) for i, n in enumerate((full, window))]
        asked = pool_pb2.AllocateBlocksRequest(group_block_counts=counts, **fields)
        blocks = api.pool.AllocateBlocks(asked).blocks
        return [ids_of([row]) for row in blocks.groups]

    first, second = allocate(20, 12), allocate(30, 2)
    every = [block for blocks in (*first, *second) for block in blocks]
    assert len(set(every)) == len(every) == BLOCKS
    with refused(Reason.POOL_EXHAUSTED, Exhausted):
        side.engine.allocate(1, group=1)
    with refused(Reason.BLOCK_NOT_ALLOCATED, PreconditionFailed):
        side.engine.free([[], first[0][:1]])
    with refused(Reason.BLOCK_DUPLICATE, InvalidRequest):
        side.engine.free([first[0][:1], first[0][:1]])
    side.engine.free([first[0][:3], first[1][:1]])
    assert len(side.engine.allocate(4, group=1)) == 4
