"""A client of two servers that pulls or pushes blocks from one to the other, timed from call to woken waiter.

It calls like the Python client: a pull waits for its end in the call itself, and calls share a stream.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from bench.plan import BLOCK_TOKENS
from kvgrpc.client.call_stream import CallStream
from kvgrpc.core.values.block_ids import Ids, to_runs
from kvgrpc.errors import InternalError, Reason
from kvgrpc.v1 import (
    common_pb2,
    handoff_pb2,
    handoff_pb2_grpc,
    handshake_pb2,
    lease_pb2,
    lease_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    transfer_pb2,
)
from kvgrpc.v1.handshake_pb2_grpc import HandshakeServiceStub
from kvgrpc.v1.transfer_pb2_grpc import TransferServiceStub
from kvgrpc.wire.values import PHASES

_CALL_S = 60.0
_OPTIONS = [("grpc.max_receive_message_length", 4 << 20), ("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True)
class Moved:
    """One pull or push that succeeded."""

    seconds: float
    """Seconds from the call of PullBlocks, or of FinishedBlocks for a push, until the waiter woke."""
    woken_ns: int
    """Time at which the waiter woke, in nanoseconds of the system's monotonic clock."""
    transfer: transfer_pb2.Transfer
    """Transfer of the side that moved the bytes."""

    def phase_s(self, name: str) -> float:
        """Returns the seconds of a phase of the transfer, or 0 if there was no such phase."""
        timed = (phase.duration for phase in self.transfer.phases if phase.phase == PHASES[name])
        return sum(duration.ToNanoseconds() for duration in timed) / 1e9


@dataclass(frozen=True)
class Registered:
    """A push that both servers know, before its first part."""

    key: bytes
    transfer_id: str
    """Transfer id at the destination."""
    source_id: str
    """Transfer id of the same push at the source."""


class Caller:
    """Calls both servers from the running event loop. Use it as a context manager."""

    def __init__(self, source: str, destination: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        """Without `credentials` the connections are plain text."""
        self.source, self.destination = (
            grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
            if credentials
            else grpc.aio.insecure_channel(address, options=_OPTIONS)
            for address in (source, destination)
        )
        self._at_source = handoff_pb2_grpc.HandoffServiceStub(self.source)
        self._at_destination = handoff_pb2_grpc.HandoffServiceStub(self.destination)
        self._wait = TransferServiceStub(self.destination).WaitTransfer
        self._wait_at_source = TransferServiceStub(self.source).WaitTransfer
        self._source_stream = CallStream(self.source, source, tuple)
        self._destination_stream = CallStream(self.destination, destination, tuple)
        self._incarnations = (0, 0)
        """Incarnations of source and destination."""
        self.trace: Callable[[], str] = str
        """Returns the traceparent of the next pull; empty: none."""

    async def __aenter__(self) -> Self:
        asked = handshake_pb2.GetCapabilitiesRequest()
        source, destination = await asyncio.gather(
            *(
                HandshakeServiceStub(channel).GetCapabilities(asked, timeout=_CALL_S)
                for channel in (self.source, self.destination)
            )
        )
        self._incarnations = (source.header.incarnation, destination.header.incarnation)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self._source_stream.close(), self._destination_stream.close())
        await asyncio.gather(self.source.close(), self.destination.close())

    async def allocate(self, blocks: int) -> None:
        """Takes all blocks of both pools, so that the caller chooses which ids to use."""
        counts = [pool_pb2.GroupBlockCount(group=0, block_count=blocks)]
        request = pool_pb2.AllocateBlocksRequest(group_block_counts=counts, no_expiry=True)
        for channel in (self.source, self.destination):
            await pool_pb2_grpc.PoolServiceStub(channel).AllocateBlocks(request, timeout=_CALL_S)

    def source_blocks(self, ids: Ids) -> common_pb2.Blocks:
        """Returns blocks of the source."""
        return named_blocks(ids, self._incarnations[0])

    def destination_blocks(self, ids: Ids) -> common_pb2.Blocks:
        """Returns blocks of the destination."""
        return named_blocks(ids, self._incarnations[1])

    async def pull(self, source: Ids, destination: Ids, meanwhile: Callable[[], object] | None = None) -> Moved:
        """Hands blocks over, calls `meanwhile`, and then pulls them; only the pull is timed.

        Raises InternalError if it fails.
        """
        trace = self.trace()
        job = handoff_pb2.HandOver(blocks=self.source_blocks(source), content=content(len(source)))
        handed = handoff_pb2.FinishedBlocksRequest(transfer_key=os.urandom(16), for_readers=job)
        request = handoff_pb2.PullBlocksRequest(
            grant=(await _call(self._source_stream, self._at_source.FinishedBlocks, handed, trace)).grant,
            content=content(len(destination)),
            destination=handoff_pb2.PullDestination(blocks=self.destination_blocks(destination)),
            wait=transfer_pb2.TransferWait(timeout=Duration(seconds=30)),
        )
        if meanwhile is not None:
            meanwhile()
        began = time.monotonic_ns()
        ended = await _call(self._destination_stream, self._at_destination.PullBlocks, request, trace)
        woken = time.monotonic_ns()
        return Moved((woken - began) / 1e9, woken, _succeeded(ended.transfer))

    async def register(self, destination: Ids) -> Registered:
        """Reserves blocks and registers the push at the source."""
        key = os.urandom(16)
        request = handoff_pb2.ReserveBlocksRequest(
            transfer_key=key, blocks=self.destination_blocks(destination), content=content(len(destination))
        )
        reserved = await self._at_destination.ReserveBlocks(request, timeout=_CALL_S)
        registered = await self._at_source.RegisterPush(
            handoff_pb2.RegisterPushRequest(grant=reserved.grant), timeout=_CALL_S
        )
        return Registered(key, reserved.transfer.transfer_id, registered.transfer.transfer_id)

    async def push(self, registered: Registered, source: Ids) -> Moved:
        """Hands over the blocks of a registered push in one part, while a caller waits for its end at the destination.

        Raises InternalError if the push fails.
        """
        part = handoff_pb2.PushPart(blocks=self.source_blocks(source), content=content(len(source)), last=True)
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=registered.key, part=part)
        began = time.monotonic_ns()
        (ended, woken), _ = await asyncio.gather(self._ended(registered.transfer_id), self._finish(request))
        sent = await _call(self._source_stream, self._wait_at_source, _until_over(registered.source_id))
        # The servers choose who moves the bytes: the other side's transfer has no paths.
        moved = ended if ended.paths else sent.transfer
        _succeeded(ended)
        return Moved((woken - began) / 1e9, woken, _succeeded(moved))

    async def one_block(self, count: int) -> list[Moved]:
        """Makes `count` pulls of one block, one after the other."""
        block = np.zeros(1, dtype=np.int64)
        return [await self.pull(block, block) for _ in range(count)]

    async def at_once(self, count: int, in_flight: int) -> None:
        """Makes `count` pulls of one block, always `in_flight` of them at once, each with a block of its own."""
        left = iter(range(count))

        async def one_after_the_other(number: int) -> None:
            block = np.array([number], dtype=np.int64)
            for _ in left:
                await self.pull(block, block)

        await asyncio.gather(*(one_after_the_other(number) for number in range(in_flight)))

    async def one_block_pushed(self, count: int) -> list[Moved]:
        """Makes `count` pushes of one block, one after the other, each registered before it is timed."""
        block = np.zeros(1, dtype=np.int64)
        return [await self.push(await self.register(block), block) for _ in range(count)]

    async def leave_leases(self, count: int) -> None:
        """Leaves that many leases on one block of the source."""
        request = lease_pb2.GrantLeaseRequest(
            blocks=self.source_blocks(np.zeros(1, dtype=np.int64)), content=content(1), ttl=Duration(seconds=600)
        )
        grant = lease_pb2_grpc.LeaseServiceStub(self.source).GrantLease
        left = iter(range(count))

        async def one_after_the_other() -> None:
            for _ in left:
                await _call(self._source_stream, grant, request)

        await asyncio.gather(*(one_after_the_other() for _ in range(16)))

    async def _finish(self, request: handoff_pb2.FinishedBlocksRequest) -> None:
        await _call(self._source_stream, self._at_source.FinishedBlocks, request)

    async def _ended(self, transfer_id: str) -> tuple[transfer_pb2.Transfer, int]:
        """Returns a transfer of the destination once it is over, and when the waiting caller woke."""
        ended = await _call(self._destination_stream, self._wait, _until_over(transfer_id))
        return ended.transfer, time.monotonic_ns()


async def _call(stream: CallStream, method: Any, request: Message, trace: str = "") -> Any:
    """Calls over the stream once the stream is usable, else as a unary RPC. Raises KVGrpcError or AioRpcError."""
    metadata = (("traceparent", trace),) if trace else ()
    return await stream.reply(request, _CALL_S, trace) or await method(request, timeout=_CALL_S, metadata=metadata)


def named_blocks(ids: Ids, incarnation: int) -> common_pb2.Blocks:
    """Returns blocks of the only group of the bench's pools."""
    starts, counts = to_runs(ids)
    row = common_pb2.GroupBlocks(group=0, runs=common_pb2.BlockRuns(starts=starts, counts=counts))
    return common_pb2.Blocks(incarnation=incarnation, groups=[row])


def content(blocks: int) -> common_pb2.Content:
    """Returns the content of the blocks as an opaque id: computing a digest chain is no part of a transfer's cost."""
    return common_pb2.Content(opaque_id=b"python -m bench", opaque_tokens=blocks * BLOCK_TOKENS)


def _until_over(transfer_id: str) -> transfer_pb2.WaitTransferRequest:
    return transfer_pb2.WaitTransferRequest(transfer_id=transfer_id, timeout=Duration(seconds=30))


def _succeeded(transfer: transfer_pb2.Transfer) -> transfer_pb2.Transfer:
    """Returns the transfer. Raises InternalError if it failed."""
    if transfer.state != transfer_pb2.TRANSFER_STATE_SUCCEEDED:
        raise InternalError(Reason.INTERNAL, f"a transfer failed: {transfer.failure.message or transfer}")
    return transfer
