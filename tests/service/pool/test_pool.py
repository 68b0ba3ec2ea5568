"""PoolService: allocation in a server-managed pool, its counts, and its bytes for debugging."""

import pytest

from kvgrpc.v1 import common_pb2, pool_pb2, pool_types_pb2
from tests.service.api import refused
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import BLOCK_BYTES, LAYER_BYTES, Engine, unchanged, wait_until
from tests.service.values import dur, group, ids_of, prompt, seconds

Counts = list[tuple[int, int]]


def allocate(engine: Engine, *counts: tuple[int, int], **fields: object) -> pool_pb2.AllocateBlocksResponse:
    rows = [pool_pb2.GroupBlockCount(group=index, block_count=count) for index, count in counts]
    return engine.api.pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(group_block_counts=rows, **fields))  # type: ignore[arg-type]


def test_allocated_blocks_are_out_until_they_are_freed(source: Engine) -> None:
    first, second = source.allocate(5), source.allocate(5)
    assert not set(first) & set(second)
    counts = source.counts()
    assert (counts.allocated_block_count, counts.pinned_block_count) == (10, 0)
    assert counts.free_block_count == counts.block_count - 10
    assert source.free(first) == first
    assert source.counts().allocated_block_count == 5


def test_an_allocation_is_all_or_nothing_and_says_when_to_come_back(source: Engine) -> None:
    source.allocate(514)
    with unchanged(source):
        with refused(source.api, "RESOURCE_EXHAUSTED", "POOL_EXHAUSTED"):
            allocate(source, (0, 7))
        assert source.api.refusal(lambda: allocate(source, (0, 7))).retry_delay_s
    assert len(source.allocate(6)) == 6


@pytest.mark.parametrize(
    ("counts", "code", "reason"),
    [
        ([], "INVALID_ARGUMENT", "INVALID_FIELD"),
        ([(4_294_967_295, 1)], "INVALID_ARGUMENT", "GROUP_MISMATCH"),
        ([(0, 4_294_967_295)], "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
    ],
)
def test_an_impossible_allocation_is_refused(source: Engine, counts: Counts, code: str, reason: str) -> None:
    with unchanged(source), refused(source.api, code, reason):
        allocate(source, *counts)


def test_an_allocation_has_a_positive_ttl_or_none(source: Engine) -> None:
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "TTL_INVALID"):
        allocate(source, (0, 1), ttl=dur(-1.0))


def test_an_allocation_that_is_not_renewed_is_freed_by_itself(source: Engine) -> None:
    before = source.counts()
    reply = allocate(source, (0, 3), ttl=dur(0.05))
    assert 0 < seconds(reply.remaining) <= 0.05
    wait_until(lambda: source.counts() == before)


def test_an_allocation_is_renewed_by_its_id(source: Engine) -> None:
    first = allocate(source, (0, 3), ttl=dur(0.2))
    again = allocate(source, allocation_id=first.blocks.allocation_id, ttl=dur(100))
    assert again.blocks == first.blocks
    other = allocate(source, (0, 1), ttl=dur(0.2))
    wait_until(lambda: source.counts().allocated_block_count == 3)
    assert not {*ids_of(other.blocks)} & {*ids_of(first.blocks)}
    source.free(ids_of(first.blocks))


def test_blocks_that_are_pinned_come_free_at_their_last_unpin(source: Engine) -> None:
    reply = allocate(source, (0, 2), ttl=dur(0.05))
    blocks = ids_of(reply.blocks)
    lease_id = source.hand_over(prompt(16), blocks[:1]).lease.lease_id
    wait_until(lambda: source.counts().allocated_block_count == 0)
    counts = source.counts()
    assert (counts.pinned_block_count, counts.free_block_count) == (1, counts.block_count - 1)
    assert ids_of(source.release(lease_id).freed_blocks) == blocks[:1]
    assert source.counts().free_block_count == counts.block_count


@pytest.mark.parametrize(
    ("rows", "code", "reason"),
    [
        pytest.param([group([519])], "FAILED_PRECONDITION", "BLOCK_NOT_ALLOCATED", id="not-allocated"),
        pytest.param([group([4_294_967_295])], "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE", id="minus-one"),
        pytest.param([group([0, 0])], "INVALID_ARGUMENT", "BLOCK_DUPLICATE", id="twice"),
        pytest.param([group([0], 1)], "INVALID_ARGUMENT", "GROUP_MISMATCH", id="group-unknown"),
    ],
)
def test_freeing_what_cannot_be_freed_frees_nothing(source: Engine, rows: list[object], code: str, reason: str) -> None:
    source.allocate(4)
    with unchanged(source), refused(source.api, code, reason):
        source.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(blocks=source.named(*rows)))  # type: ignore[arg-type]


def test_freeing_no_blocks_of_an_allocation_is_not_freeing_all_of_it(source: Engine) -> None:
    request = pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=4)])
    taken = source.api.pool.AllocateBlocks(request).blocks
    none = common_pb2.Blocks(incarnation=taken.incarnation, allocation_id=taken.allocation_id)
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(blocks=none))
    freed = source.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(allocation_id=taken.allocation_id))
    assert ids_of(freed.freed_blocks) == ids_of(taken)


def test_freeing_twice_is_refused_even_while_another_allocation_holds_the_blocks(source: Engine) -> None:
    blocks = source.allocate(1)
    source.free(blocks)
    with refused(source.api, "FAILED_PRECONDITION", "BLOCK_NOT_ALLOCATED"):
        source.free(blocks)


def test_the_pool_is_described_as_the_engine_is(source: Engine) -> None:
    (pool,) = source.api.pool.DescribePools(pool_pb2.DescribePoolsRequest()).pools
    assert pool.kind == pool_types_pb2.POOL_KIND_SERVER_MANAGED
    assert pool.total_bytes == 520 * BLOCK_BYTES
    assert [(r.first_layer, r.layer_count, r.block_bytes) for r in pool.regions] == [
        (0, 1, LAYER_BYTES),
        (1, 1, LAYER_BYTES),
    ]
    assert pool.fingerprint


def read(engine: Engine, ids: list[int], **fields: object) -> pool_pb2.ReadBlocksResponse:
    return engine.api.pool.ReadBlocks(pool_pb2.ReadBlocksRequest(blocks=engine.blocks(ids), **fields))  # type: ignore[arg-type]


def test_the_bytes_of_blocks_are_read_in_the_order_asked(source: Engine) -> None:
    blocks = source.allocate(3)
    written = source.write(blocks, seed=1)
    rows = read(source, blocks[::-1]).blocks
    assert [row.block for row in rows] == blocks[::-1]
    assert [row.data for row in rows] == written[::-1]


def test_the_bytes_of_one_layer_are_read(source: Engine) -> None:
    blocks = source.allocate(1)
    (written,) = source.write(blocks, seed=2)
    (row,) = read(source, blocks, layers={"first": 1, "count": 1}).blocks
    assert row.data == written[LAYER_BYTES:]


def test_reading_blocks_is_off_by_default(start: Start) -> None:
    (engine,) = start(("--no-read-blocks",))
    with unchanged(engine), refused(engine.api, "FAILED_PRECONDITION", "READ_BLOCKS_DISABLED"):
        read(engine, [0])


def test_reading_is_capped(source: Engine) -> None:
    assert len(read(source, list(range(512))).blocks) == 512
    with unchanged(source), refused(source.api, "OUT_OF_RANGE", "LIMIT_EXCEEDED"):
        read(source, list(range(513)))


@pytest.mark.parametrize("layers", [(1, 2), (0, 0), (4_294_967_295, 4_294_967_295)])
def test_layers_that_the_group_does_not_have_are_refused(source: Engine, layers: tuple[int, int]) -> None:
    with unchanged(source):
        refusal = source.api.refusal(lambda: read(source, [0], layers={"first": layers[0], "count": layers[1]}))
    field = "layers" if layers[1] else "layers.count"
    assert (refusal.code, refusal.reason, refusal.fields) == ("INVALID_ARGUMENT", "INVALID_FIELD", (field,))


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        pytest.param({"blocks": [group([520])]}, "OUT_OF_RANGE", "BLOCK_OUT_OF_RANGE", id="past-the-end"),
        pytest.param({"blocks": [group([0], 1)]}, "INVALID_ARGUMENT", "GROUP_MISMATCH", id="group"),
        pytest.param({"blocks": [group([0])], "rank": 1}, "INVALID_ARGUMENT", "INVALID_FIELD", id="rank"),
        pytest.param({"blocks": [group([0] * 2)]}, "INVALID_ARGUMENT", "BLOCK_DUPLICATE", id="twice"),
        pytest.param({}, "INVALID_ARGUMENT", "INVALID_FIELD", id="nothing"),
    ],
)
def test_reading_unknown_blocks_is_refused(source: Engine, fields: dict[str, object], code: str, reason: str) -> None:
    with unchanged(source):
        refusal = source.api.refusal(
            lambda: source.api.pool.ReadBlocks(pool_pb2.ReadBlocksRequest(**source.of_this_life(fields)))
        )
    assert (refusal.code, refusal.reason) == (code, reason)


def test_allocations_that_are_not_freed_are_bounded(start: Start) -> None:
    (engine,) = start((), settings=f"{SETTINGS}allocations = 5\n")
    for _ in range(5):
        engine.allocate(1)
    with refused(engine.api, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
        engine.allocate(1)
    assert engine.counts().allocated_block_count == 5
    engine.free([0])
    engine.allocate(1)
