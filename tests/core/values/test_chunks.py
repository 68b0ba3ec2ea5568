"""Bytes and blocks that a checksum covers, and the message that names a difference."""

from dataclasses import replace

from kvgrpc.core.values.chunks import Chunk, Size
from kvgrpc.core.values.layout import PoolLayout, Region, uniform_layout
from kvgrpc.core.values.pieces import pieces_of, place_of
from kvgrpc.core.values.slices import batches, slices_of
from tests.core.nodes import full, hybrid, ids
from tests.core.values.planned import alone, planned


def test_a_checksum_is_over_the_regions_of_a_block_in_their_order_and_of_those_layers_only() -> None:
    pool = uniform_layout(full(8, layers=3).groups[0], 8)
    regions = pool.regions
    found = pieces_of(pool, [((ids(5, 2),), None), ((ids(1),), (1, 1))])
    assert found.counts.tolist() == [len(regions)] * 2 + [1]
    assert found.offsets.tolist() == [r.offset + block * r.stride_bytes for block in (5, 2) for r in regions] + [
        regions[1].offset + regions[1].stride_bytes
    ]
    assert found.nbytes.tolist() == [regions[0].block_bytes] * (2 * len(regions) + 1)


def test_groups_without_blocks_or_without_those_layers_have_no_checksums() -> None:
    pool = hybrid()
    found = pieces_of(pool, [((ids(), ids(3)), None), ((ids(), ids()), None)])
    assert found.counts.tolist() == [1]
    assert not len(pieces_of(pool, []).counts)


def test_a_difference_is_named_by_its_block_at_both_sides() -> None:
    pool = full(8, layers=3)
    chunks = [Chunk((ids(5, 2),), (ids(0, 1),), None), Chunk((ids(7),), (ids(4),), (1, 2))]
    assert place_of(pool, chunks, 1) == "block 2 of group 0, received into block 1"
    assert place_of(pool, chunks, 2) == "block 7 of group 0, layers 1 +2, received into block 4"
    two = hybrid()
    late = [Chunk((ids(1), ids(2)), (ids(3), ids(4)), None)]
    assert place_of(two, late, 1) == "block 2 of group 1, received into block 4"


def test_groups_without_those_layers_count_for_nothing() -> None:
    pool = PoolLayout(
        (*full(8, layers=3).groups, replace(full(8, layers=1).groups[0], name="shallow")),
        (*full(8, layers=3).regions, Region(1, 0, 1, 192, 8, 8)),
        256,
    )
    deep = Chunk((ids(5), ids(6)), (ids(0), ids(1)), (1, 2))
    other = Chunk((ids(7), ids()), (ids(2), ids()), None)
    assert len(pieces_of(pool, [(deep.source, deep.layers)]).counts) == 1
    assert place_of(pool, [deep, other], 1) == "block 7 of group 0, received into block 2"
    bridge = alone(pool)
    slices = slices_of([deep, other], bridge, Size(1, 9, 9))
    assert [len(planned(bridge, part)) for part in slices] == [2, 3]
    assert bridge.size_of([deep, other]) == Size(8 * 5, 3, 5)


def test_a_source_is_asked_for_so_many_blocks_at_once_in_their_order() -> None:
    bridge, most = alone(full(8)), Size(999, 999, 999)
    chunks = [Chunk((ids(5, 2, 7),), (ids(0, 1, 4),), None), Chunk((ids(6),), (ids(3),), (0, 2))]
    parts = slices_of(chunks, bridge, most._replace(nbytes=1))
    assert [part.source[0].tolist() for part in parts] == [[5], [2], [7], [6]]
    asked = batches(parts, bridge, most._replace(blocks=2))
    assert [[part.source[0].tolist() for part in some] for some in asked] == [[[5], [2]], [[7], [6]]]
    assert [len(some) for some in batches(parts, bridge, most._replace(blocks=1))] == [1, 1, 1, 1]


def test_what_is_planned_at_once_has_so_many_bytes_blocks_and_runs() -> None:
    """Each block has 8 bytes in each of two layers."""
    bridge, most = alone(full(8)), Size(999, 999, 999)
    chunks = [Chunk((ids(5, 2, 7),), (ids(0, 1, 4),), None)]
    for least in (most._replace(nbytes=47), most._replace(blocks=2), most._replace(runs=5)):
        parts = slices_of(chunks, bridge, least)
        assert [part.source[0].tolist() for part in parts] == [[5, 2], [7]]
        assert [len(some) for some in batches(parts, bridge, least)] == [1, 1]
        assert [len(some) for some in batches(parts, bridge, most)] == [2]
