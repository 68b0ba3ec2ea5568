"""The cells of modelled memory that a posting copies."""

from kvgrpc.core.actions import Post
from kvgrpc.core.values.byte_runs import Runs


def cells_of(post: Post, cell_bytes: int) -> list[tuple[int, int]]:
    """Returns the pairs (source cell, destination cell) that a posting copies, run by run."""
    moved = _pairs(post.runs, cell_bytes)
    if post.repack is None:
        return moved
    staged = {dst: src for src, dst in moved}
    return [(staged[src], dst) for strip in post.repack.strips for src, dst in _pairs(strip.runs(), cell_bytes)]


def _pairs(runs: Runs, cell_bytes: int) -> list[tuple[int, int]]:
    columns = runs.src, runs.dst, runs.nbytes
    assert not any((column % cell_bytes).any() for column in columns), f"runs that cut cells of {cell_bytes} bytes"
    rows = zip(*((column // cell_bytes).tolist() for column in columns), strict=True)
    return [(src + i, dst + i) for src, dst, count in rows for i in range(count)]
