"""Patterns: the copies of runs that one block takes from a region of the source to a region of the destination.

A pattern is the intersection of the strided views of both: layers, keys or values, the heads of one share, the tokens
of one unit. Dimensions that are contiguous on both sides are merged into one run.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from kvgrpc.core.values.head_shares import HeadShare
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, TensorKind
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.views import View, view_of


class Dimension(NamedTuple):
    """One dimension of a pattern outside its runs."""

    size: int
    src_step: int
    dst_step: int


@dataclass(frozen=True)
class Pattern:
    """The copies of one unit. Offsets are in the memories of two ranks, for block 0 and a unit at the block's begin."""

    source: Region
    first_layer: int
    layers: int
    src: int
    dst: int
    src_stride: int
    """Distance from one block to the next."""
    dst_stride: int
    src_token: int
    """Distance from one token to the next; used if units are parts of blocks."""
    dst_token: int
    dimensions: tuple[Dimension, ...]
    """Dimensions, the outermost first."""
    run_bytes: int

    @property
    def runs(self) -> int:
        return prod(dimension.size for dimension in self.dimensions)

    @property
    def nbytes(self) -> int:
        return self.runs * self.run_bytes

    @property
    def steps(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Sizes of the dimensions, and their steps at the source and at the destination."""
        sizes, src_steps, dst_steps = zip(*self.dimensions, strict=True) if self.dimensions else ((), (), ())
        return sizes, src_steps, dst_steps


def unit_tokens(source: Group, destination: Group) -> int:
    """Returns the tokens that are moved at once: a whole block of the side with smaller blocks. A state is one unit."""
    if source.kind is GroupKind.STATE:
        return source.block_tokens
    return min(source.block_tokens, destination.block_tokens)


def patterns_of(source: PoolLayout, destination: PoolLayout, group: int, share: HeadShare) -> list[Pattern]:
    """Returns the copies of one unit of a group within a share, each byte of the destination's heads once.

    `kvgrpc.core.values.obstacles` must have found no obstacle between the pools.
    """
    here, there = source.groups[group], destination.groups[group]
    found = []
    regions = _Regions([region for region in source.by_group[group] if region.stage == share.source_stage], here)
    for to in (region for region in destination.by_group[group] if region.stage == share.stage):
        into = view_of(there, to)
        for region in regions.overlapping(to, into):
            view = view_of(here, region)
            if share.section is not None:
                found.append(_of_section(here, region, there, to, share))
            elif view is None or into is None or _alike(here, there, region, to, share):
                found.append(_whole(region, to))
            else:
                assert view.run_bytes == into.run_bytes, "both tell tokens apart, and keys and values, or none"
                tokens = unit_tokens(here, there) if view.tells_tokens else 1
                found += [
                    _common(_Seen(region, view), _Seen(to, into), share, tokens, parts)
                    for parts in _parts_alike(view, into)
                ]
    return found


class _Regions:
    """The regions of one group of the source, by keys and values."""

    def __init__(self, regions: Sequence[Region], group: Group) -> None:
        self._by_part: dict[int, list[Region]] = {}
        for region in sorted(regions, key=lambda region: region.first_layer):
            view = view_of(group, region)
            for part in _parts(region, view):
                self._by_part.setdefault(part, []).append(region)
        self._firsts = {part: [region.first_layer for region in some] for part, some in self._by_part.items()}

    def overlapping(self, region: Region, view: View | None) -> list[Region]:
        """Returns the regions that share layers and keys or values with a region, each once."""
        found: dict[int, Region] = {}
        for part in _parts(region, view):
            some = self._by_part.get(part, [])
            at = max(bisect_right(self._firsts.get(part, []), region.first_layer) - 1, 0)
            while at < len(some) and some[at].first_layer < region.first_layer + region.layers:
                if some[at].first_layer + some[at].layers > region.first_layer:
                    found[id(some[at])] = some[at]
                at += 1
        return list(found.values())


def _parts(region: Region, view: View | None) -> range:
    """Returns which of keys (0) and values (1) a region is found by. If nothing is known of its inside, both sides have
    them in regions of the same kind.
    """
    if view is None:
        part = int(region.tensor is TensorKind.V)
        return range(part, part + 1)
    return range(view.first_part, view.first_part + view.parts)


def _alike(source: Group, destination: Group, region: Region, to: Region, share: HeadShare) -> bool:
    """Returns True if a whole block has the same bytes on both sides."""
    groups = (source.block_tokens, source.order) == (destination.block_tokens, destination.order)
    blocks = (region.strides, region.block_bytes, region.tensor) == (to.strides, to.block_bytes, to.tensor)
    layers = (region.first_layer, region.layers) == (to.first_layer, to.layers)
    return groups and blocks and layers and share.heads == source.kv_heads == destination.kv_heads


def _whole(region: Region, to: Region) -> Pattern:
    layers, strides = (region.first_layer, region.layers), (region.stride_bytes, to.stride_bytes)
    return Pattern(region, *layers, region.offset, to.offset, *strides, 0, 0, (), region.block_bytes)


def _of_section(source: Group, region: Region, destination: Group, to: Region, share: HeadShare) -> Pattern:
    src, dst = (
        one.offset + sum(section.nbytes for section in group.sections[: share.section]) + first
        for group, one, first in ((source, region, share.source_first), (destination, to, share.first))
    )
    return Pattern(
        region, region.first_layer, region.layers, src, dst, region.stride_bytes, to.stride_bytes, 0, 0, (), share.heads
    )


def _parts_alike(view: View, into: View) -> list[range]:
    """Returns the keys and values that both have, as separate ranges if either side's keys stand in columns."""
    parts = range(
        max(view.first_part, into.first_part), min(view.first_part + view.parts, into.first_part + into.parts)
    )
    if view.strides.key_element or into.strides.key_element:
        return [range(part, part + 1) for part in parts]
    return [parts]


class _Seen(NamedTuple):
    """A region, and the view of its blocks."""

    region: Region
    view: View

    def begin(self, layer: int, part: int, head: int) -> int:
        """Returns the memory offset, in block 0, of one part (keys or values) of a head in a layer."""
        view = self.view
        within = (layer - view.first_layer, part - view.first_part, head)
        return self.region.offset + sum(a * b for a, b in zip(within, view.strides[:3], strict=True))


def _common(source: _Seen, destination: _Seen, share: HeadShare, tokens: int, parts: range) -> Pattern:
    view, into = source.view, destination.view
    layer = max(view.first_layer, into.first_layer)
    layers = min(view.first_layer + view.layers, into.first_layer + into.layers) - layer
    counts = layers, len(parts), share.heads, tokens, view.elements
    steps = [[*seen.strides[:3], *seen.inner(parts.start)] for seen in (view, into)]
    dimensions, run_bytes = _joined(
        [Dimension(*row) for row in zip(counts, *steps, strict=True)], view.run_bytes // view.elements
    )
    begins = source.begin(layer, parts.start, share.source_first), destination.begin(layer, parts.start, share.first)
    strides = source.region.stride_bytes, destination.region.stride_bytes
    return Pattern(source.region, layer, layers, *begins, *strides, steps[0][3], steps[1][3], dimensions, run_bytes)


def _joined(dimensions: list[Dimension], run_bytes: int) -> tuple[tuple[Dimension, ...], int]:
    """Returns the same copies with the fewest and longest runs."""
    found: list[Dimension] = []
    for dimension in sorted((d for d in dimensions if d.size > 1), key=lambda d: d.dst_step):
        size, src_step, dst_step = dimension
        inner = found[-1] if found else Dimension(1, run_bytes, run_bytes)
        if (src_step, dst_step) != (inner.size * inner.src_step, inner.size * inner.dst_step):
            found.append(dimension)
        elif found:
            found[-1] = inner._replace(size=inner.size * size)
        else:
            run_bytes *= size
    return tuple(reversed(found)), run_bytes
