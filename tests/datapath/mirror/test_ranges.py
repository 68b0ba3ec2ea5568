"""Ranges hold bytes as sorted runs; the tests compare them with sets of bytes."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.actions import Post
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.strips import Repack, Strip
from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.mirror.ranges import Ranges, filled_by

TOTAL = 64
ROWS = st.lists(st.tuples(st.integers(0, TOTAL - 8), st.integers(0, 8)), max_size=12)


def ranges(rows: list[tuple[int, int]]) -> Ranges:
    offsets, nbytes = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(2))
    return Ranges.of(offsets, nbytes, TOTAL)


def bytes_of(*some: Ranges) -> list[int]:
    rows = [row for one in some for row in zip(one.offsets.tolist(), one.nbytes.tolist(), strict=True)]
    return [at + i for at, count in rows for i in range(count)]


@given(ROWS)
def test_they_are_the_same_bytes_once_and_in_order(rows: list[tuple[int, int]]) -> None:
    assert bytes_of(ranges(rows)) == sorted({at + i for at, count in rows for i in range(count)})


@given(ROWS, ROWS)
def test_they_touch_where_they_have_a_byte_in_common(
    rows: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    mine, theirs = ranges(rows), ranges(others)
    assert mine.touches(theirs) is bool(set(bytes_of(mine)) & set(bytes_of(theirs)))


@given(ROWS, st.integers(1, 16), st.integers(1, 4))
def test_parts_are_the_same_bytes_of_few_runs(rows: list[tuple[int, int]], part_bytes: int, most: int) -> None:
    whole = ranges(rows)
    parts = whole.parts(part_bytes, most)
    assert bytes_of(*parts) == bytes_of(whole)
    assert all(0 < len(part.offsets) <= most for part in parts)
    assert all(part.nbytes.sum() < 2 * part_bytes for part in parts)


def test_neighbours_are_joined() -> None:
    joined = ranges([(8, 8), (0, 8), (32, 4)])
    assert (joined.offsets.tolist(), joined.nbytes.tolist()) == ([0, 32], [16, 4])


@pytest.mark.parametrize("row", [(-1, 4), (60, 5), (0, -1), (1 << 62, 1 << 62)])
def test_what_leaves_the_memory_is_refused(row: tuple[int, int]) -> None:
    with pytest.raises(DataPathFailed):
        ranges([row])


def test_a_re_pack_fills_what_its_strips_write() -> None:
    at = np.array([0, 32], dtype=np.int64)
    strip = Strip(at, at, (2, 2), (8, 4), (16, 8), 4)
    nothing = np.empty(0, dtype=np.int64)
    post = Post(0, "p", "peer", Runs(nothing, nothing, nothing), "t", repack=Repack((strip,), TOTAL))
    found = bytes_of(filled_by(post, TOTAL))
    assert found == [base + i for base in (0, 8, 16, 24, 32, 40, 48, 56) for i in range(4)]
