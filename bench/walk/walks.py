"""Walks: the Python calls of kvgrpc that one hand-over, one pull and one put tensor make in two servers.

Both servers run in this process, over shm, and are called by plain stubs, so that no client is counted. Each request is
made several times, and the shortest walk counts: the first lacks connections and caches, and a timer runs in others.
"""

import asyncio
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

import kvgrpc
from kvgrpc.config import Config, TensorsConfig
from kvgrpc.server import Server
from kvgrpc.v1 import common_pb2, handoff_pb2, pool_pb2, tensor_pb2, transfer_pb2
from kvgrpc.v1.handoff_pb2_grpc import HandoffServiceStub
from kvgrpc.v1.pool_pb2_grpc import PoolServiceStub
from kvgrpc.v1.tensor_pb2_grpc import TensorServiceStub

ROOT = Path(kvgrpc.__file__).parent
NOT_WALKED = tuple(str(ROOT / name) + os.sep for name in ("client", "v1", "peer", "session"))
"""Paths that are not counted: the client, and generated code."""
TICKS = ("CallQueue._backlog", "Backlog.count")
"""Functions that are not counted: the look at the backlog every 25 ms. A slow machine has one in every walk."""
BLOCKS = 7
TENSOR_BYTES = 10_000
WAIT = Duration(seconds=20)
WALKS = 12
"""Number of times that each request is made."""


@dataclass(frozen=True)
class Walk:
    """One request: its calls, and the files that they enter."""

    calls: int
    by_file: dict[str, int]

    def to_json(self) -> dict[str, int]:
        """Returns the counts."""
        return {"calls": self.calls, "files": len(self.by_file)}


async def walks() -> dict[str, Walk]:
    """Returns all three walks, by name, each the shortest of WALKS.

    Raises AssertionError if a request did not succeed.
    """
    blocks = Config(listen="127.0.0.1:0", data_paths=("shm",))
    store = Config(listen="127.0.0.1:0", data_paths=("shm",), tensors=TensorsConfig(store_bytes=1 << 20))
    found: dict[str, list[Walk]] = defaultdict(list)
    async with _Pair(blocks) as pair:
        for _ in range(WALKS):
            here, there = await pair.allocated(0, BLOCKS), await pair.allocated(1, BLOCKS)
            token, hand_over = await _counted(pair.hand_over(here))
            _, pull = await _counted(pair.pull(token, there))
            found["hand_over"].append(hand_over)
            found["pull"].append(pull)
    async with _Pair(store) as pair:
        for _ in range(WALKS):
            pages = await pair.allocated(0, -(-TENSOR_BYTES // store.tensors.page_bytes))
            _, put = await _counted(pair.put(pages.allocation_id))
            found["put_tensor"].append(put)
    return {name: min(made, key=attrgetter("calls")) for name, made in found.items()}


async def _counted(work: Awaitable[Any]) -> tuple[Any, Walk]:
    """Returns the result of the work, and its walk. Only the event loop's thread is counted: others move bytes."""
    files: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_qualname.startswith(TICKS):
            files[code.co_filename] += 1

    sys.setprofile(count)
    try:
        answer = await work
    finally:
        sys.setprofile(None)
    walked = {name: calls for name, calls in files.items() if not name.startswith(NOT_WALKED)}
    return answer, Walk(sum(walked.values()), walked)


class _Pair:
    """Two servers of one configuration, and stubs that call them."""

    def __init__(self, config: Config) -> None:
        self._servers = (Server(config), Server(config))
        self._number = 0

    async def __aenter__(self) -> "_Pair":
        for server in self._servers:
            await server.start()
        self._channels = [grpc.aio.insecure_channel(server.address) for server in self._servers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()
        for server in self._servers:
            await server.stop()

    async def allocated(self, side: int, count: int) -> common_pb2.Blocks:
        """Allocates blocks of one server's pool."""
        counts = [pool_pb2.GroupBlockCount(group=0, block_count=count)]
        request = pool_pb2.AllocateBlocksRequest(group_block_counts=counts)
        return (await PoolServiceStub(self._channels[side]).AllocateBlocks(request)).blocks

    async def hand_over(self, blocks: common_pb2.Blocks) -> common_pb2.Grant:
        """Calls FinishedBlocks."""
        job = handoff_pb2.HandOver(blocks=blocks, content=_content())
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=self._key(), for_readers=job)
        return (await HandoffServiceStub(self._channels[0]).FinishedBlocks(request)).grant

    async def pull(self, grant: common_pb2.Grant, blocks: common_pb2.Blocks) -> None:
        """Calls PullBlocks with a wait."""
        wait = transfer_pb2.TransferWait(timeout=WAIT)
        request = handoff_pb2.PullBlocksRequest(
            grant=grant, content=_content(), wait=wait, destination=handoff_pb2.PullDestination(blocks=blocks)
        )
        ended = (await HandoffServiceStub(self._channels[1]).PullBlocks(request)).transfer
        assert ended.state == transfer_pb2.TRANSFER_STATE_SUCCEEDED, ended

    async def put(self, allocation_id: str) -> None:
        """Calls PutTensor to the other server."""
        request = tensor_pb2.PutTensorRequest(
            tensor=tensor_pb2.TensorName(transfer_key=self._key(), name="a"),
            description=tensor_pb2.TensorDescription(dtype="uint8", shape_sizes=[TENSOR_BYTES], nbytes=TENSOR_BYTES),
            allocation_id=allocation_id, timeout=WAIT,
            consumers=[common_pb2.PeerAddress(address=self._servers[1].address)],
        )  # fmt: skip
        await TensorServiceStub(self._channels[0]).PutTensor(request)

    def _key(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(16, "big")


def _content() -> common_pb2.Content:
    return common_pb2.Content(opaque_id=b"walk", opaque_tokens=BLOCKS * 16)


def main() -> dict[str, Walk]:
    """Returns the walks, from outside an event loop."""
    return asyncio.run(walks())
