"""ReclaimBlocks, and AllocateBlocks with reclaim, of a server-managed pool, over sockets."""

from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.engines import FAILED, RETURNED, Engine, unchanged, wait_until
from tests.service.values import dur, ids_of, prompt, seconds

RECLAIMED = common_pb2.FAILURE_REASON_LEASE_RECLAIMED


def rows(count: int) -> list[pool_pb2.GroupBlockCount]:
    return [pool_pb2.GroupBlockCount(group=0, block_count=count)]


def reclaim(engine: Engine, count: int, **fields: object) -> pool_pb2.Reclaimed:
    request = pool_pb2.ReclaimBlocksRequest(group_block_counts=rows(count), **fields)  # type: ignore[arg-type]
    return engine.api.pool.ReclaimBlocks(request).reclaimed


def let_go(engine: Engine, tokens: int, firm_s: float = 0.0) -> handoff_pb2.FinishedBlocksResponse:
    """Makes a hand-over whose blocks only its lease holds."""
    ids = engine.allocate(-(-tokens // 16))
    made = engine.hand_over(prompt(tokens), ids, firm_ttl=dur(firm_s))
    engine.free(ids)
    return made


def counts_of(engine: Engine) -> admin_pb2.Counts:
    return engine.api.admin.GetStatus(admin_pb2.GetStatusRequest()).counts


def test_what_nobody_came_for_comes_back_at_once(source: Engine) -> None:
    made = let_go(source, 32)
    before = source.counts()
    assert before.soft_block_count == 2
    answer = reclaim(source, 1)
    assert answer.enough
    assert [row.lease_id for row in answer.leases] == [made.lease.lease_id]
    assert [row.transfer_id for row in answer.leases] == [made.transfer.transfer_id]
    assert answer.lease_count == 1
    assert len(ids_of(answer.freed_blocks)) == 2
    after = source.counts()
    assert (after.free_block_count, after.soft_block_count) == (before.free_block_count + 2, 0)
    transfer = source.get(made.transfer.transfer_id)
    assert (transfer.state, transfer.memory) == (FAILED, RETURNED)
    assert (transfer.failure.reason, transfer.failure.next) == (RECLAIMED, common_pb2.NEXT_STEP_RECOMPUTE)
    assert source.lease(made.lease.lease_id).state == lease_pb2.LEASE_STATE_RECLAIMED


def test_a_reader_that_comes_too_late_recomputes_and_is_counted(source: Engine, destination: Engine) -> None:
    made = let_go(source, 32)
    before = counts_of(source)
    assert reclaim(source, 1).enough
    pull = destination.pull(made.grant, prompt(32), destination.allocate(2))
    ended = destination.wait(pull.transfer_id)
    assert ended.state == FAILED
    assert (ended.failure.reason, ended.failure.next) == (RECLAIMED, common_pb2.NEXT_STEP_RECOMPUTE)
    after = counts_of(source)
    assert after.reclaimed_lease_count == before.reclaimed_lease_count + 1
    assert after.reclaimed_in_vain_count == before.reclaimed_in_vain_count + 1


def test_a_firm_lease_stays_and_the_answer_says_until_when(source: Engine) -> None:
    made = let_go(source, 32, firm_s=200.0)
    with unchanged(source):
        answer = reclaim(source, 2)
    assert not answer.enough
    (later,) = answer.later_leases
    assert 0 < seconds(later.soft_in) <= 200
    assert [(row.group, row.block_count) for row in later.group_block_counts] == [(0, 2)]
    assert 0 < seconds(source.lease(made.lease.lease_id).soft_in) <= 200


def test_a_renewal_by_a_router_keeps_it(source: Engine) -> None:
    made = let_go(source, 32)
    request = lease_pb2.RenewLeasesRequest(leases=[lease_pb2.LeaseRef(grant=made.grant)], ttl=dur(100.0))
    source.api.leases.RenewLeases(request)
    assert not reclaim(source, 1).enough


def test_a_pull_that_waits_for_its_blocks_keeps_it(source: Engine, destination: Engine) -> None:
    made = let_go(source, 32)
    pull = destination.pull(made.grant, prompt(32), None)
    wait_until(lambda: source.lease(made.lease.lease_id).open_access_count == 1)
    lease = source.lease(made.lease.lease_id)
    assert not lease.HasField("soft_in")
    assert not reclaim(source, 1).enough
    destination.cancel(pull.transfer_id)


def test_an_allocation_reclaims_in_one_go(source: Engine) -> None:
    let_go(source, 64)
    free = source.counts().free_block_count
    request = pool_pb2.AllocateBlocksRequest(group_block_counts=rows(free + 3), reclaim=True)
    taken = source.api.pool.AllocateBlocks(request)
    assert len(ids_of(taken.blocks)) == free + 3
    source.free(ids_of(taken.blocks))


def test_an_allocation_is_told_when_it_may_have_blocks(source: Engine) -> None:
    let_go(source, 64, firm_s=150.0)
    free = source.counts().free_block_count
    request = pool_pb2.AllocateBlocksRequest(group_block_counts=rows(free + 3), reclaim=True)
    found = source.api.refusal(lambda: source.api.pool.AllocateBlocks(request))
    assert found.reason == "POOL_EXHAUSTED"
    assert found.metadata["soft_block_count"] == "0"
    assert found.retry_delay_s is not None
    assert 100 < found.retry_delay_s <= 150


def test_a_repeated_call_takes_nothing_more(source: Engine) -> None:
    let_go(source, 32)
    let_go(source, 32)
    first = reclaim(source, 1, idempotency_key="once")
    assert reclaim(source, 1, idempotency_key="once") == first
    assert reclaim(source, 2).enough


def test_a_watch_says_how_many_blocks_are_soft(source: Engine) -> None:
    watch = source.api.handshake.WatchEngine(handshake_pb2.WatchEngineRequest(), timeout=20)
    let_go(source, 32, firm_s=0.2)
    assert any(sum(group.soft_block_count for group in reply.status.groups) == 2 for reply in watch)
    watch.cancel()


def test_a_negative_firm_time_is_refused(source: Engine) -> None:
    ids = source.allocate(2)
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "TTL_INVALID"):
        source.hand_over(prompt(32), ids, firm_ttl=dur(-1.0))


def test_a_watching_router_sees_it(source: Engine) -> None:
    watch = source.api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest(), timeout=20)
    made = let_go(source, 32)
    assert reclaim(source, 1).enough
    changes = (reply.transfer for reply in watch)
    ended = next(one for one in changes if one.transfer_id == made.transfer.transfer_id and one.state == FAILED)
    assert (ended.failure.reason, ended.failure.next) == (RECLAIMED, common_pb2.NEXT_STEP_RECOMPUTE)
    watch.cancel()
