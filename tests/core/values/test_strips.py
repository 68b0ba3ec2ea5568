"""Strips out of a staging buffer become strips out of the source, unless a copy spans two runs."""

import numpy as np

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.strips import Repack, Strip


def ids(*numbers: int) -> Ids:
    return np.array(numbers, dtype=np.int64)


RUNS = Runs(ids(1_000, 5_000, 3_000), ids(64, 0, 128), ids(64, 64, 32))
"""Runs in no particular order."""


def strip(*places: int) -> Strip:
    """Makes a strip whose copies each take 32 bytes: two runs of 8 bytes, 24 bytes apart."""
    return Strip(ids(*places), ids(*range(0, 100 * len(places), 100)), (2,), (24,), (8,), 8)


def test_a_strip_is_found_in_the_runs_that_its_copies_are_of() -> None:
    straight = Repack((strip(0, 64, 96), strip(128, 32)), 160).at_source(RUNS)
    assert straight is not None
    assert [found.src.tolist() for found in straight] == [[5_000, 1_000, 1_032], [3_000, 5_032]]
    for found, before in zip(straight, (strip(0, 64, 96), strip(128, 32)), strict=True):
        assert found.dst.tolist() == before.dst.tolist()
        assert (found.shape, found.src_steps, found.dst_steps, found.run_bytes) == ((2,), (24,), (8,), 8)


def test_what_is_out_of_two_runs_or_of_none_is_not_found() -> None:
    assert Repack((strip(0), strip(33)), 160).at_source(RUNS) is None
    assert Repack((strip(0, 129),), 160).at_source(RUNS) is None
    gap = Runs(ids(0), ids(8), ids(64))
    assert Repack((strip(0),), 160).at_source(gap) is None
    assert Repack((strip(8),), 160).at_source(gap) is not None
