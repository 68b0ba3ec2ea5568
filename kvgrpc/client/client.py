"""The client: one method for each thing that can be asked of a server. The schema's comments are the contract.

What goes in are Python values: lists of block ids and token ids, seconds. What comes out are the messages of the
schema, so that nothing is lost between them and this file. Errors are those of `kvgrpc.errors`.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc import aio

from kvgrpc.client import options as opt
from kvgrpc.client.calls import Caller, as_metadata
from kvgrpc.client.channel import open_channel
from kvgrpc.client.leases import HeldLease, Keeper, Renewal
from kvgrpc.client.renewals import Renewals
from kvgrpc.client.scheduler import Scheduler
from kvgrpc.client.values import (
    AnyLease,
    Blocks,
    Tokens,
    as_content,
    fields,
    group_blocks,
    in_seconds,
    lease_ref,
    life_of,
)
from kvgrpc.client.waiting import wait
from kvgrpc.client.watch import Cursor, Pace, Reply, Watch, WatchEvent, point_of
from kvgrpc.errors import NotFound, PreconditionFailed
from kvgrpc.v1 import admin_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, pool_types_pb2, transfer_pb2
from kvgrpc.v1.admin_pb2_grpc import AdminServiceStub
from kvgrpc.v1.common_pb2 import Grant, PeerAddress, ResponseHeader
from kvgrpc.v1.handoff_pb2_grpc import HandoffServiceStub
from kvgrpc.v1.handshake_pb2_grpc import HandshakeServiceStub
from kvgrpc.v1.lease_pb2_grpc import LeaseServiceStub
from kvgrpc.v1.pool_pb2_grpc import PoolServiceStub
from kvgrpc.v1.scheduler_pb2_grpc import SchedulerServiceStub
from kvgrpc.v1.transfer_pb2_grpc import TransferServiceStub

TIMEOUT_S = 10.0
"""Deadline of a call that states none, retries included."""
WAIT_S = 90.0
"""More than a server's defaults for queue, transfer and settle together."""


def connect(
    address: str,
    *,
    timeout_s: float = TIMEOUT_S,
    credentials: grpc.ChannelCredentials | None = None,
    metadata: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    channel_options: Sequence[tuple[str, str | int]] = (),
) -> "Client":
    """A client of the server at `address` (`host:port`), in the running event loop:

        async with connect("127.0.0.1:50051") as client:
            reply = await client.capabilities()

    Nothing is sent before the first call. Without `credentials` the connection is not encrypted. `metadata` goes with
    every call, for example {"authorization": "Bearer ..."}.
    """
    asyncio.get_running_loop()  # a channel belongs to its loop: without one this raises, instead of hanging later
    caller = Caller(address, timeout_s, as_metadata(metadata))
    return Client(open_channel(address, credentials, channel_options), caller)


class Client:
    """One server, as seen from one event loop. Made by `connect`. Any number of its methods may run at once."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        self.channel = channel
        """For calls that have no method here: `SomeServiceStub(client.channel)`, with a deadline of your own."""
        self._call = caller
        self._admin = AdminServiceStub(channel)
        self._handoff = HandoffServiceStub(channel)
        self._handshake = HandshakeServiceStub(channel)
        self._leases = LeaseServiceStub(channel)
        self._pool = PoolServiceStub(channel)
        self._transfers = TransferServiceStub(channel)
        self._keeper = Keeper(Renewals(caller, self._leases))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends calls, watches and renewals. Transfers and leases live on at the server."""
        try:
            await self._keeper.close()
        finally:
            await self.channel.close()

    # ---- who is there

    async def capabilities(self, **options: Unpack[opt.Call]) -> handshake_pb2.GetCapabilitiesResponse:
        """What the engine is and offers."""
        return await self._call.read(self._handshake.GetCapabilities, handshake_pb2.GetCapabilitiesRequest(), options)

    async def check_compatibility(
        self, engine: handshake_pb2.EngineDescription, **options: Unpack[opt.Call]
    ) -> handshake_pb2.CheckCompatibilityResponse:
        """Whether this engine and another, as its capabilities describe it, could exchange blocks, and if not, why."""
        request = handshake_pb2.CheckCompatibilityRequest(engine=engine)
        return await self._call.read(self._handshake.CheckCompatibility, request, options)

    async def connect_peer(
        self, address: str, *, engine_id: str = "", **options: Unpack[opt.Call]
    ) -> handshake_pb2.ConnectPeerResponse:
        """Lets this server do its handshake with another one now, so that the first transfer does not pay for it."""
        request = handshake_pb2.ConnectPeerRequest(peer=PeerAddress(address=address, engine_id=engine_id))
        return await self._call.read(self._handshake.ConnectPeer, request, options)

    async def handshake(
        self,
        engine: handshake_pb2.EngineDescription,
        *,
        endpoints: Sequence[pool_types_pb2.RankEndpoint] = (),
        expected_engine_id: str = "",
        **options: Unpack[opt.Call],
    ) -> handshake_pb2.HandshakeResponse:
        """Introduces an engine: for leads of other implementations. Routers want `connect_peer`."""
        request = handshake_pb2.HandshakeRequest(
            engine=engine, endpoints=endpoints, expected_engine_id=expected_engine_id
        )
        return await self._call.read(self._handshake.Handshake, request, options)

    # ---- the pool

    async def describe_pools(self, **options: Unpack[opt.Call]) -> pool_pb2.DescribePoolsResponse:
        """Groups, regions and who manages the blocks."""
        return await self._call.read(self._pool.DescribePools, pool_pb2.DescribePoolsRequest(), options)

    async def pool_status(self, **options: Unpack[opt.Call]) -> pool_pb2.GetPoolStatusResponse:
        """Counts per group: free, allocated, pinned by what."""
        return await self._call.read(self._pool.GetPoolStatus, pool_pb2.GetPoolStatusRequest(), options)

    async def allocate(
        self, counts: int | Mapping[int, int], **options: Unpack[opt.Allocation]
    ) -> pool_pb2.AllocateBlocksResponse:
        """Takes free blocks, all or none: so many of the one group, or {group: count}. Without a TTL they are taken
        until `free`.
        """
        by_group = {0: counts} if isinstance(counts, int) else counts
        rows = [pool_pb2.GroupCount(group=group, count=count) for group, count in by_group.items()]
        request = pool_pb2.AllocateBlocksRequest(counts=rows, **fields(options))
        return await self._call.change(self._pool.AllocateBlocks, request, options)

    async def renew_allocation(
        self, allocation_id: str, **options: Unpack[opt.Allocation]
    ) -> pool_pb2.AllocateBlocksResponse:
        """Extends the TTL of an allocation."""
        request = pool_pb2.AllocateBlocksRequest(allocation_id=allocation_id, **fields(options))
        return await self._call.change(self._pool.AllocateBlocks, request, options)

    async def free(self, blocks: Blocks, **options: Unpack[opt.OwnBlocks]) -> pool_pb2.FreeBlocksResponse:
        """Gives blocks back. Those that are pinned come free at their last unpin."""
        request = pool_pb2.FreeBlocksRequest(**_own(blocks, options))
        return await self._call.change(self._pool.FreeBlocks, request, options)

    async def read_blocks(
        self, blocks: Sequence[int], *, group: int = 0, rank: int = 0, **options: Unpack[opt.Reading]
    ) -> pool_pb2.ReadBlocksResponse:
        """Bytes of blocks, for debugging, where the server allows it."""
        (row,) = group_blocks({group: blocks})
        request = pool_pb2.ReadBlocksRequest(rank=rank, blocks=row, **fields(options))
        return await self._call.read(self._pool.ReadBlocks, request, options)

    # ---- hand-overs and transfers

    async def finished_blocks(
        self, blocks: Blocks, content: Tokens, **options: Unpack[opt.HandOver]
    ) -> handoff_pb2.FinishedBlocksResponse:
        """Hands finished blocks over: pins them under a lease and mints the READ grant that a consumer pulls with.
        Until the transfer's memory is RETURNED the caller does not reuse the blocks.
        """
        chosen = {"transfer_key": secrets.token_bytes(16), "last": True, **_own(blocks, options)}
        request = handoff_pb2.FinishedBlocksRequest(content=as_content(content), **chosen)
        return await self._call.change(self._handoff.FinishedBlocks, request, options)

    async def pull_blocks(
        self,
        pull: Grant | str,
        content: Tokens | None = None,
        *,
        blocks: Blocks | None = None,
        have_tokens: int = 0,
        incarnation: int = 0,
        **options: Unpack[opt.Pull],
    ) -> handoff_pb2.PullBlocksResponse:
        """Pulls what a grant offers, or gives an earlier pull, by its transfer id, the blocks that it waits for.

        `blocks` None: not known yet; empty: nowhere, all was found locally, which releases the source. `have_tokens`
        are those whose KV is here already; `incarnation` is the life that ids in `blocks` are of, where those do not
        say it. Returns at once; `wait` and `watch` tell the end.
        """
        request = handoff_pb2.PullBlocksRequest(**fields(options))
        if isinstance(pull, Grant):
            request.grant.CopyFrom(pull)
        else:
            request.transfer_id = pull
        if content is not None:
            request.content.CopyFrom(as_content(content))
        if blocks is not None:
            own = {"incarnation": incarnation or life_of(blocks)}
            destination = handoff_pb2.PullDestination(blocks=group_blocks(blocks), have_tokens=have_tokens, **own)
            request.destination.CopyFrom(destination)
        return await self._call.change(self._handoff.PullBlocks, request, options)

    async def reserve_blocks(
        self, transfer_key: bytes, blocks: Blocks, content: Tokens, **options: Unpack[opt.Reservation]
    ) -> handoff_pb2.ReserveBlocksResponse:
        """Reserves blocks that a push will fill, and mints the WRITE grant for it."""
        request = handoff_pb2.ReserveBlocksRequest(
            transfer_key=transfer_key, content=as_content(content), **_own(blocks, options)
        )
        return await self._call.change(self._handoff.ReserveBlocks, request, options)

    async def register_push(
        self, grant: Grant, *, request_id: str = "", **options: Unpack[opt.Change]
    ) -> handoff_pb2.RegisterPushResponse:
        """Tells the source of a push where its blocks are to go."""
        request = handoff_pb2.RegisterPushRequest(grant=grant, request_id=request_id)
        return await self._call.change(self._handoff.RegisterPush, request, options)

    async def get_transfer(self, transfer_id: str, **options: Unpack[opt.Call]) -> transfer_pb2.GetTransferResponse:
        """One transfer. NotFound means that its memory counts as QUARANTINED."""
        request = transfer_pb2.GetTransferRequest(transfer_id=transfer_id)
        return await self._call.read(self._transfers.GetTransfer, request, options)

    async def wait(
        self, transfer_id: str, *, returned: bool = False, timeout_s: float = WAIT_S
    ) -> transfer_pb2.Transfer:
        """The transfer once it is over, however it ended: look at its state. With `returned`, once its memory is
        RETURNED too. DeadlineExceeded names the phase that it is in; a silent server can add 5 s to `timeout_s`.
        """
        return await wait(self._call, self._transfers, transfer_id, returned, timeout_s)

    async def list_transfers(self, **options: Unpack[opt.Listing]) -> transfer_pb2.ListTransfersResponse:
        """Transfers that match, newest first. A watch after this reply misses nothing."""
        call: dict[str, object] = {name: options.pop(name) for name in ("limit", "timeout_s") if name in options}
        request = transfer_pb2.ListTransfersRequest(filter=transfer_pb2.TransferFilter(**fields(options)))
        return await self._call.pages(self._transfers.ListTransfers, request, call, "transfers")

    def watch(
        self, *, after: Reply | ResponseHeader | None = None, pace: Pace | None = None, **which: Unpack[opt.Which]
    ) -> AsyncGenerator[WatchEvent, None]:
        """Every change of the transfers that match, from now on, or after an earlier reply, for example that of
        `pull_blocks` or `list_transfers`. It survives lost connections and restarts; `HistoryLost` and
        `IncarnationChanged` mark where to list again.
        """
        cursor = Cursor(transfer_pb2.TransferFilter(**fields(which)), *point_of(after))
        return Watch(self._call, self._transfers.WatchTransfers, cursor, pace or Pace()).events()

    async def acknowledge(
        self, transfer_ids: Sequence[str], **options: Unpack[opt.Change]
    ) -> transfer_pb2.AcknowledgeTransfersResponse:
        """For the owning engine: it has seen the end of these transfers and the return of their memory."""
        request = transfer_pb2.AcknowledgeTransfersRequest(transfer_ids=transfer_ids)
        return await self._call.change(self._transfers.AcknowledgeTransfers, request, options)

    async def cancel(
        self, transfer: str | bytes, *, message: str = "", **options: Unpack[opt.Change]
    ) -> transfer_pb2.CancelTransferResponse:
        """Ends a transfer by its id, or (bytes) all with this transfer key, those still to come included."""
        request = transfer_pb2.CancelTransferRequest(message=message)
        if isinstance(transfer, bytes):
            request.transfer_key = transfer
        else:
            request.transfer_id = transfer
        return await self._call.change(self._transfers.CancelTransfer, request, options)

    # ---- leases

    async def grant_lease(
        self, blocks: Blocks, content: Tokens, **options: Unpack[opt.LeaseTerms]
    ) -> lease_pb2.GrantLeaseResponse:
        """Pins blocks and mints a READ grant, as finished_blocks does, without a transfer to follow."""
        request = lease_pb2.GrantLeaseRequest(content=as_content(content), **_own(blocks, options))
        return await self._call.change(self._leases.GrantLease, request, options)

    async def renew_leases(
        self, leases: Sequence[AnyLease], **options: Unpack[opt.Renewing]
    ) -> lease_pb2.RenewLeasesResponse:
        """Extends leases. One that cannot be renewed is a row with a reason, not an error."""
        request = lease_pb2.RenewLeasesRequest(leases=[lease_ref(lease) for lease in leases], **fields(options))
        return await self._call.read(self._leases.RenewLeases, request, options)

    async def release_lease(self, lease: AnyLease, **options: Unpack[opt.Change]) -> lease_pb2.ReleaseLeaseResponse:
        """Ends a lease before its time and says what came free."""
        request = lease_pb2.ReleaseLeaseRequest(lease=lease_ref(lease))
        return await self._call.change(self._leases.ReleaseLease, request, options)

    async def get_lease(self, lease: AnyLease, **options: Unpack[opt.Call]) -> lease_pb2.GetLeaseResponse:
        """One lease."""
        request = lease_pb2.GetLeaseRequest(lease=lease_ref(lease))
        return await self._call.read(self._leases.GetLease, request, options)

    async def list_leases(self, *, request_id: str = "", **options: Unpack[opt.Rows]) -> lease_pb2.ListLeasesResponse:
        """The live leases, oldest first."""
        request = lease_pb2.ListLeasesRequest(request_id=request_id)
        return await self._call.pages(self._leases.ListLeases, request, options, "leases")

    @asynccontextmanager
    async def lease(
        self, blocks: Blocks, content: Tokens, **options: Unpack[opt.LeaseTerms]
    ) -> AsyncIterator[HeldLease]:
        """A lease for the length of an `async with`: granted, renewed in time, released at the end."""
        sent = time.monotonic()
        reply = await self.grant_lease(blocks, content, **options)
        renewal = Renewal(lease_ref(reply.lease), reply.lease.lease_id)
        renewal.granted(in_seconds(reply.lease.remaining), sent)
        async with self._keeper.holding(renewal, reply.grant, lambda: self._release(renewal)) as held:
            yield held

    @asynccontextmanager
    async def keep_alive(self, lease: AnyLease, *, release: bool = True) -> AsyncIterator[HeldLease]:
        """Renews a lease in time while the `async with` lasts; `release` says whether it ends with it. Raises if the
        lease is over already. `check` and `wait_over` of what it gives tell when it is lost.
        """
        renewal = Renewal(lease_ref(lease), lease if isinstance(lease, str) else lease.lease_id)
        grant = lease if isinstance(lease, Grant) else None
        sent = time.monotonic()
        reply = await self.renew_leases([lease])
        renewal.answered(reply.leases[0], sent)
        if renewal.error:
            raise renewal.error
        at_end = (lambda: self._release(renewal)) if release else None
        async with self._keeper.holding(renewal, grant, at_end) as held:
            yield held

    async def _release(self, renewal: Renewal) -> None:
        with suppress(NotFound, PreconditionFailed):  # it ended a moment ago, which is all that is wanted
            await self._call.change(self._leases.ReleaseLease, lease_pb2.ReleaseLeaseRequest(lease=renewal.ref), {})

    # ---- for the engine's scheduler

    def scheduler(self) -> Scheduler:
        """The policy for the scheduler of this server's engine. An engine has one scheduler: news go to the caller that
        asks first.
        """
        return Scheduler(self._call, SchedulerServiceStub(self.channel))

    # ---- for operators

    async def status(self, **options: Unpack[opt.Call]) -> admin_pb2.GetStatusResponse:
        """Whether the server takes work, and what it has done and has in flight."""
        return await self._call.read(self._admin.GetStatus, admin_pb2.GetStatusRequest(), options)

    async def peers(self, **options: Unpack[opt.Call]) -> admin_pb2.ListPeersResponse:
        """The engines that this one knows, newest first."""
        return await self._call.read(self._admin.ListPeers, admin_pb2.ListPeersRequest(), options)

    async def pins(
        self, block: int | None = None, *, group: int = 0, **options: Unpack[opt.Rows]
    ) -> admin_pb2.ListPinsResponse:
        """Who pins which blocks, or one block, why and since when; oldest first."""
        request = admin_pb2.ListPinsRequest()
        if block is not None:
            request.block.CopyFrom(admin_pb2.BlockRef(group=group, block=block))
        return await self._call.pages(self._admin.ListPins, request, options, "pins")

    async def release_quarantine(
        self, *, force: bool = False, message: str = "", transfer_ids: Sequence[str] = (), **options: Unpack[opt.Change]
    ) -> admin_pb2.ReleaseQuarantineResponse:
        """Gets memory out of quarantine: by re-key, which takes as long as a transfer may (give it a `timeout_s` above
        that), or with `force` at your word, which `message` explains.
        """
        request = admin_pb2.ReleaseQuarantineRequest(force=force, message=message, transfer_ids=transfer_ids)
        return await self._call.change(self._admin.ReleaseQuarantine, request, options)


def _own(blocks: Blocks, options: Mapping[str, object]) -> dict[str, Any]:
    """Blocks of the engine that is called, with the life that their ids are of, and the other options."""
    return {"blocks": group_blocks(blocks), "incarnation": life_of(blocks), **fields(options)}
