"""Re-packs: strips are copied from a staging buffer into a rank's memory, by `kvgrpc_copy_strips` of `rows.c`.

A strip stands for up to thousands of runs, which one call copies. Without the library the runs are listed, some at a
time, and copied as rows.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.strips import DIMENSIONS_MAX, Repack, Strip
from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.copy import copy_methods, rows
from kvgrpc.datapath.host.addresses import Rows, addresses_of, groups, to_rows, within_one

RUNS_MAX = 1 << 22
"""Maximum runs of one re-pack: 64 MiB in runs of 16 bytes."""
STEPS_END = 1 << 62
"""Exclusive bound of steps, also of a dimension of one index."""
LISTED_MAX = 1 << 16
"""Number of runs that are listed at a time."""

CopyStrip = Callable[[Strip], None]
"""Function that copies a strip whose places are addresses of this process."""


def check_strips(repack: Repack, own_bytes: int) -> None:
    """Raises DataPathFailed unless every strip reads within the staging buffer and writes within the rank's memory."""
    runs = written = 0
    for number, strip in enumerate(repack.strips):
        _check_form(number, strip)
        runs += len(strip.src) * strip.runs_each
        written += strip.total_bytes
        if runs > RUNS_MAX or written > own_bytes:
            raise DataPathFailed(
                f"the re-pack has {runs} runs of {written} bytes, or more; {RUNS_MAX} runs are the limit, and the"
                f" rank's memory has {own_bytes} bytes"
            )
        for side, places, steps, limit in (
            ("staging buffer", strip.src, strip.src_steps, repack.staging_bytes),
            ("rank's memory", strip.dst, strip.dst_steps, own_bytes),
        ):
            # Python's integers do not wrap around.
            extent = strip.extent(steps)
            first, last = int(places.min()), int(places.max())
            if first < 0 or last > limit - extent:
                raise DataPathFailed(
                    f"strip {number} covers {extent} bytes from offsets {first} to {last} of the {side}, which has"
                    f" {limit} bytes"
                )


def works_of(
    strips: Sequence[Strip], source: Segment, own: Sequence[Segment], work_bytes: int
) -> list[Callable[[], None]]:
    """Returns checked strips, out of a buffer or a peer's memory, as calls that may run concurrently. Each copies about
    `work_bytes` bytes or fewer.
    """
    return [
        work for strip in strips for work in _works(replace(strip, src=strip.src + source.address), own, work_bytes)
    ]


def slices_of(strips: Sequence[Strip], slice_bytes: int) -> Iterator[Sequence[Strip]]:
    """Yields the same copies in pieces of at most `slice_bytes`, or of one run."""
    for strip in strips:
        each = strip.runs_each * strip.run_bytes
        if each > slice_bytes and strip.shape:
            yield from slices_of([_taken_apart(strip)], slice_bytes)
            continue
        copies = max(slice_bytes // each, 1)
        for first in range(0, len(strip.src), copies):
            yield [_some(strip, slice(first, first + copies))]


def _works(strip: Strip, own: Sequence[Segment], work_bytes: int) -> Iterator[Callable[[], None]]:
    """Yields calls for a strip whose sources are addresses already."""
    each = strip.runs_each * strip.run_bytes
    if each > work_bytes:
        yield from _works(_taken_apart(strip), own, work_bytes) if strip.shape else _across(strip, own, work_bytes)
        return
    one = within_one(strip.dst, strip.extent(strip.dst_steps), own)
    if not one.all():
        # A copy that ends in another segment than it begins in is cut until it does not.
        yield from _across(_some(strip, ~one), own, work_bytes)
        strip = _some(strip, one)
    strip = replace(strip, dst=addresses_of(strip.dst, own))
    copies = max(work_bytes // each, 1)
    copy = copier()
    for first in range(0, len(strip.src), copies):
        yield partial(copy, _some(strip, slice(first, first + copies)))


def _across(strip: Strip, own: Sequence[Segment], work_bytes: int) -> Iterator[Callable[[], None]]:
    if strip.shape:
        yield from _works(_taken_apart(strip), own, work_bytes)
        return
    runs = strip.runs()
    # The source is one segment of all memory, since its places are addresses.
    cut = to_rows(runs, [Segment(0, 1 << 62)], own, max(work_bytes, 1))
    for first, end in groups(cut[:, 2], work_bytes, LISTED_MAX):
        yield partial(_copy_rows, cut[first:end])


def _taken_apart(strip: Strip) -> Strip:
    """Returns the same runs in the same order, as copies without the first dimension."""
    index = np.arange(strip.shape[0], dtype=np.int64)
    src, dst = (
        (places[:, None] + index * steps[0]).reshape(-1)
        for places, steps in ((strip.src, strip.src_steps), (strip.dst, strip.dst_steps))
    )
    return Strip(src, dst, strip.shape[1:], strip.src_steps[1:], strip.dst_steps[1:], strip.run_bytes)


def _some(strip: Strip, copies: slice | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Strip:
    return replace(strip, src=strip.src[copies], dst=strip.dst[copies])


@functools.cache
def copier() -> CopyStrip:
    """Returns the fastest function that works here."""
    return library_copier() or copy_listed


def library_copier() -> CopyStrip | None:
    """Returns the library's function; None if the library was not built, or has no such function."""
    function = getattr(rows.load(), "kvgrpc_copy_strips", None)
    if function is None:
        return None
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def copy(strip: Strip) -> None:
        places = np.stack([strip.dst, strip.src], axis=1)
        missing = DIMENSIONS_MAX - len(strip.shape)
        form = [strip.run_bytes, *[1] * missing, *strip.shape]
        for steps in (strip.dst_steps, strip.src_steps):
            form += [*[0] * missing, *steps]
        numbers = np.array(form, dtype=np.int64)
        function(places.ctypes.data, len(places), numbers.ctypes.data)

    return copy


def copy_listed(strip: Strip) -> None:
    """Copies a strip by listing its runs."""
    while strip.shape and strip.runs_each > LISTED_MAX:
        strip = _taken_apart(strip)
    copies = max(LISTED_MAX // strip.runs_each, 1)
    for first in range(0, len(strip.src), copies):
        runs = _some(strip, slice(first, first + copies)).runs()
        _copy_rows(_rows(runs))


def _rows(runs: Runs) -> Rows:
    return np.stack([runs.dst, runs.src, runs.nbytes], axis=1)


def _copy_rows(rows: Rows) -> None:
    copy = copy_methods.copier(copy_methods.best(float(rows[:, 2].mean())))
    assert copy is not None  # the best one works
    copy(rows)


def _check_form(number: int, strip: Strip) -> None:
    lengths = {len(strip.shape), len(strip.src_steps), len(strip.dst_steps)}
    steps = strip.src_steps + strip.dst_steps
    if (
        len(strip.src) != len(strip.dst)
        or len(lengths) > 1
        or len(strip.shape) > DIMENSIONS_MAX
        or min(strip.run_bytes, len(strip.src), *strip.shape) <= 0
        or not 0 <= min(steps, default=0) <= max(steps, default=0) < STEPS_END
    ):
        raise DataPathFailed(
            f"strip {number} makes no sense: it has {len(strip.src)} sources, {len(strip.dst)} destinations, shape"
            f" {strip.shape}, steps {strip.src_steps} and {strip.dst_steps}, and runs of {strip.run_bytes} bytes"
        )
