"""The client against the real server: two processes, real sockets, real bytes."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from kvgrpc.client import (
    CleanUp,
    Client,
    IncarnationChanged,
    Pace,
    block_ids,
    clean_up,
    connect,
    connect_sync,
    content,
    is_over,
    some_of,
)
from kvgrpc.errors import AlreadyExists, Exhausted, InvalidRequest, NotFound, PreconditionFailed, Reason, Unavailable
from kvgrpc.v1.admin_pb2 import PIN_KIND_LEASE
from kvgrpc.v1.common_pb2 import (
    DATA_PATH_SHM,
    FAILURE_REASON_CONTENT_MISMATCH,
    FAILURE_REASON_SOURCE_FAILED,
    PeerAddress,
)
from kvgrpc.v1.handshake_pb2 import ADMISSION_OPEN
from kvgrpc.v1.lease_pb2 import LEASE_STATE_RELEASED
from kvgrpc.v1.transfer_pb2 import (
    CANCEL_OUTCOME_CANCELLED_BEFORE_ACCESS,
    DIRECTION_RECEIVE,
    DIRECTION_SEND,
    MEMORY_DISPOSITION_RETURNED,
    TRANSFER_STATE_FAILED,
    TRANSFER_STATE_SUCCEEDED,
    CancelTransferResponse,
    WatchTransfersResponse,
)
from tests.client.serving import Served, served

UNTIL_S = 30
TOKENS = list(range(100, 100 + 4 * 16))


@dataclass(frozen=True)
class Pair:
    """A source and a destination, with a client for each."""

    source: Client
    destination: Client


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Served, Served]]:
    with served("--engine-id", "P", "--read-blocks") as source, served("--engine-id", "D", "--read-blocks") as other:
        yield source, other


@pytest.fixture
async def pair(servers: tuple[Served, Served]) -> AsyncIterator[Pair]:
    async with connect(servers[0].address) as source, connect(servers[1].address) as destination:
        yield Pair(source, destination)
        for client in (source, destination):  # a failure here names the test that left something pinned
            assert (await client.pool_status()).groups[0].allocated_block_count == 0
            assert not (await client.pins()).pins


async def test_a_pull_between_two_servers(pair: Pair, servers: tuple[Served, Served]) -> None:
    source, destination = pair.source, pair.destination
    described = (await destination.capabilities()).engine
    assert (await source.check_compatibility(described)).compatible
    peer = (await destination.connect_peer(servers[0].address, engine_id="P")).peer
    assert [path.data_path for path in peer.paths] == [DATA_PATH_SHM]
    taken, target = await source.allocate(4), await destination.allocate(4)
    handed_over = await source.finished_blocks(taken, TOKENS, request_id="r-1")
    (pin,) = (await source.pins(block_ids(taken)[0])).pins
    assert (pin.kind, pin.owner) == (PIN_KIND_LEASE, handed_over.lease.lease_id)
    pull = await destination.pull_blocks(handed_over.grant, TOKENS, blocks=target, request_id="r-1")
    got = await destination.wait(pull.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    assert (got.state, got.memory) == (TRANSFER_STATE_SUCCEEDED, MEMORY_DISPOSITION_RETURNED)
    assert got.total_bytes == got.moved_bytes > 0
    sent = await source.wait(handed_over.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    assert sent.state == TRANSFER_STATE_SUCCEEDED
    here = await destination.read_blocks(target)
    there = await source.read_blocks(taken)
    assert [row.data for row in here.blocks] == [row.data for row in there.blocks]
    acknowledged = await destination.acknowledge([got.transfer_id])
    assert acknowledged.acknowledged_count <= 1  # a server without an engine acknowledges it itself
    listed = await destination.list_transfers(request_id="r-1")
    assert [row.transfer_id for row in listed.transfers] == [got.transfer_id]
    await source.free(taken)
    await destination.free(target)


async def test_pulls_and_pushes_that_wait_take_one_call_each(pair: Pair, servers: tuple[Served, Served]) -> None:
    """Repeated often enough that the calls share a stream with the calls around them."""
    taken, target = await pair.source.allocate(4), await pair.destination.allocate(4)
    for _ in range(3):
        handed_over = await pair.source.finished_blocks(taken, TOKENS)
        got = await pair.destination.pull(handed_over.grant, TOKENS, blocks=target, returned=True, timeout_s=UNTIL_S)
        assert (got.state, got.memory) == (TRANSFER_STATE_SUCCEEDED, MEMORY_DISPOSITION_RETURNED)
        key = secrets.token_bytes(16)
        source = PeerAddress(address=servers[0].address)
        receiving = pair.destination.receive(key, target, TOKENS, source, returned=True, timeout_s=UNTIL_S)
        received, pushed = await asyncio.gather(receiving, pair.source.push_part(key, taken, TOKENS, last=True))
        assert received.state == TRANSFER_STATE_SUCCEEDED
        await pair.source.wait(pushed.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    with pytest.raises(NotFound) as caught:
        await pair.destination.get_transfer("unknown")
    assert caught.value.engine_id == "D"
    await pair.source.free(taken)
    await pair.destination.free(target)


async def test_a_server_that_restarts_is_called_as_before() -> None:
    """The stream ends with its server. Calls fail with Unavailable until the channel has connected again."""
    with served() as first:
        port = first.port
        async with connect(first.address) as client:
            incarnations = {(await client.allocate(1)).header.incarnation for _ in range(5)}
            first.process.terminate()
            await asyncio.to_thread(first.process.wait)
            with pytest.raises(Unavailable):
                await client.allocate(1)
            with served(port=port):
                async with asyncio.timeout(UNTIL_S):
                    while len(incarnations) < 2:
                        with suppress(Unavailable):
                            incarnations.add((await client.allocate(1)).header.incarnation)
                incarnations |= {(await client.allocate(1)).header.incarnation for _ in range(5)}
    assert len(incarnations) == 2


async def test_a_destination_can_be_given_later(pair: Pair) -> None:
    taken = await pair.source.allocate(4)
    handed_over = await pair.source.finished_blocks(taken, TOKENS)
    pull = await pair.destination.pull_blocks(handed_over.grant, TOKENS)
    target = await pair.destination.allocate(2)
    again = await pair.destination.pull_blocks(pull.transfer.transfer_id, blocks=target, have_tokens=32)
    assert again.transfer.transfer_id == pull.transfer.transfer_id
    got = await pair.destination.wait(pull.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    assert (got.state, got.block_count) == (TRANSFER_STATE_SUCCEEDED, 2)
    await pair.source.wait(handed_over.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    await pair.source.free(taken)
    await pair.destination.free(target)


async def test_all_found_locally_releases_the_source(pair: Pair) -> None:
    taken = await pair.source.allocate(4)
    handed_over = await pair.source.finished_blocks(taken, TOKENS)
    pull = await pair.destination.pull_blocks(handed_over.grant, TOKENS, blocks=[], have_tokens=len(TOKENS))
    got = await pair.destination.wait(pull.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    assert (got.state, got.total_bytes) == (TRANSFER_STATE_SUCCEEDED, 0)
    await pair.source.wait(handed_over.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    await pair.source.free(taken)


async def test_other_tokens_are_refused_at_the_source(pair: Pair) -> None:
    taken, target = await pair.source.allocate(4), await pair.destination.allocate(4)
    handed_over = await pair.source.finished_blocks(taken, content(TOKENS, cache_salt="a"))
    wrong = content(TOKENS, cache_salt="b")
    pull = await pair.destination.pull_blocks(handed_over.grant, wrong, blocks=target)
    got = await pair.destination.wait(pull.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    assert (got.state, got.failure.reason) == (TRANSFER_STATE_FAILED, FAILURE_REASON_CONTENT_MISMATCH)
    cancelled = await pair.source.cancel(handed_over.transfer.transfer_id, message="the test is over")
    assert cancelled.outcome == CANCEL_OUTCOME_CANCELLED_BEFORE_ACCESS
    await pair.source.free(taken)
    await pair.destination.free(target)


async def test_many_transfers_are_waited_for_at_once(pair: Pair) -> None:
    taken, target = await pair.source.allocate(4), await pair.destination.allocate(4)
    handed_over = await pair.source.finished_blocks(taken, TOKENS)
    pull = (await pair.destination.pull_blocks(handed_over.grant, TOKENS)).transfer.transfer_id
    ids = [pull, "no such transfer"]
    early = await pair.destination.wait_transfers(ids, timeout_s=0.05)
    assert (early.condition_met, [row.condition_met for row in early.waited_transfers]) == (False, [False, True])
    assert (await pair.destination.wait_transfers(ids, any_of=True)).condition_met
    await pair.destination.pull_blocks(pull, blocks=target)
    done = await pair.destination.wait_transfers(ids, returned=True, timeout_s=UNTIL_S)
    assert done.condition_met
    assert done.waited_transfers[0].transfer.state == TRANSFER_STATE_SUCCEEDED
    assert not done.waited_transfers[1].HasField("transfer")
    await pair.source.wait(handed_over.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    await pair.source.free(taken.blocks.allocation_id)
    await pair.destination.free(target.blocks.allocation_id)


async def test_both_sides_of_a_request_are_found_by_its_pair_and_way(pair: Pair) -> None:
    taken, target = await pair.source.allocate(4), await pair.destination.allocate(4)
    handed_over = await pair.source.finished_blocks(taken, TOKENS)
    pull = await pair.destination.pull_blocks(handed_over.grant, TOKENS, blocks=target)
    pair_id = handed_over.transfer.pair_id
    assert pull.transfer.pair_id == pair_id
    for client, way in ((pair.source, DIRECTION_SEND), (pair.destination, DIRECTION_RECEIVE)):
        (found,) = (await client.list_transfers(pair_id=pair_id)).transfers
        assert found.direction == way
        assert list((await client.list_transfers(pair_id=pair_id, direction=way)).transfers)
        await client.wait(found.transfer_id, returned=True, timeout_s=UNTIL_S)
    assert not (await pair.source.list_transfers(pair_id=pair_id, direction=DIRECTION_RECEIVE)).transfers
    await pair.source.free(taken)
    await pair.destination.free(target)


async def test_a_part_of_an_allocation_is_pushed_and_checked_against_it(pair: Pair) -> None:
    key = secrets.token_bytes(16)
    taken, target = await pair.source.allocate(4), await pair.destination.allocate(4)
    reserved = await pair.destination.reserve_blocks(key, target, TOKENS)
    await pair.source.register_push(reserved.grant)
    ids = block_ids(taken)
    await pair.source.push_part(key, some_of(taken, ids[:2]), TOKENS)
    sent = await pair.source.push_part(key, some_of(taken, ids[2:]), last=True)
    got = await pair.destination.wait(reserved.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    assert (got.state, got.block_count) == (TRANSFER_STATE_SUCCEEDED, 4)
    await pair.source.wait(sent.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    await pair.source.free(taken)
    await pair.destination.free(target)
    with pytest.raises(PreconditionFailed) as freed:
        await pair.source.push_part(secrets.token_bytes(16), some_of(taken, ids[:2]), TOKENS)
    assert freed.value.reason is Reason.BLOCK_NOT_ALLOCATED


async def test_a_source_that_failed_ends_the_push_at_both_sides(pair: Pair) -> None:
    key, target = secrets.token_bytes(16), await pair.destination.allocate(4)
    reserved = await pair.destination.reserve_blocks(key, target, TOKENS)
    await pair.source.register_push(reserved.grant)
    await pair.source.source_failed(key, "the prefill was aborted")
    got = await pair.destination.wait(reserved.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
    assert (got.state, got.failure.reason) == (TRANSFER_STATE_FAILED, FAILURE_REASON_SOURCE_FAILED)
    assert "the prefill was aborted" in got.failure.message
    await pair.destination.free(target)


async def test_clean_up_leaves_nothing_at_either_side(pair: Pair) -> None:
    key = secrets.token_bytes(16)
    taken, target = await pair.source.allocate(4), await pair.destination.allocate(4)
    handed_over = await pair.source.finished_blocks(taken, TOKENS, transfer_key=key)
    await pair.destination.pull_blocks(handed_over.grant, TOKENS)
    sides = [
        CleanUp(pair.source, key, [taken.blocks.allocation_id]),
        CleanUp(pair.destination, key, [target.blocks.allocation_id]),
    ]
    for outcome in await clean_up(sides, message="the user left"):
        assert isinstance(outcome, CancelTransferResponse), outcome
        for transfer in outcome.transfers:
            side = pair.source if transfer.direction == DIRECTION_SEND else pair.destination
            await side.wait(transfer.transfer_id, returned=True, timeout_s=UNTIL_S)


async def test_a_call_that_is_tried_changes_nothing(pair: Pair) -> None:
    tried = await pair.source.allocate(4, validate_only=True)
    assert not tried.HasField("blocks")
    taken = await pair.source.allocate(4)
    handed_over = await pair.source.finished_blocks(taken, TOKENS, validate_only=True)
    assert not handed_over.grant.token
    assert not (await pair.source.pins()).pins
    await pair.source.free(taken, validate_only=True)
    assert (await pair.source.pool_status()).groups[0].allocated_block_count == 4
    await pair.source.free(taken)


async def test_a_watch_sees_every_change_from_a_reply_on(pair: Pair) -> None:
    """Each stream lasts only a moment, so that most changes happen between two streams."""
    start = await pair.destination.list_transfers()
    pace = Pace(stream_s=0.02, pause_first_s=0.001, pause_max_s=0.001)
    taken = await pair.source.allocate(4)
    seen: list[int] = []
    ends: set[str] = set()

    async def watch(count: int) -> None:
        async with aclosing(pair.destination.watch(after=start, pace=pace)) as events:
            async for event in events:
                assert isinstance(event, WatchTransfersResponse), event
                seen.append(event.header.event_seq)
                if is_over(event.transfer):
                    ends.add(event.transfer.transfer_id)
                if len(ends) == count:
                    return

    watching = asyncio.ensure_future(watch(10))
    for _ in range(10):
        target = await pair.destination.allocate(4)
        handed_over = await pair.source.finished_blocks(taken, TOKENS)
        pull = await pair.destination.pull_blocks(handed_over.grant, TOKENS, blocks=target)
        await pair.destination.wait(pull.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
        await pair.source.wait(handed_over.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
        await pair.destination.free(target)
    await pair.source.free(taken)
    await asyncio.wait_for(watching, UNTIL_S)
    first = start.header.event_seq + 1
    assert seen == list(range(first, first + len(seen)))


async def test_a_lease_is_kept_alive_beyond_its_ttl(pair: Pair) -> None:
    taken = await pair.source.allocate(1)
    async with pair.source.lease(taken, TOKENS[:16], ttl_s=2.0, labels={"owner": "router"}) as held:
        async with asyncio.timeout(UNTIL_S):
            while (lease := (await pair.source.get_lease(held.lease_id)).lease).renewal_count < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert dict(lease.labels) == {"owner": "router"}
        assert [row.lease_id for row in (await pair.source.list_leases()).leases] == [held.lease_id]
        held.check()
    assert (await pair.source.get_lease(held.lease_id)).lease.state == LEASE_STATE_RELEASED
    await pair.source.free(taken)


async def test_the_holder_learns_that_the_lease_was_released(pair: Pair) -> None:
    taken = await pair.source.allocate(1)
    async with pair.source.lease(taken, TOKENS[:16], ttl_s=1.0) as held:
        await pair.source.release_lease(held.lease_id)
        async with asyncio.timeout(UNTIL_S):
            assert await held.wait_over() is Reason.LEASE_RELEASED
    await pair.source.free(taken)


async def test_the_same_key_gives_the_same_answer(pair: Pair) -> None:
    first = await pair.source.allocate(2, idempotency_key="allocate-once")
    again = await pair.source.allocate(2, idempotency_key="allocate-once")
    assert again.blocks == first.blocks
    with pytest.raises(AlreadyExists) as raised:
        await pair.source.allocate(3, idempotency_key="allocate-once")
    assert raised.value.reason is Reason.IDEMPOTENCY_KEY_REUSED
    await pair.source.free(first)


async def test_errors_arrive_with_class_reason_and_details(pair: Pair) -> None:
    taken = await pair.source.allocate(60)
    with pytest.raises(Exhausted) as exhausted:
        await pair.source.allocate(10)
    assert exhausted.value.reason is Reason.POOL_EXHAUSTED
    await pair.source.free(taken)
    with pytest.raises(NotFound) as missing:
        await pair.source.get_transfer("no such transfer")
    assert (missing.value.reason, missing.value.engine_id) == (Reason.TRANSFER_NOT_FOUND, "P")
    assert missing.value.next is not None
    incarnation = missing.value.incarnation
    with pytest.raises(InvalidRequest) as invalid:
        await pair.source.finished_blocks([1], TOKENS[:16], ttl_s=-1.0, incarnation=incarnation)
    assert invalid.value.reason is Reason.TTL_INVALID
    with pytest.raises(InvalidRequest) as bare:
        await pair.source.finished_blocks([1], TOKENS[:16])
    assert bare.value.reason is Reason.INVALID_FIELD
    with pytest.raises(PreconditionFailed) as pinned:
        await pair.source.finished_blocks([1], TOKENS[:16], incarnation=incarnation)
    assert pinned.value.reason is Reason.BLOCK_NOT_ALLOCATED


async def test_the_synchronous_client_does_the_same(pair: Pair, servers: tuple[Served, Served]) -> None:
    def work() -> Any:
        with connect_sync(servers[0].address) as source, connect_sync(servers[1].address) as destination:
            taken, target = source.allocate(4), destination.allocate(4)
            handed_over = source.finished_blocks(taken, TOKENS)
            pull = destination.pull_blocks(handed_over.grant, TOKENS, blocks=target)
            got = destination.wait(pull.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
            source.wait(handed_over.transfer.transfer_id, returned=True, timeout_s=UNTIL_S)
            source.free(taken)
            destination.free(target)
            assert destination.status().admission == ADMISSION_OPEN
            return got

    assert (await asyncio.to_thread(work)).state == TRANSFER_STATE_SUCCEEDED


async def test_a_watch_goes_on_after_the_server_restarts() -> None:
    with served() as first:
        port = first.port
        async with connect(first.address) as client:
            taken = await client.allocate(1)
            handed_over = await client.finished_blocks(taken, TOKENS[:16])
            events = client.watch(after=handed_over.header, pace=Pace(give_up_s=60))
            waiting = asyncio.ensure_future(anext(events))
            await client.cancel(handed_over.transfer.transfer_id)
            assert isinstance(await asyncio.wait_for(waiting, UNTIL_S), WatchTransfersResponse)
            first.process.kill()
            first.process.wait()
            with served(port=port):
                while not isinstance(event := await asyncio.wait_for(anext(events), UNTIL_S), IncarnationChanged):
                    pass
    assert event.previous == handed_over.header.incarnation
    assert event.header.incarnation not in (0, event.previous)
