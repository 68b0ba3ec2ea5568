"""The client: one method for each RPC of a server. The comments of the schema are the contract.

Arguments are Python values: lists of block ids and token ids, seconds. Results are the messages of the schema, so that
nothing is lost. Errors are those of `kvgrpc.errors`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc import aio

from kvgrpc.client import options as opt
from kvgrpc.client.call_stream import CallStream
from kvgrpc.client.caller import Caller, as_metadata
from kvgrpc.client.channel import check_target, open_channel
from kvgrpc.client.credentials import BearerToken, Credentials
from kvgrpc.client.fleet import Fleet
from kvgrpc.client.leases import HeldLease, Keeper, KnownLease
from kvgrpc.client.reloading import ReloadingChannel
from kvgrpc.client.renewal_stream import RenewalStream
from kvgrpc.client.scheduler import Scheduler
from kvgrpc.client.tensors import Tensors
from kvgrpc.client.tls_probe import TlsProbe
from kvgrpc.client.transfers import TransferCalls
from kvgrpc.client.values import (
    AnyBlocks,
    AnyLease,
    Tokens,
    as_content,
    block_counts,
    call_options,
    duration,
    fields,
    in_seconds,
    lease_ref,
    other_fields,
    own_blocks,
)
from kvgrpc.client.watch_engine import EngineEvent, watch_engine
from kvgrpc.errors import NotFound, PreconditionFailed
from kvgrpc.v1 import admin_pb2, handshake_pb2, lease_pb2, pool_pb2, pool_types_pb2
from kvgrpc.v1.admin_pb2_grpc import AdminServiceStub
from kvgrpc.v1.common_pb2 import Grant, PeerAddress
from kvgrpc.v1.fleet_pb2_grpc import FleetServiceStub
from kvgrpc.v1.handshake_pb2_grpc import HandshakeServiceStub
from kvgrpc.v1.pool_pb2_grpc import PoolServiceStub
from kvgrpc.v1.scheduler_pb2_grpc import SchedulerServiceStub
from kvgrpc.v1.tensor_pb2_grpc import TensorServiceStub

TIMEOUT_S = 10.0
"""Deadline of a call that states none, retries included, in seconds."""
RELEASE_QUARANTINE_TIMEOUT_S = 60.0
"""Deadline of ReleaseQuarantine, in seconds. The call waits for transfers in flight, which by default end within 30
s.
"""


def connect(
    address: str,
    *,
    timeout_s: float = TIMEOUT_S,
    credentials: Credentials | grpc.ChannelCredentials | None = None,
    metadata: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    channel_options: Sequence[tuple[str, str | int]] = (),
) -> "Client":
    """Returns a client of the server at `address` (`host:port`), in the running event loop:

        async with connect("127.0.0.1:50051") as client:
            reply = await client.capabilities()

    Nothing is sent before the first call. Without `credentials` the connection is not encrypted. New connections take
    the files of `credentials` as they are then. Every call carries `metadata`. Raises InvalidRequest for files that are
    not usable, and ValueError for an address without a port.
    """
    check_target(address)
    asyncio.get_running_loop()  # a channel belongs to its loop: raise now if there is none, instead of hanging later
    paths = token = probe = None
    if isinstance(credentials, Credentials | None):
        own, credentials = credentials or Credentials(), None
        paths, token, probe = own.paths, BearerToken(own), TlsProbe(address, own)
    channel: aio.Channel
    if paths is None:
        channel = open_channel(address, credentials, channel_options)
    else:
        channel = ReloadingChannel(address, paths, channel_options)
    caller = Caller(address, timeout_s, as_metadata(metadata), token, probe)
    return Client(channel, replace(caller, stream=CallStream(channel, address, caller.identity)))


class Client(TransferCalls):
    """One server, as seen from one event loop; `connect` makes it. Any number of its methods may run at once."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        super().__init__(channel, caller)
        self._admin = AdminServiceStub(channel)
        self._handshake = HandshakeServiceStub(channel)
        self._pool = PoolServiceStub(channel)
        self._keeper = Keeper(RenewalStream(caller, self._leases))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends calls, watches and renewals. Transfers and leases stay alive at the server."""
        try:
            await self._keeper.close()
            if self._call.stream is not None:
                await self._call.stream.close()
        finally:
            await self.channel.close()

    # ---- engines

    async def capabilities(self, **options: Unpack[opt.CallOptions]) -> handshake_pb2.GetCapabilitiesResponse:
        """Returns the engine's description and capabilities."""
        return await self._call.read(self._handshake.GetCapabilities, handshake_pb2.GetCapabilitiesRequest(), options)

    async def get_engine(self, **options: Unpack[opt.CallOptions]) -> handshake_pb2.GetEngineResponse:
        """Returns the engine's current state: whether it takes work, what is free, and what waits."""
        return await self._call.read(self._handshake.GetEngine, handshake_pb2.GetEngineRequest(), options)

    def watch_engine(self, *, min_interval_s: float | None = None) -> AsyncGenerator[EngineEvent, None]:
        """Yields the engine's state now and after every change. The watch survives lost connections and restarts of the
        server. `EngineUnreachable` marks that the server cannot be reached. A reply of another incarnation means that
        all leases, grants and transfers of the one before are gone.
        """
        request = handshake_pb2.WatchEngineRequest()
        if min_interval_s is not None:
            request.min_interval.CopyFrom(duration(min_interval_s))
        return watch_engine(self._call, self._handshake.WatchEngine, lambda: request)

    async def check_compatibility(
        self, engine: handshake_pb2.EngineDescription, **options: Unpack[opt.CallOptions]
    ) -> handshake_pb2.CheckCompatibilityResponse:
        """Returns whether this engine and another can exchange blocks, and if not, why. `engine` is the other's
        description.
        """
        request = handshake_pb2.CheckCompatibilityRequest(engine=engine)
        return await self._call.read(self._handshake.CheckCompatibility, request, options)

    async def connect_peer(
        self, address: str, *, engine_id: str = "", **options: Unpack[opt.TrialOptions]
    ) -> handshake_pb2.ConnectPeerResponse:
        """Makes this server do its handshake with another one now, so that the first transfer does not pay for it."""
        peer = PeerAddress(address=address, engine_id=engine_id)
        request = handshake_pb2.ConnectPeerRequest(peer=peer, **fields(options))
        return await self._call.read(self._handshake.ConnectPeer, request, options)

    async def handshake(
        self,
        engine: handshake_pb2.EngineDescription,
        *,
        endpoints: Sequence[pool_types_pb2.RankEndpoint] = (),
        expected_engine_id: str = "",
        **options: Unpack[opt.CallOptions],
    ) -> handshake_pb2.HandshakeResponse:
        """Introduces an engine: meant for leads of other implementations. Routers use `connect_peer`."""
        request = handshake_pb2.HandshakeRequest(
            engine=engine, endpoints=endpoints, expected_engine_id=expected_engine_id
        )
        return await self._call.read(self._handshake.Handshake, request, options)

    # ---- the pool

    async def describe_pools(self, **options: Unpack[opt.CallOptions]) -> pool_pb2.DescribePoolsResponse:
        """Returns the groups, the regions, and who manages the blocks."""
        return await self._call.read(self._pool.DescribePools, pool_pb2.DescribePoolsRequest(), options)

    async def pool_status(self, **options: Unpack[opt.CallOptions]) -> pool_pb2.GetPoolStatusResponse:
        """Returns counts per group: free, allocated, and pinned by each kind of pin."""
        return await self._call.read(self._pool.GetPoolStatus, pool_pb2.GetPoolStatusRequest(), options)

    async def allocate(
        self, counts: int | Mapping[int, int], **options: Unpack[opt.AllocateOptions]
    ) -> pool_pb2.AllocateBlocksResponse:
        """Takes free blocks, all or none: a count of the only group, or {group: count}. An allocation is freed after 10
        minutes, or after `ttl_s`; with `no_expiry` only by `free`. `request_id` and `label` appear in `allocations`.
        With `reclaim`, missing blocks are taken back from soft leases. Every method that takes blocks accepts the reply
        as it is.
        """
        request = pool_pb2.AllocateBlocksRequest(group_block_counts=block_counts(counts), **fields(options))
        return await self._call.change(self._pool.AllocateBlocks, request, options)

    async def reclaim(
        self, counts: int | Mapping[int, int], **options: Unpack[opt.ReclaimOptions]
    ) -> pool_pb2.ReclaimBlocksResponse:
        """Takes blocks back from hand-overs that nobody claimed in their firm time, all or none: a count of the only
        group, or {group: count}. `request_time_us` is when the request that needs them began: with it, blocks are also
        taken from younger readers that wait for blocks of their own.
        """
        request = pool_pb2.ReclaimBlocksRequest(group_block_counts=block_counts(counts), **fields(options))
        return await self._call.change(self._pool.ReclaimBlocks, request, options)

    async def renew_allocation(
        self, allocation_id: str, **options: Unpack[opt.RenewAllocationOptions]
    ) -> pool_pb2.AllocateBlocksResponse:
        """Extends the TTL of an allocation."""
        request = pool_pb2.AllocateBlocksRequest(allocation_id=allocation_id, **fields(options))
        return await self._call.change(self._pool.AllocateBlocks, request, options)

    async def allocations(
        self,
        block: int | None = None,
        *,
        group: int = 0,
        request_id: str = "",
        label: str = "",
        **options: Unpack[opt.ListOptions],
    ) -> pool_pb2.ListAllocationsResponse:
        """Returns the allocations, or those that hold one block; oldest first."""
        request = pool_pb2.ListAllocationsRequest(block=block, group=group, request_id=request_id, label=label)
        return await self._call.pages(self._pool.ListAllocations, request, options, "allocations")

    async def free(
        self, blocks: AnyBlocks | str, **options: Unpack[opt.OwnBlocksOptions]
    ) -> pool_pb2.FreeBlocksResponse:
        """Frees blocks: those given, or (a string) all that is left of this allocation. Pinned blocks become free at
        their last unpin.
        """
        which: dict[str, Any] = {"allocation_id": blocks} if isinstance(blocks, str) else own_blocks(blocks, options)
        request = pool_pb2.FreeBlocksRequest(**which, **other_fields(options))
        return await self._call.change(self._pool.FreeBlocks, request, call_options(options))

    async def read_blocks(
        self, blocks: AnyBlocks, *, rank: int = 0, **options: Unpack[opt.ReadBlocksOptions]
    ) -> pool_pb2.ReadBlocksResponse:
        """Returns the bytes of blocks, for debugging, if the server allows it."""
        request = pool_pb2.ReadBlocksRequest(rank=rank, **own_blocks(blocks, options), **other_fields(options))
        return await self._call.read(self._pool.ReadBlocks, request, call_options(options))

    # ---- leases

    async def grant_lease(
        self, blocks: AnyBlocks, content: Tokens, **options: Unpack[opt.GrantLeaseOptions]
    ) -> lease_pb2.GrantLeaseResponse:
        """Pins blocks and mints a READ grant, like finished_blocks, but without a transfer."""
        request = lease_pb2.GrantLeaseRequest(
            content=as_content(content), **own_blocks(blocks, options), **other_fields(options)
        )
        return await self._call.change(self._leases.GrantLease, request, call_options(options))

    async def renew_leases(
        self, leases: Sequence[AnyLease], **options: Unpack[opt.RenewLeasesOptions]
    ) -> lease_pb2.RenewLeasesResponse:
        """Extends leases. A lease that cannot be renewed is a row with a reason, not an error."""
        request = lease_pb2.RenewLeasesRequest(leases=[lease_ref(lease) for lease in leases], **fields(options))
        return await self._call.read(self._leases.RenewLeases, request, options)

    async def release_lease(
        self, lease: AnyLease, **options: Unpack[opt.EffectOptions]
    ) -> lease_pb2.ReleaseLeaseResponse:
        """Ends a lease early and returns what came free."""
        request = lease_pb2.ReleaseLeaseRequest(lease=lease_ref(lease), **fields(options))
        return await self._call.change(self._leases.ReleaseLease, request, options)

    async def get_lease(self, lease: AnyLease, **options: Unpack[opt.CallOptions]) -> lease_pb2.GetLeaseResponse:
        """Returns one lease."""
        request = lease_pb2.GetLeaseRequest(lease=lease_ref(lease))
        return await self._call.read(self._leases.GetLease, request, options)

    async def list_leases(
        self, *, request_id: str = "", **options: Unpack[opt.ListOptions]
    ) -> lease_pb2.ListLeasesResponse:
        """Returns the live leases, oldest first."""
        request = lease_pb2.ListLeasesRequest(request_id=request_id)
        return await self._call.pages(self._leases.ListLeases, request, options, "leases")

    @asynccontextmanager
    async def lease(
        self, blocks: AnyBlocks, content: Tokens, **options: Unpack[opt.LeaseOptions]
    ) -> AsyncIterator[HeldLease]:
        """Holds a lease during an `async with`: granted at its start, renewed in time, released at its end."""
        sent = time.monotonic()
        reply = await self.grant_lease(blocks, content, **options)
        renewal = KnownLease(lease_ref(reply.lease), reply.lease.lease_id)
        renewal.granted(in_seconds(reply.lease.remaining), sent)
        async with self._keeper.holding(renewal, reply.grant, lambda: self._release(renewal)) as held:
            yield held

    @asynccontextmanager
    async def keep_alive(self, lease: AnyLease, *, release: bool = True) -> AsyncIterator[HeldLease]:
        """Renews a lease in time during an `async with`, and with `release` releases it at the end. Raises if the lease
        is already over. `check` and `wait_over` of the yielded HeldLease tell when the lease is lost.
        """
        renewal = KnownLease(lease_ref(lease), lease if isinstance(lease, str) else lease.lease_id)
        grant = lease if isinstance(lease, Grant) else None
        sent = time.monotonic()
        reply = await self.renew_leases([lease])
        renewal.answered(reply.leases[0], sent)
        if renewal.error:
            raise renewal.error
        at_end = (lambda: self._release(renewal)) if release else None
        async with self._keeper.holding(renewal, grant, at_end) as held:
            yield held

    async def _release(self, renewal: KnownLease) -> None:
        with suppress(NotFound, PreconditionFailed):  # the lease ended a moment ago, which is what is wanted
            await self._call.change(self._leases.ReleaseLease, lease_pb2.ReleaseLeaseRequest(lease=renewal.ref), {})

    # ---- for the scheduler of an engine

    def scheduler(self) -> Scheduler:
        """Returns the policy for the scheduler of this server's engine. An engine has one: only the first caller gets
        the news.
        """
        return Scheduler(self._call, SchedulerServiceStub(self.channel))

    # ---- for engines without blocks

    def tensors(self) -> Tensors:
        """Returns the named tensors of a server whose pool is a staging store."""
        return Tensors(self._call, TensorServiceStub(self.channel))

    def fleet(self) -> Fleet:
        """Returns the engines of the registry of a server that has one."""
        return Fleet(self._call, FleetServiceStub(self.channel))

    # ---- for operators

    async def status(self, **options: Unpack[opt.CallOptions]) -> admin_pb2.GetStatusResponse:
        """Returns whether the server takes work, what it has done, and what is in flight."""
        return await self._call.read(self._admin.GetStatus, admin_pb2.GetStatusRequest(), options)

    async def start_drain(self, reason: str = "", **options: Unpack[opt.EffectOptions]) -> admin_pb2.StartDrainResponse:
        """Stops the server from taking new work. The reply comes at once and names what is still in progress. Call
        `get_drain` until nothing is, then stop the server.
        """
        request = admin_pb2.StartDrainRequest(reason=reason, **fields(options))
        return await self._call.change(self._admin.StartDrain, request, options)

    async def cancel_drain(self, **options: Unpack[opt.EffectOptions]) -> admin_pb2.CancelDrainResponse:
        """Lets the server take new work again."""
        request = admin_pb2.CancelDrainRequest(**fields(options))
        return await self._call.change(self._admin.CancelDrain, request, options)

    async def get_drain(self, page_size: int = 0, **options: Unpack[opt.CallOptions]) -> admin_pb2.GetDrainResponse:
        """Returns whether the server drains, and what is in progress with its owners; at most `page_size` rows."""
        return await self._call.read(self._admin.GetDrain, admin_pb2.GetDrainRequest(page_size=page_size), options)

    async def peers(self, **options: Unpack[opt.ListOptions]) -> admin_pb2.ListPeersResponse:
        """Returns the engines that this one knows, newest first."""
        return await self._call.pages(self._admin.ListPeers, admin_pb2.ListPeersRequest(), options, "peers")

    async def pins(
        self, block: int | None = None, *, group: int = 0, **options: Unpack[opt.ListOptions]
    ) -> admin_pb2.ListPinsResponse:
        """Returns who pins which blocks, or one block, why and since when; oldest first."""
        request = admin_pb2.ListPinsRequest()
        if block is not None:
            request.block.CopyFrom(admin_pb2.BlockRef(group=group, block=block))
        return await self._call.pages(self._admin.ListPins, request, options, "pins")

    async def release_quarantine(
        self,
        *,
        force: bool = False,
        message: str = "",
        transfer_ids: Sequence[str] = (),
        **options: Unpack[opt.EffectOptions],
    ) -> admin_pb2.ReleaseQuarantineResponse:
        """Ends quarantines: by re-key, or with `force` on the caller's assurance, which `message` explains. A re-key
        takes as long as a transfer may. The deadline is a minute; if transfers may take longer, give a larger
        `timeout_s`.
        """
        options = {"timeout_s": RELEASE_QUARANTINE_TIMEOUT_S, **options}
        request = admin_pb2.ReleaseQuarantineRequest(
            force=force, message=message, transfer_ids=transfer_ids, **fields(options)
        )
        return await self._call.change(self._admin.ReleaseQuarantine, request, options)

    async def audit_records(self, **options: Unpack[opt.ListOptions]) -> admin_pb2.ListAuditRecordsResponse:
        """Returns who ended or changed what, newest first."""
        request = admin_pb2.ListAuditRecordsRequest()
        return await self._call.pages(self._admin.ListAuditRecords, request, options, "records")

    async def spans(
        self, *, transfer_id: str = "", trace_id: str = "", **options: Unpack[opt.ListOptions]
    ) -> admin_pb2.ListSpansResponse:
        """Returns the spans that the server has kept of a transfer's trace, or of a trace."""
        request = admin_pb2.ListSpansRequest(transfer_id=transfer_id, trace_id=trace_id)
        return await self._call.pages(self._admin.ListSpans, request, options, "spans")

    async def forget_engine(
        self, engine_id: str, *, message: str = "", **options: Unpack[opt.CallOptions]
    ) -> admin_pb2.ForgetEngineResponse:
        """Lets another identity bring that engine id. Returns the name of the one that owned it."""
        request = admin_pb2.ForgetEngineRequest(engine_id=engine_id, message=message)
        return await self._call.read(self._admin.ForgetEngine, request, options)
