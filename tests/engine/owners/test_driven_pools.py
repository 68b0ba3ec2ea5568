"""A server gives blocks of its pool to its attached engine and to other callers. Each uses its own blocks only."""

from kvgrpc.core.values.layout import PoolKind
from kvgrpc.engine import content as content_of
from kvgrpc.v1 import common_pb2, pool_pb2, scheduler_pb2
from tests.engine.conftest import Attach, Leads
from tests.engine.made import BLOCKS
from tests.engine.owners.victims import PROMPT, allocated
from tests.engine.support import new_key
from tests.service.values import content


def test_any_caller_takes_blocks_which_the_engine_may_not_free(leads: Leads, attach: Attach) -> None:
    side = attach(leads[0], kind=PoolKind.SERVER_MANAGED)
    pool = leads[0].api.pool
    counts = [pool_pb2.GroupBlockCount(block_count=2)]
    made = pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(group_block_counts=counts)).blocks
    free = pool_pb2.FreeBlocksRequest(allocation_id=made.allocation_id)
    assert side.api.refusal(lambda: side.api.pool.FreeBlocks(free)).reason == "BLOCK_NOT_ALLOCATED"
    assert pool.FreeBlocks(free).freed_blocks.groups


def test_a_caller_that_lacks_blocks_takes_back_no_lease_of_the_engine(leads: Leads, attach: Attach) -> None:
    side = attach(leads[0], kind=PoolKind.SERVER_MANAGED)
    _, blocks = allocated(side, 10)
    side.engine.finished_blocks(blocks[:2], content_of(PROMPT), transfer_key=new_key(), firm_ttl_s=0.0)
    side.engine.free(blocks)
    api, count = leads[0].api, pool_pb2.GroupBlockCount(block_count=BLOCKS)
    needed = pool_pb2.ReclaimBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)])
    assert not api.pool.ReclaimBlocks(needed).reclaimed.enough
    every = pool_pb2.AllocateBlocksRequest(group_block_counts=[count], reclaim=True)
    assert api.refusal(lambda: api.pool.AllocateBlocks(every)).reason == "POOL_EXHAUSTED"
    assert side.engine.reclaim(1).enough


def test_no_other_caller_schedules_a_request(leads: Leads, attach: Attach) -> None:
    side = attach(leads[0], kind=PoolKind.SERVER_MANAGED)
    intent = common_pb2.Intent(transfer_key=new_key())
    arrived = scheduler_pb2.RequestArrivedRequest(
        request_id="r", prompt=content(PROMPT), give=scheduler_pb2.KvGift(), intent=intent
    )
    side.api.scheduler.RequestArrived(arrived)
    stranger = leads[0].api
    for call, request in (
        (stranger.scheduler.RequestArrived, arrived),
        (stranger.scheduler.AbortRequest, scheduler_pb2.AbortRequestRequest(request_id="r")),
    ):
        assert stranger.refusal(lambda call=call, request=request: call(request)).reason == "NOT_OWNER"  # type: ignore[misc]
    step = scheduler_pb2.ScheduleCall(abort_request=scheduler_pb2.AbortRequestRequest(request_id="r"))
    (answer,) = stranger.step(scheduler_pb2.ScheduleRequest(calls=[step])).answers
    assert answer.failure.reason == common_pb2.FAILURE_REASON_NOT_OWNER
