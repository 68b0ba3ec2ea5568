"""A client that hands blocks over at one server and pulls them with another, timed from call to woken waiter."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration

from kvgrpc.bench.plan import BLOCK_TOKENS
from kvgrpc.core.descriptors import Ids, to_runs
from kvgrpc.errors import InternalError, Reason
from kvgrpc.v1 import common_pb2, handoff_pb2, handoff_pb2_grpc, pool_pb2, pool_pb2_grpc, transfer_pb2
from kvgrpc.v1.transfer_pb2_grpc import TransferServiceStub

_CALL_S = 60.0
_OPTIONS = [("grpc.max_receive_message_length", 4 << 20), ("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True)
class Pulled:
    """One pull that succeeded."""

    seconds: float
    """From the call of PullBlocks until the waiter was back."""
    woken_ns: int
    """When the waiter was back, on the system's monotonic clock."""
    transfer: transfer_pb2.Transfer

    def phase_s(self, name: str) -> float:
        """How long a phase of the transfer took; 0 where it had none of that name."""
        return sum(phase.duration.ToNanoseconds() for phase in self.transfer.phases if phase.name == name) / 1e9


class Puller:
    """Calls both servers from the running event loop. Use it as a context manager."""

    def __init__(self, source: str, destination: str) -> None:
        self.source = grpc.aio.insecure_channel(source, options=_OPTIONS)
        self.destination = grpc.aio.insecure_channel(destination, options=_OPTIONS)
        self._finish = handoff_pb2_grpc.HandoffServiceStub(self.source).FinishedBlocks
        self._pull = handoff_pb2_grpc.HandoffServiceStub(self.destination).PullBlocks
        self._wait = TransferServiceStub(self.destination).WaitTransfer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self.source.close(), self.destination.close())

    async def allocate(self, blocks: int) -> None:
        """Takes all blocks of both pools: which ids are used is then the caller's choice."""
        request = pool_pb2.AllocateBlocksRequest(counts=[pool_pb2.GroupCount(group=0, count=blocks)])
        for channel in (self.source, self.destination):
            await pool_pb2_grpc.PoolServiceStub(channel).AllocateBlocks(request, timeout=_CALL_S)

    async def hand_over(self, blocks: Ids) -> common_pb2.Grant:
        """A READ grant for blocks of the source."""
        request = handoff_pb2.FinishedBlocksRequest(
            transfer_key=os.urandom(16), blocks=group_blocks(blocks), content=content(len(blocks)), last=True
        )
        return (await self._finish(request, timeout=_CALL_S)).grant

    async def pull(self, grant: common_pb2.Grant, blocks: Ids) -> Pulled:
        """Pulls what the grant stands for into blocks of the destination. Raises InternalError if that fails."""
        request = handoff_pb2.PullBlocksRequest(
            grant=grant,
            content=content(len(blocks)),
            destination=handoff_pb2.PullDestination(blocks=group_blocks(blocks)),
        )
        began = time.monotonic_ns()
        transfer = (await self._pull(request, timeout=_CALL_S)).transfer
        wait = transfer_pb2.WaitTransferRequest(transfer_id=transfer.transfer_id, timeout=Duration(seconds=30))
        transfer = (await self._wait(wait, timeout=_CALL_S)).transfer
        woken = time.monotonic_ns()
        if transfer.state != transfer_pb2.TRANSFER_STATE_SUCCEEDED:
            raise InternalError(Reason.INTERNAL, f"a pull failed: {transfer.failure.message or transfer}")
        return Pulled((woken - began) / 1e9, woken, transfer)

    async def one_block(self, count: int) -> list[Pulled]:
        """`count` pulls of one block, one after the other."""
        block = np.zeros(1, dtype=np.int64)
        return [await self.pull(await self.hand_over(block), block) for _ in range(count)]


def group_blocks(blocks: Ids) -> Sequence[common_pb2.GroupBlocks]:
    """Blocks of the one group of the bench's pools."""
    starts, counts = to_runs(blocks)
    return [common_pb2.GroupBlocks(group=0, blocks=common_pb2.BlockRuns(starts=starts, counts=counts))]


def content(blocks: int) -> common_pb2.Content:
    """What the blocks hold, by an opaque id: what computing a digest chain costs is not a transfer's cost."""
    return common_pb2.Content(opaque_id=b"kvgrpc bench", opaque_tokens=blocks * BLOCK_TOKENS)
