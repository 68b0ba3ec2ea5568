"""PoolService: the paged pool."""

import itertools

from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.values.layout import PoolKind, Region
from kvgrpc.core.values.owners import tenant_of
from kvgrpc.errors import PreconditionFailed, Reason, invalid, too_many
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.identity.tenants import sees
from kvgrpc.service.lead import Lead
from kvgrpc.service.methods import ALLOCATE_BLOCKS, FREE_BLOCKS, RECLAIM_BLOCKS, reply_to
from kvgrpc.service.rpc import allocations
from kvgrpc.service.rpc.method import unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.v1 import pool_pb2, pool_pb2_grpc
from kvgrpc.wire.description import POOL_KINDS, pool_to_proto
from kvgrpc.wire.values import layer_range, lists_of

READ_BYTES_MAX = 1 << 20


class PoolService(pool_pb2_grpc.PoolServiceServicer):
    """Converts a request, asks the node, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def DescribePools(self, request: pool_pb2.DescribePoolsRequest, trace: str) -> pool_pb2.DescribePoolsResponse:
        lead = self._lead
        engine = lead.runner.node.state.life.engine
        return pool_pb2.DescribePoolsResponse(
            header=lead.header(), pools=[pool_to_proto(engine.pool, engine.pool_kind)]
        )

    @unary
    async def AllocateBlocks(
        self, request: pool_pb2.AllocateBlocksRequest, trace: str
    ) -> pool_pb2.AllocateBlocksResponse:
        return await reply_to(ALLOCATE_BLOCKS, self._lead, request, trace)

    @unary
    async def FreeBlocks(self, request: pool_pb2.FreeBlocksRequest, trace: str) -> pool_pb2.FreeBlocksResponse:
        return await reply_to(FREE_BLOCKS, self._lead, request, trace)

    @unary
    async def ReclaimBlocks(self, request: pool_pb2.ReclaimBlocksRequest, trace: str) -> pool_pb2.ReclaimBlocksResponse:
        return await reply_to(RECLAIM_BLOCKS, self._lead, request, trace)

    @unary
    async def ListAllocations(
        self, request: pool_pb2.ListAllocationsRequest, trace: str
    ) -> pool_pb2.ListAllocationsResponse:
        lead = self._lead
        lead.runner.advance()
        state = lead.runner.node.state
        managed = state.life.engine.pool_kind is PoolKind.SERVER_MANAGED
        rows = state.pool.allocator.rows() if managed else iter(())
        if request.HasField("block"):
            rows = iter(allocations.holding(state, request.group, request.block))
        rows = (row for row in rows if sees(tenant_of(row[1].owner)))
        if request.request_id:
            rows = (row for row in rows if row[1].request_id == request.request_id)
        if request.label:
            rows = (row for row in rows if row[1].label == request.label)
        found = page(
            lead,
            request,
            rows,
            lambda row: (row[1].since - state.life.began, row[0]),
            lambda row: allocations.message(lead, row),
            ordered=True,
        )
        return pool_pb2.ListAllocationsResponse(
            header=found.header, allocations=found.rows, next_page_token=found.next_page_token
        )

    @unary
    async def GetPoolStatus(self, request: pool_pb2.GetPoolStatusRequest, trace: str) -> pool_pb2.GetPoolStatusResponse:
        lead = self._lead
        lead.runner.advance()
        state = lead.runner.node.state
        engine = state.life.engine
        managed = engine.pool_kind is PoolKind.SERVER_MANAGED
        rows = []
        for index, (group, space) in enumerate(zip(engine.pool.groups, state.pool.pins.spaces, strict=True)):
            pinned = int(state.pool.pins.pinned_mask(index).sum())
            rows.append(
                pool_pb2.GroupStatus(
                    name=group.name,
                    block_count=group.blocks,
                    free_block_count=state.pool.allocator.free_count(space) if managed else group.blocks - pinned,
                    allocated_block_count=state.pool.allocator.allocated(space) if managed else 0,
                    pinned_block_count=pinned,
                    leased_block_count=state.pool.pins.count_blocks(space, PinKind.LEASE),
                    target_block_count=state.pool.pins.count_blocks(space, PinKind.TARGET),
                    quarantined_block_count=state.pool.pins.quarantined[space],
                    soft_block_count=state.pool.pins.reclaimable(space),
                )
            )
        return pool_pb2.GetPoolStatusResponse(header=lead.header(), kind=POOL_KINDS[engine.pool_kind], groups=rows)

    @unary
    async def ReadBlocks(self, request: pool_pb2.ReadBlocksRequest, trace: str) -> pool_pb2.ReadBlocksResponse:
        lead = self._lead
        state = lead.runner.node.state
        state.life.check(request.blocks.incarnation)
        if not lead.config.read_blocks:
            raise PreconditionFailed(
                Reason.READ_BLOCKS_DISABLED, "this server does not hand out KV (setting read_blocks)"
            )
        if not request.blocks.groups:
            raise invalid("blocks", "is required")
        if request.rank >= state.life.engine.world_size:
            raise invalid("rank", f"the engine has {state.life.engine.world_size} ranks")
        lists = state.pool.resolve(lists_of("blocks", request.blocks, lead.block_limit), "blocks")
        if tenant_of(PRINCIPAL.get()):
            state.pool.check_owned(lists, "", PRINCIPAL.get())
        wanted = [(group, ids, self._regions(request, group)) for group, ids in enumerate(lists) if len(ids)]
        total = sum(sum(r.block_bytes for r in regions) * len(ids) for _, ids, regions in wanted)
        if total > READ_BYTES_MAX:
            raise too_many(f"{total} bytes in one call; the limit is {READ_BYTES_MAX}", READ_BYTES_MAX)
        reply = pool_pb2.ReadBlocksResponse(header=lead.header())
        blocks = [(group, block, regions) for group, ids, regions in wanted for block in ids.tolist()]
        runs = [(r.offset + block * r.stride_bytes, r.block_bytes) for _, block, regions in blocks for r in regions]
        parts = iter(await lead.read_runs(request.rank, runs))
        for group, block, regions in blocks:
            reply.blocks.add(group=group, block=block, data=b"".join(itertools.islice(parts, len(regions))))
        return reply

    def _regions(self, request: pool_pb2.ReadBlocksRequest, group: int) -> list[Region]:
        """Returns the rank's regions that hold the wanted layers. Raises InvalidRequest for layers past the group's."""
        engine = self._lead.runner.node.state.life.engine
        layout, stage = engine.pool, request.rank // engine.stage_ranks
        layers = layer_range(request) or (0, layout.groups[group].layers)
        if layers[1] > layout.groups[group].layers - layers[0]:
            raise invalid("layers", f"lie within the group's {layout.groups[group].layers}")
        return [r for r in layout.regions if (r.group, r.stage) == (group, stage) and r.holds(layers)]
