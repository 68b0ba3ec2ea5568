"""Runs become rows with the same bytes in the same order, within segments and limits."""

from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.datapath.host.addresses import Rows, by_source, cut, groups, slices, to_rows
from tests.datapath.peers import runs_of

Spans = list[tuple[int, int, int]]

TOTAL = 120
SIZES = st.lists(st.integers(1, TOTAL), min_size=1, max_size=6)
SPANS = st.lists(
    st.tuples(st.integers(0, TOTAL), st.integers(0, TOTAL), st.integers(0, TOTAL)).map(
        lambda t: (t[0], t[1], min(t[2], TOTAL - max(t[0], t[1])))
    ),
    max_size=12,
)


def segments(sizes: list[int], first: int) -> list[Segment]:
    """Makes segments of TOTAL bytes together, far apart from each other."""
    edges = sorted({min(edge, TOTAL) for edge in np.cumsum(sizes).tolist()} | {TOTAL})
    lengths = np.diff([0, *edges]).tolist()
    return [Segment(first + 1000 * i, n) for i, n in enumerate(lengths)]


def bytes_of(runs: Runs) -> list[tuple[int, int]]:
    """Returns (source, destination) of each byte, in order."""
    rows = zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True)
    return [(src + i, dst + i) for src, dst, n in rows for i in range(n)]


def address(offset: int, parts: list[Segment]) -> int:
    for part in parts:
        if offset < part.nbytes:
            return part.address + offset
        offset -= part.nbytes
    raise AssertionError("outside")


def bytes_of_rows(rows: Rows) -> list[tuple[int, int]]:
    return [(src + i, dst + i) for dst, src, n in rows.tolist() for i in range(n)]


@given(SPANS, SIZES, SIZES, st.integers(1, TOTAL + 1))
def test_rows_are_the_same_within_segments(spans: Spans, source: list[int], destination: list[int], limit: int) -> None:
    runs, here, there = runs_of(*spans), segments(source, 10_000), segments(destination, 900_000)
    rows = to_rows(runs, here, there, limit)
    wanted = [(address(src, here), address(dst, there)) for src, dst in bytes_of(runs)]
    assert bytes_of_rows(rows) == wanted
    assert all(1 <= n <= limit for n in rows[:, 2].tolist())
    assert rows.flags.c_contiguous


ADDRESSES = st.lists(st.integers(0, 2**40), min_size=1, max_size=40)


@given(ADDRESSES, st.integers(0, 2**47 - 2**40))
def test_rows_by_source_are_the_same_ones_and_in_the_order_of_their_sources_within_places(
    sources: list[int], base: int
) -> None:
    rows = np.array([(i, base + at, 1) for i, at in enumerate(sources)], dtype=np.int64)
    found = by_source(rows)
    assert sorted(found.tolist()) == sorted(rows.tolist())
    assert found.flags.c_contiguous
    place = (max(sources) - min(sources)) / 2**15
    assert all(before - after <= place for before, after in pairwise(found[:, 1].tolist()))


@given(SPANS, st.integers(1, TOTAL))
def test_a_cut_keeps_the_bytes_and_the_limit(spans: Spans, limit: int) -> None:
    runs = runs_of(*spans)
    after = cut(runs, limit)
    assert bytes_of(after) == bytes_of(runs)
    assert all(1 <= n <= limit for n in after.nbytes.tolist())


@given(SPANS, st.integers(1, TOTAL))
def test_slices_are_the_bytes_in_order_and_bounded(spans: Spans, slice_bytes: int) -> None:
    runs = runs_of(*spans)
    parts = list(slices(runs, slice_bytes))
    assert [pair for part in parts for pair in bytes_of(part)] == bytes_of(runs)
    assert all(0 < part.total_bytes < 2 * slice_bytes for part in parts)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200), st.integers(1, 20))
def test_groups_cover_all_rows_once_within_both_limits(lengths: list[int], group_bytes: int, max_rows: int) -> None:
    ranges = groups(np.array(lengths, dtype=np.int64), group_bytes, max_rows)
    assert [i for first, end in ranges for i in range(first, end)] == list(range(len(lengths)))
    for first, end in ranges:
        assert 1 <= end - first <= max_rows
        assert sum(lengths[first : end - 1]) < group_bytes


def test_the_largest_request_becomes_one_row_for_each_run() -> None:
    offsets = np.arange(65_536, dtype=np.int64) * 64
    whole = [Segment(1 << 20, len(offsets) * 64)]
    rows = to_rows(Runs(offsets, offsets, np.full_like(offsets, 64)), whole, whole, 1 << 20)
    assert np.array_equal(rows[:, 0], offsets + (1 << 20))
