"""Strips are copied run for run as listed, by every copier, into memory of any segments, and no other byte changes."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.strips import Repack, Strip
from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.copy import rows, strips
from kvgrpc.datapath.copy.strips import (
    LISTED_MAX,
    RUNS_MAX,
    STEPS_END,
    CopyStrip,
    check_strips,
    copy_listed,
    library_copier,
    slices_of,
    works_of,
)
from tests.datapath.peers import GUARD, Bytes, content, gather

COPIERS = {"library": library_copier(), "listed": copy_listed}


@pytest.fixture(params=COPIERS)
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CopyStrip:
    chosen: CopyStrip | None = COPIERS[request.param]
    if chosen is None:
        pytest.skip("the package was installed without a C compiler")
    monkeypatch.setattr(strips, "copier", lambda: chosen)
    return chosen


def strip(src: Sequence[int], dst: Sequence[int], *form: Any) -> Strip:
    return Strip(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64), *form)


def expected(before: Bytes, buffer: Bytes, repack: Repack) -> Bytes:
    after = before.copy()
    for part in repack.strips:
        runs = part.runs()
        for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
            after[dst : dst + nbytes] = buffer[src : src + nbytes]
    return after


def repacked(repack: Repack, sizes: Sequence[int], work_bytes: int = 1 << 20) -> tuple[Bytes, Bytes]:
    """Runs a re-pack into memory of these segments, and returns the memory afterwards and the expected bytes."""
    own_bytes = sum(sizes)
    check_strips(repack, own_bytes)
    buffer, wide = content(1, repack.staging_bytes), [np.full(size + 128, GUARD, dtype=np.uint8) for size in sizes]
    parts = [array[(begin := -array.ctypes.data % 64) : begin + size] for array, size in zip(wide, sizes, strict=True)]
    want = expected(gather(parts), buffer, repack)
    segments = [Segment(part.ctypes.data, len(part)) for part in parts]
    for work in works_of(repack.strips, Segment(buffer.ctypes.data, len(buffer)), segments, work_bytes):
        work()
    for array, part in zip(wide, parts, strict=True):
        begin = part.ctypes.data - array.ctypes.data
        assert (array[:begin] == GUARD).all()
        assert (array[begin + len(part) :] == GUARD).all()
    return gather(parts), want


HEADS = strip([0, 8192, 4096], [4096, 0, 8192], (2, 16), (2048, 128), (1024, 64), 64)
"""Strip of the first of two heads, from blocks of 16 tokens with keys and values into blocks of one head."""
FORMS = {
    "lines": Repack((HEADS,), 12288),
    "lines off the lines": Repack((replace(HEADS, dst=HEADS.dst + 16),), 12288),
    "odd places": Repack((replace(HEADS, dst=HEADS.dst + 3),), 12288),
    **{
        f"runs of {n} bytes": Repack((strip([5, 4000], [1, 2000], (5, 3), (n * 7, n), (n * 3, n), n),), 1 << 15)
        for n in (1, 16, 32, 63, 64, 128, 192, 256, 300)
    },
    "four dimensions": Repack(
        (strip([0], [64], (2, 2, 2, 4), (8192, 4096, 64, 512), (8192, 4096, 2048, 64), 64),), 1 << 15
    ),
    "no dimensions": Repack((strip([0, 700, 99], [700, 0, 400], (), (), (), 200),), 1000),
    "one byte in all": Repack((strip([9], [11], (), (), (), 1),), 10),
    "a token read by several heads": Repack((strip([0], [0], (4, 8), (0, 64), (512, 64), 64),), 512),
    "two strips": Repack((HEADS, strip([64], [20000], (2, 16), (2048, 128), (1024, 64), 64)), 12288),
    "nothing": Repack((), 0),
}


@pytest.mark.usefixtures("copier")
def test_strips_are_copied_run_for_run(subtests: pytest.Subtests) -> None:
    segments = [32768], [10007, 9, 22752], [12288, 12288, 8192]
    for form, work_bytes, sizes in itertools.product(FORMS, [1 << 20, 1000, 1], segments):
        with subtests.test(form, work_bytes=work_bytes, sizes=sizes):
            assert np.array_equal(*repacked(FORMS[form], sizes, work_bytes))


@pytest.mark.parametrize("sizes", [[1 << 20], [300_000, (1 << 20) - 300_000]], ids=["one segment", "two segments"])
@pytest.mark.parametrize("form", [(), ((1,), (0,), (0,))], ids=["no dimensions", "one"])
def test_a_long_run_is_cut_so_that_several_threads_copy_it(sizes: list[int], form: tuple[Any, ...]) -> None:
    nbytes, work_bytes = (1 << 20) - 64, 1 << 16
    long = Repack((strip([64], [0], *(form or ((), (), ())), nbytes),), 1 << 20)
    assert np.array_equal(*repacked(long, sizes, work_bytes))
    places, at = [], 0
    for size in sizes:
        places.append(Segment(at, size))
        at += size
    works = works_of(long.strips, Segment(0, 1 << 20), places, work_bytes)
    assert nbytes / (2 * work_bytes) <= len(works) <= nbytes / work_bytes + 2


def listed(strips: Sequence[Strip]) -> list[tuple[int, int, int]]:
    """Returns all runs, ordered by destination."""
    runs = [part.runs() for part in strips]
    return sorted(
        row for some in runs for row in zip(some.dst.tolist(), some.src.tolist(), some.nbytes.tolist(), strict=True)
    )


DIMENSIONS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 300)), max_size=4)


@given(st.data(), DIMENSIONS, st.integers(1, 130), st.integers(1, 5), st.integers(1, 5000))
def test_any_strip_is_copied_run_for_run(
    data: st.DataObject, dimensions: list[tuple[int, int]], run_bytes: int, copies: int, work_bytes: int
) -> None:
    """Destinations lie one after the other, so that no two runs write the same byte."""
    shape, src_steps = tuple(n for n, _ in dimensions), tuple(step for _, step in dimensions)
    room = run_bytes + data.draw(st.integers(0, 70))
    dst_steps = tuple(room * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    each = room * int(np.prod(shape))
    src = data.draw(st.lists(st.integers(0, 5000), min_size=copies, max_size=copies))
    found = strip(src, [i * each for i in range(copies)], shape, src_steps, dst_steps, run_bytes)
    own = copies * each
    first = data.draw(st.integers(1, own))
    repack = Repack((found,), found.ends()[0])
    assert np.array_equal(*repacked(repack, [first, own - first] if own > first else [own], work_bytes))
    slices = list(slices_of(repack.strips, work_bytes))
    assert max(sum(part.total_bytes for part in some) for some in slices) <= max(work_bytes, run_bytes)
    assert listed([part for some in slices for part in some]) == listed(repack.strips)


def test_more_runs_than_are_listed_at_a_time_are_copied() -> None:
    count = 2 * LISTED_MAX
    many = strip([1], [0], (2, count // 2), (0, 1), (count // 2, 1), 1)
    buffer, memory = content(2, count), np.full(count + 1, GUARD, dtype=np.uint8)
    copy_listed(replace(many, src=many.src + buffer.ctypes.data, dst=many.dst + memory.ctypes.data))
    assert np.array_equal(memory[:count], np.tile(buffer[1 : count // 2 + 1], 2))
    assert memory[count] == GUARD


GOOD = strip([0, 100], [0, 200], (2, 3), (30, 10), (30, 10), 10)
LAST = 2**63 - 1
BAD = {
    "starts before the buffer": replace(GOOD, src=np.array([-1, 100])),
    "ends past the buffer": replace(GOOD, src=np.array([0, 941])),
    "starts before the memory": replace(GOOD, dst=np.array([-1, 200])),
    "ends past the memory": replace(GOOD, dst=np.array([0, 1941])),
    "begins at the end of all numbers": replace(GOOD, src=np.array([0, LAST])),
    "writes at the end of all numbers": replace(GOOD, dst=np.array([LAST, 0])),
    "steps over all numbers": replace(GOOD, src_steps=(LAST, LAST)),
    "steps far": replace(GOOD, dst_steps=(1 << 61, 1 << 61)),
    "a step that one index does not take": replace(GOOD, shape=(1, 3), src_steps=(STEPS_END, 10)),
    "steps back": replace(GOOD, dst_steps=(-30, 10)),
    "no index": replace(GOOD, shape=(0, 3)),
    "fewer than no indices": replace(GOOD, shape=(-1, -3)),
    "more runs than numbers": replace(GOOD, shape=(LAST, LAST), src_steps=(0, 0), dst_steps=(0, 0)),
    "more runs than may be": replace(GOOD, shape=(RUNS_MAX, 1), src_steps=(0, 0), dst_steps=(0, 0)),
    "more bytes than the memory has": replace(GOOD, shape=(2, 51), src_steps=(0, 0), dst_steps=(0, 0)),
    "no bytes": replace(GOOD, run_bytes=0),
    "fewer than no bytes": replace(GOOD, run_bytes=-1),
    "all bytes": replace(GOOD, run_bytes=LAST),
    "no places": replace(GOOD, src=GOOD.src[:0], dst=GOOD.dst[:0]),
    "fewer destinations than sources": replace(GOOD, dst=GOOD.dst[:1]),
    "fewer steps than dimensions": replace(GOOD, dst_steps=(10,)),
    "five dimensions": replace(GOOD, shape=(1,) * 5, src_steps=(0,) * 5, dst_steps=(0,) * 5),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_strip_that_leaves_the_buffer_or_the_memory_or_makes_no_sense_is_refused(bad: Strip) -> None:
    check_strips(Repack((GOOD,), 1000), 2000)
    with pytest.raises(DataPathFailed, match=r"strip|re-pack"):
        check_strips(Repack((GOOD, bad), 1000), 2000)


def test_strips_are_counted_together() -> None:
    with pytest.raises(DataPathFailed, match="memory has 2000 bytes"):
        check_strips(Repack((GOOD,) * 17, 1000), 2000)


def test_a_library_from_before_leaves_strips_to_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "load", lambda: None)
    assert library_copier() is None
    assert strips.copier.__wrapped__() is copy_listed
