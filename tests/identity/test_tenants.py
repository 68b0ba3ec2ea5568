"""Tenants over real sockets: who sees, uses and uses up what."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvgrpc.client import Client, content, move
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import AlreadyExists, Exhausted, InvalidRequest, KVGrpcError, NotFound, PermissionDenied, Reason
from kvgrpc.service.grpc_status import from_rpc_error
from kvgrpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    handshake_pb2,
    handshake_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    pool_pb2,
    transfer_pb2,
    transfer_pb2_grpc,
)
from kvgrpc.v1.handoff_pb2 import FinishedBlocksRequest, HandOver, PullBlocksRequest
from kvgrpc.v1.handoff_pb2_grpc import HandoffServiceStub
from kvgrpc.v1.pool_pb2_grpc import PoolServiceStub
from tests.identity.servers import People, serving, spiffe

TOKENS = list(range(32))
KEY = b"k" * 16
WATCH = transfer_pb2.WatchTransfersRequest()


class Stubs:
    """The services of one server, as one caller."""

    def __init__(self, channel: Any) -> None:
        self.leases = lease_pb2_grpc.LeaseServiceStub(channel)
        self.transfers = transfer_pb2_grpc.TransferServiceStub(channel)
        self.handoff = HandoffServiceStub(channel)
        self.pool = PoolServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    people.give(
        p="peer", d="peer", other="peer@blue", red="router engine@red", red2="router@red", blue="router engine@blue",
        house="router engine operator viewer", redviewer="viewer@red",
    )  # fmt: skip
    return people


@pytest.fixture
async def servers(people: People) -> AsyncIterator[tuple[Any, Any]]:
    async with serving(people, "p") as p, serving(people, "d") as d:
        yield p, d


async def refused(call: Callable[[], Awaitable[Any]]) -> tuple[type[KVGrpcError], Reason, str]:
    """Returns what a call is refused with, without the ids in the text."""
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error)
    except KVGrpcError as error:
        found = error
    else:
        raise AssertionError("it is not refused")
    return type(found), found.reason, " ".join(word for word in found.message.split() if "-" not in word)


async def hand_over(stubs: Stubs, client: Client, **more: Any) -> Any:
    """Hands two blocks over."""
    taken = await client.allocate(2, ttl_s=60)
    request = FinishedBlocksRequest(
        transfer_key=KEY, request_id="r", for_readers=HandOver(blocks=taken.blocks, content=content(TOKENS), **more)
    )
    return await stubs.handoff.FinishedBlocks(request)


async def test_an_id_of_another_tenant_answers_as_an_unknown_one(people: People, servers: tuple[Any, Any]) -> None:
    p, _ = servers
    async with AsyncExitStack() as stack:
        red = await stack.enter_async_context(people.client(p, "red"))
        mine = Stubs(await stack.enter_async_context(people.channel(p, "red")))
        blue = Stubs(await stack.enter_async_context(people.channel(p, "blue")))
        colleague = Stubs(await stack.enter_async_context(people.channel(p, "red2")))
        house = Stubs(await stack.enter_async_context(people.channel(p, "house")))
        given = await hand_over(mine, red)
        lease, transfer = given.lease.lease_id, given.transfer.transfer_id
        allocated = (await red.allocate(1, ttl_s=60)).blocks.allocation_id
        unknown = lease[:-4] + "0000", transfer[:-4] + "0000", allocated[:-4] + "0000"

        def calls(stubs: Stubs, lease: str, transfer: str, allocation: str) -> dict[str, Callable[[], Awaitable[Any]]]:
            ref = lease_pb2.LeaseRef(lease_id=lease)
            v1 = transfer_pb2
            return {
                "GetLease": lambda: stubs.leases.GetLease(lease_pb2.GetLeaseRequest(lease=ref)),
                "ReleaseLease": lambda: stubs.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=ref)),
                "GetTransfer": lambda: stubs.transfers.GetTransfer(v1.GetTransferRequest(transfer_id=transfer)),
                "WaitTransfer": lambda: stubs.transfers.WaitTransfer(v1.WaitTransferRequest(transfer_id=transfer)),
                "CancelTransfer": lambda: stubs.transfers.CancelTransfer(
                    v1.CancelTransferRequest(transfer_id=transfer)
                ),
                "PullBlocks": lambda: stubs.handoff.PullBlocks(PullBlocksRequest(transfer_id=transfer)),
                "FreeBlocks": lambda: stubs.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(allocation_id=allocation)),
                "AllocateBlocks": lambda: stubs.pool.AllocateBlocks(
                    pool_pb2.AllocateBlocksRequest(allocation_id=allocation)
                ),
            }

        theirs, none = calls(blue, lease, transfer, allocated), calls(blue, *unknown)
        answers = {name: (await refused(theirs[name]), await refused(none[name])) for name in theirs}
        assert {name: pair for name, pair in answers.items() if pair[0] != pair[1]} == {}
        named = ({"lease_id": lease}, {"grant": given.grant}, {"transfer_key": KEY})
        refs = [lease_pb2.LeaseRef(**one) for one in named]
        renewed = await blue.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=refs))
        assert {row.reason for row in renewed.leases} == {common_pb2.FAILURE_REASON_LEASE_NOT_FOUND}
        waited = await blue.transfers.WaitTransfers(transfer_pb2.WaitTransfersRequest(transfer_ids=[transfer]))
        assert not waited.waited_transfers[0].HasField("transfer")
        acknowledged = await blue.transfers.AcknowledgeTransfers(
            transfer_pb2.AcknowledgeTransfersRequest(transfer_ids=[transfer])
        )
        assert acknowledged.acknowledged_count == 0
        cancelled = await blue.transfers.CancelTransfer(transfer_pb2.CancelTransferRequest(transfer_key=KEY))
        assert not cancelled.transfers
        forced = admin_pb2.ReleaseQuarantineRequest(force=True, message="x", transfer_ids=[transfer])
        assert (await refused(lambda: blue.admin.ReleaseQuarantine(forced)))[0] is PermissionDenied
        for name in ("GetLease", "GetTransfer"):
            for stubs in (mine, colleague, house):
                await calls(stubs, lease, transfer, allocated)[name]()
        found = await mine.transfers.GetTransfer(transfer_pb2.GetTransferRequest(transfer_id=transfer))
        assert found.transfer.state == transfer_pb2.TRANSFER_STATE_PENDING
        assert (found.transfer.tenant, given.lease.tenant) == ("red", "red")


async def test_lists_have_the_rows_of_the_callers_tenant_and_no_others(
    people: People, servers: tuple[Any, Any]
) -> None:
    p, _ = servers
    counts = {}
    async with AsyncExitStack() as stack:
        red = await stack.enter_async_context(people.client(p, "red"))
        given = await hand_over(Stubs(await stack.enter_async_context(people.channel(p, "red"))), red)
        for name in ("redviewer", "blue", "house"):
            stubs = Stubs(await stack.enter_async_context(people.channel(p, name)))
            counts[name] = (
                len((await stubs.leases.ListLeases(lease_pb2.ListLeasesRequest())).leases),
                len((await stubs.transfers.ListTransfers(transfer_pb2.ListTransfersRequest())).transfers),
                len((await stubs.pool.ListAllocations(pool_pb2.ListAllocationsRequest())).allocations),
                len((await stubs.admin.ListPins(admin_pb2.ListPinsRequest())).pins),
                len((await stubs.admin.GetStatus(admin_pb2.GetStatusRequest())).kept.largest_callers),
                bool((await stubs.admin.GetStatus(admin_pb2.GetStatusRequest())).oldest_transfer_id),
                [row.owner for row in (await stubs.admin.GetDrain(admin_pb2.GetDrainRequest())).drain.blockers],
                bool((await stubs.admin.GetDrain(admin_pb2.GetDrainRequest())).drain.oldest_transfer_id),
            )
    owners = [f"tenant red {spiffe('red')}"] * 2
    assert given.lease.lease_id
    assert counts == {
        "redviewer": (1, 1, 1, 1, 1, True, owners, True),
        "blue": (0, 0, 0, 0, 0, False, [], False),
        "house": (1, 1, 1, 1, 1, True, owners, True),
    }


async def test_a_grant_is_good_for_its_tenant(people: People, servers: tuple[Any, Any]) -> None:
    p, d = servers
    async with AsyncExitStack() as stack:
        red = await stack.enter_async_context(people.client(p, "red"))
        given = await hand_over(Stubs(await stack.enter_async_context(people.channel(p, "red"))), red)
        request = PullBlocksRequest(grant=given.grant, content=content(TOKENS))
        request.destination.SetInParent()
        blue = Stubs(await stack.enter_async_context(people.channel(d, "blue")))
        assert (await refused(lambda: blue.handoff.PullBlocks(request)))[:2] == (NotFound, Reason.LEASE_NOT_FOUND)


async def test_blocks_move_within_a_tenant(people: People, servers: tuple[Any, Any]) -> None:
    p, d = servers
    async with people.client(p, "red") as at_p, people.client(d, "red") as at_d:
        await move(at_p, at_d, await at_p.allocate(2, ttl_s=60), TOKENS)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"bound_to": spiffe("d")}, None),
        ({"bound_to": spiffe("another")}, Reason.GRANT_BOUND),
        ({"tenant": "blue"}, None),
        ({"tenant": "blue", "bound_to": spiffe("d")}, None),
    ],
)
async def test_a_grant_may_be_bound_to_one_consumer_by_name(
    people: People, servers: tuple[Any, Any], said: dict[str, str], reason: Reason | None
) -> None:
    """The lead of the destination belongs to the house here, so it may open grants of every tenant."""
    p, d = servers
    async with AsyncExitStack() as stack:
        at_p = await stack.enter_async_context(people.client(p, "house"))
        at_d = await stack.enter_async_context(people.client(d, "house"))
        given = await hand_over(Stubs(await stack.enter_async_context(people.channel(p, "house"))), at_p, **said)
        taken = await at_d.allocate(2, ttl_s=60)
        stubs = Stubs(await stack.enter_async_context(people.channel(d, "house")))
        request = PullBlocksRequest(grant=given.grant, content=content(TOKENS))
        request.destination.blocks.CopyFrom(taken.blocks)
        request.wait.SetInParent()
        ended = (await stubs.handoff.PullBlocks(request)).transfer
        if reason is None:
            assert ended.state == transfer_pb2.TRANSFER_STATE_SUCCEEDED
        else:
            assert f"FAILURE_REASON_{reason}" in str(ended.failure)


async def test_a_lead_of_another_tenant_opens_no_grant(people: People, servers: tuple[Any, Any]) -> None:
    p, _ = servers
    async with serving(people, "other") as other, AsyncExitStack() as stack:
        at_p = await stack.enter_async_context(people.client(p, "red"))
        given = await hand_over(Stubs(await stack.enter_async_context(people.channel(p, "red"))), at_p)
        at_other = await stack.enter_async_context(people.client(other, "house"))
        stubs = Stubs(await stack.enter_async_context(people.channel(other, "house")))
        request = PullBlocksRequest(grant=given.grant, content=content(TOKENS))
        request.destination.blocks.CopyFrom((await at_other.allocate(2, ttl_s=60)).blocks)
        request.wait.SetInParent()
        ended = (await stubs.handoff.PullBlocks(request)).transfer
        assert "FAILURE_REASON_LEASE_NOT_FOUND" in str(ended.failure)


async def test_a_caller_with_a_tenant_states_no_other(people: People, servers: tuple[Any, Any]) -> None:
    p, _ = servers
    async with people.client(p, "red") as client, people.channel(p, "red") as channel:
        stubs = Stubs(channel)
        with pytest.raises(Exception, match="INVALID_FIELD"):
            await hand_over(stubs, client, tenant="blue")


async def test_one_tenant_cannot_use_up_what_callers_may_keep(people: People) -> None:
    limits = Limits(kept_bytes=200_000, kept_bytes_per_caller=90_000)
    async with (
        serving(people, "p", limits=limits) as p, people.client(p, "red") as red, people.client(p, "red2") as more,
        people.client(p, "blue") as blue,
    ):  # fmt: skip
        blocks = await red.allocate(1, ttl_s=60)
        other = await more.allocate(1, ttl_s=60)

        async def fill(client: Client, taken: Any) -> Exhausted:
            for _ in range(400):
                try:
                    await client.grant_lease(taken, TOKENS[:16])
                except Exhausted as full:
                    return full
            raise AssertionError("never full")

        assert (await fill(red, blocks)).metadata["limit"] == "90000"
        assert (await fill(more, other)).metadata["limit"] == "100000"
        await blue.grant_lease(await blue.allocate(1, ttl_s=60), TOKENS[:16])
        p._lead.runner.node.state.ledger.check_sums()


async def test_one_tenant_cannot_use_up_the_places_of_streams_and_waits(people: People) -> None:
    """A connection may have four places, and a tenant half of all four."""
    limits = Limits(standing=4, standing_per_connection=4)
    async with (
        serving(people, "p", limits=limits) as p, people.channel(p, "red") as first,
        people.channel(p, "red2") as second, people.channel(p, "blue") as third,
    ):  # fmt: skip
        held = [Stubs(channel).transfers.WatchTransfers(WATCH, timeout=60) for channel in (first, second)]
        for stream in held:
            await stream.read()

        async def waiting(channel: grpc.aio.Channel) -> Reason:
            request = transfer_pb2.WaitTransferRequest(transfer_id="t-1")
            return (await refused(lambda: Stubs(channel).transfers.WaitTransfer(request, timeout=20)))[1]

        assert await waiting(second) is Reason.LIMIT_EXCEEDED
        assert await waiting(third) is Reason.TRANSFER_NOT_FOUND
        held[0].cancel()
        async with asyncio.timeout(20):
            while await waiting(second) is Reason.LIMIT_EXCEEDED:
                pass  # the server has not heard of the cancel yet


@pytest.mark.parametrize(("watch", "share"), [("transfers", 5), ("engine", 20)])
async def test_one_tenant_cannot_use_up_the_watches(people: People, watch: str, share: int) -> None:
    async with serving(people, "p", limits=Limits(tenant_share=0.02)) as p, AsyncExitStack() as stack:

        async def begun(name: str, count: int) -> int:
            """Opens watches over a new connection, and returns how many there are."""
            channel = await stack.enter_async_context(people.channel(p, name))
            if watch == "transfers":
                streams = [Stubs(channel).transfers.WatchTransfers(WATCH, timeout=60) for _ in range(count)]
            else:
                stub = handshake_pb2_grpc.HandshakeServiceStub(channel)
                streams = [stub.WatchEngine(handshake_pb2.WatchEngineRequest(), timeout=60) for _ in range(count)]
            firsts = await asyncio.gather(*(stream.read() for stream in streams), return_exceptions=True)
            return sum(not isinstance(first, BaseException) for first in firsts)

        opened = [await begun("red", 4) for _ in range(10)]
        assert (sum(opened), opened[-1]) == (share, 0)
        assert await begun("blue", 1) == 1


async def test_a_push_is_of_the_tenant_that_registered_it(people: People, servers: tuple[Any, Any]) -> None:
    p, d = servers
    async with AsyncExitStack() as stack:
        blue_at_d = await stack.enter_async_context(people.client(d, "blue"))
        blue_at_p, red_at_p = [await stack.enter_async_context(people.client(p, name)) for name in ("blue", "red")]
        reserved = await blue_at_d.reserve_blocks(KEY, await blue_at_d.allocate(2, ttl_s=60), TOKENS)
        with pytest.raises(NotFound) as refused:
            await red_at_p.register_push(reserved.grant)
        assert refused.value.reason is Reason.LEASE_NOT_FOUND
        await blue_at_p.register_push(reserved.grant)
        with pytest.raises(AlreadyExists):
            await red_at_p.push_part(KEY, await red_at_p.allocate(2, ttl_s=60), TOKENS, last=True)
        cancelled = await red_at_p.cancel(KEY)
        assert not cancelled.transfers
        await blue_at_p.push_part(KEY, await blue_at_p.allocate(2, ttl_s=60), TOKENS, last=True)
        ended = await blue_at_d.wait(reserved.transfer.transfer_id)
        assert ended.state == transfer_pb2.TRANSFER_STATE_SUCCEEDED


async def test_what_a_lease_holds_is_found_in_its_tenant_alone(people: People, servers: tuple[Any, Any]) -> None:
    p, d = servers
    found: dict[tuple[str, str], int] = {}
    told: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(people.client(p, name)) for name in ("red", "blue", "house")}
        red, blue, house = clients.values()
        await red.finished_blocks(await red.allocate(2, ttl_s=60), TOKENS, findable=True)
        for name, client in clients.items():
            found[name, ""] = len((await client.find_offers(TOKENS)).offers)
            async with aclosing(client.watch_offers()) as watch:
                told[name] = len((await anext(watch)).changes)  # type: ignore[union-attr]
        for tenant in ("red", "blue"):
            found["house", tenant] = len((await house.find_offers(TOKENS, tenant=tenant)).offers)
        assert told == {"red": 1, "blue": 0, "house": 0}
        assert found == {("red", ""): 1, ("blue", ""): 0, ("house", ""): 0, ("house", "red"): 1, ("house", "blue"): 0}
        with pytest.raises(InvalidRequest, match="tenant"):
            await blue.find_offers(TOKENS, tenant="red")
        with pytest.raises(InvalidRequest, match="tenant"):
            await anext(blue.watch_offers(tenant="red"))
        stolen = (await red.find_offers(TOKENS)).offers[0].grant
        theirs = await stack.enter_async_context(people.client(d, "blue"))
        with pytest.raises(NotFound):
            await theirs.pull(stolen, TOKENS, blocks=await theirs.allocate(2, ttl_s=60))


async def test_a_caller_with_a_tenant_reads_the_bytes_of_its_own_blocks_alone(people: People) -> None:
    async with (
        serving(people, "p", read_blocks=True) as p, people.client(p, "red") as red, people.client(p, "blue") as blue,
        people.client(p, "house") as house,
    ):  # fmt: skip
        taken = await red.allocate(1, ttl_s=60)
        for caller in (red, house):
            assert len((await caller.read_blocks(taken)).blocks) == 1
        assert (await refused(lambda: blue.read_blocks(taken)))[1] is Reason.BLOCK_NOT_ALLOCATED
