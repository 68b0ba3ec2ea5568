"""Block ids as rows keep them: runs or plain ids, whichever takes less memory."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.values.block_ids import (
    FEW_IDS,
    BlockLists,
    Blocks,
    KeptBlocks,
    blocks_bytes,
    keeping,
    keeping_lists,
    kept,
    kept_bytes,
    lists_kept,
    no_blocks,
    pack,
    unpack,
)
from tests.core.nodes import ids

LONG = np.arange(65_536)


@keeping("blocks")
@dataclass(frozen=True, eq=False)
class Row:
    blocks: Blocks | None
    name: str


@keeping_lists("blocks")
@dataclass(frozen=True, eq=False)
class Listed:
    blocks: BlockLists


@given(st.lists(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 200)), max_size=4), min_size=1, max_size=3))
def test_blocks_are_what_they_were(groups: list[list[tuple[int, int]]]) -> None:
    blocks = tuple(
        np.concatenate([ids(), *(np.arange(start, start + count) for start, count in runs)]) for runs in groups
    )
    assert [found.tolist() for found in unpack(pack(blocks))] == [group.tolist() for group in blocks]


def test_few_blocks_are_kept_as_they_are() -> None:
    few = (ids(3, 4), ids())
    assert pack(few) is few
    assert unpack(few) is few


def test_a_run_of_any_length_is_little() -> None:
    assert kept_bytes(pack((LONG,))) < 1_000
    assert blocks_bytes((LONG, ids(7))) < 1_200


def test_many_short_runs_are_kept_as_ids() -> None:
    scattered = LONG[::2].copy()
    assert kept_bytes(pack((scattered,))) > scattered.nbytes


@pytest.mark.parametrize("count", [3, FEW_IDS + 1])
def test_nothing_is_kept_of_what_blocks_were_cut_from(count: int) -> None:
    scattered = LONG[::2].copy()
    found = pack((scattered[:count],))
    (part,) = unpack(found)
    assert part.tolist() == scattered[:count].tolist()
    assert part.base is None


@pytest.mark.parametrize("scattered", range(33))
@pytest.mark.parametrize("first", [True, False])
def test_blocks_are_kept_as_runs_just_where_runs_are_a_quarter_of_them_at_most(scattered: int, first: bool) -> None:
    """Some of 32 runs of eight ids are scattered ids, at the beginning or at the end."""
    apart, together = np.arange(0, 16 * scattered, 2), 10_000 + np.arange(8 * (32 - scattered))
    made = np.concatenate((apart, together) if first else (together, apart))
    runs = 1 + int(np.count_nonzero(np.diff(made) != 1))
    found = pack((made,))
    assert isinstance(found, KeptBlocks) == (4 * runs < len(made))
    assert unpack(found)[0].tolist() == made.tolist()


def test_no_blocks_weigh_next_to_nothing() -> None:
    assert kept_bytes(no_blocks(3)) == kept_bytes(pack(no_blocks(3))) == 24


def test_a_field_keeps_blocks_as_runs() -> None:
    row = Row((LONG,), "row")
    assert isinstance(kept(row), KeptBlocks)
    assert row.blocks is not None
    assert row.blocks[0].tolist() == LONG.tolist()
    again = replace(row, name="other")
    assert again.blocks is not None
    assert len(again.blocks[0]) == len(LONG)
    assert Row(None, "none").blocks is None


def test_a_field_of_lists_keeps_blocks_as_runs() -> None:
    row, few = Listed(((1, LONG), (0, ids(4)))), Listed(((1, ids(3)), (0, ids(4))))
    assert [(group, len(found)) for group, found in row.blocks] == [(1, 65_536), (0, 1)]
    assert [(group, found.tolist()) for group, found in few.blocks] == [(1, [3]), (0, [4])]
    assert kept_bytes(lists_kept(row)) < 1_200
    assert kept_bytes(lists_kept(few)) < 300
