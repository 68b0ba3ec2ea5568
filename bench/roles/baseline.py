"""Role "baseline" of a child process: raw NIXL, raw Gloo, memcpy and an empty gRPC server, on the pools of the servers.

The driver passes on the descriptors of the servers' own pools, and this process maps them.
"""

import base64
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np

from bench.copy_loop import LoopCopier, rows_of
from bench.plan import Case
from bench.roles.raw_nixl import RawNixl
from bench.roles.role import Answer
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.errors import InternalError, Reason

if TYPE_CHECKING:
    from bench.roles.raw_gloo import RawGloo

_ODD = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_WORDS = 1 << 20


class Baseline:
    """The commands of this role are its public methods."""

    def __init__(self) -> None:
        self._own: SharedMemory | None = None
        self._peer: SharedMemory | None = None
        self._nixl: RawNixl | None = None
        self._gloo: RawGloo | None = None
        self._empty: grpc.aio.Server | None = None

    async def perform(self, command: str, arguments: dict[str, Any], fds: list[int]) -> Answer:
        """Performs one command. A command blocks: nothing else may run here meanwhile."""
        if command == "empty_server":
            return await self.empty_server(), []
        if command == "attach":
            return self.attach(fds), []
        result: dict[str, Any] = getattr(self, command)(**arguments)
        return result, []

    async def close(self) -> None:
        self.nixl_stop()
        self.gloo_stop()
        self.detach()
        if self._empty is not None:
            await self._empty.stop(None)

    # ---- the pools

    def attach(self, fds: list[int]) -> dict[str, Any]:
        """Maps the pool to work on and, if there are two, the one to read from."""
        self.detach()
        self._own = SharedMemory.attach(fds[0])
        self._peer = SharedMemory.attach(fds[1]) if len(fds) > 1 else None
        return {}

    def detach(self) -> dict[str, Any]:
        """Releases the pools."""
        for memory in (self._own, self._peer):
            if memory is not None:
                memory.close()
        self._own = self._peer = None
        return {}

    def fill(self) -> dict[str, Any]:
        """Gives every eight bytes of the source a distinct value, and clears the destination."""
        own, peer = self._pools()
        words = peer.as_numpy().view(np.uint64)
        for first in range(0, len(words), _CHUNK_WORDS):
            chunk = words[first : first + _CHUNK_WORDS]
            np.multiply(np.arange(first, first + len(chunk), dtype=np.uint64), _ODD, out=chunk)
        own.as_numpy()[:] = 0
        return {}

    def check(self, case: dict[str, Any]) -> dict[str, Any]:
        """Returns whether the destination holds what the case moves."""
        own, peer = self._pools()
        moved = Case(**case)
        here, there = (memory.as_numpy().reshape(moved.blocks, -1) for memory in (own, peer))
        pairs = zip(moved.ids("destination").tolist(), moved.ids("source").tolist(), strict=True)
        return {"equal": all(np.array_equal(here[to], there[start]) for to, start in pairs)}

    # ---- memcpy

    def copy(self, case: dict[str, Any], threads: int) -> dict[str, Any]:
        """Makes one memcpy for each run. Returns seconds."""
        own, peer = self._pools()
        with LoopCopier(rows_of(Case(**case).runs(), peer, own), threads) as copier:
            began = time.monotonic()
            copier.copy()
            return {"seconds": time.monotonic() - began, "why": copier.why}

    def copy_whole(self) -> dict[str, Any]:
        """Makes one memcpy of the whole pool, by one thread. Returns seconds."""
        own, peer = self._pools()
        to, start = own.segments[0], peer.segments[0]
        began = time.monotonic()
        libc.memmove(to.address, start.address, to.nbytes)
        return {"seconds": time.monotonic() - began}

    # ---- NIXL

    def nixl_start(self, progress_thread: bool) -> dict[str, Any]:
        """Starts an agent for the pool. Returns what a peer needs to reach it."""
        self.nixl_stop()
        if self._own is None:
            raise InternalError(Reason.INTERNAL, "attach comes first")
        self._nixl = RawNixl(self._own, progress_thread)
        segment = self._own.segments[0]
        metadata = base64.b64encode(self._nixl.metadata).decode()
        return {"metadata": metadata, "address": segment.address, "nbytes": segment.nbytes}

    def nixl_stop(self) -> dict[str, Any]:
        """Ends the agent."""
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None
        return {}

    def nixl_connect(self, metadata: str) -> dict[str, Any]:
        """Loads the peer's agent."""
        self._raw().connect(base64.b64decode(metadata))
        return {}

    def nixl_poll(self, on: bool) -> dict[str, Any]:
        """Starts or stops making progress for the peer."""
        self._raw().poll(on)
        return {}

    def nixl_move(
        self, operation: str, case: dict[str, Any], address: int, nbytes: int, coalesced: bool
    ) -> dict[str, Any]:
        """READs or WRITEs what the case moves, with its coalesced runs or with one descriptor a block. Returns seconds.

        `address` and `nbytes` are those of the peer's pool in the peer's process.
        """
        moved = Case(**case)
        runs = moved.runs() if coalesced else moved.block_runs()
        return {"seconds": self._raw().move(operation, runs, (Segment(address, nbytes),))}

    # ---- Gloo

    def gloo_start(self, meeting: str, sends: bool) -> dict[str, Any]:
        """Makes a process group with the process that gets the same `meeting`, a path."""
        from bench.roles.raw_gloo import RawGloo  # imports torch, which takes seconds

        self.gloo_stop()
        if self._own is None:
            raise InternalError(Reason.INTERNAL, "attach comes first")
        self._gloo = RawGloo(self._own, meeting, sends=sends)
        return {}

    def gloo_move(self, **messages: int) -> dict[str, Any]:
        """Sends or receives the whole pool. Returns when it began and ended. `messages` are arguments of
        RawGloo.move.
        """
        if self._gloo is None:
            raise InternalError(Reason.INTERNAL, "gloo_start comes first")
        began_ns, ended_ns = self._gloo.move(**messages)
        return {"began_ns": began_ns, "ended_ns": ended_ns}

    def gloo_stop(self) -> dict[str, Any]:
        """Ends the group."""
        if self._gloo is not None:
            self._gloo.close()
            self._gloo = None
        return {}

    # ---- gRPC

    async def empty_server(self) -> dict[str, Any]:
        """Starts a gRPC server of the same kind as ours, whose methods do nothing. Returns its address."""

        async def nothing(request: bytes, context: object) -> bytes:  # noqa: ARG001 - what gRPC calls
            return b""

        async def echo(requests: object, context: Any) -> None:  # noqa: ARG001 - what gRPC calls
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(message)

        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Call": grpc.unary_unary_rpc_method_handler(nothing),
            "Stream": grpc.stream_stream_rpc_method_handler(echo),
        }
        handler = grpc.method_handlers_generic_handler("Empty", methods)
        self._empty = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._empty.add_generic_rpc_handlers((handler,))
        port = self._empty.add_insecure_port("127.0.0.1:0")
        await self._empty.start()
        return {"address": f"127.0.0.1:{port}"}

    def _pools(self) -> tuple[SharedMemory, SharedMemory]:
        if self._own is None or self._peer is None:
            raise InternalError(Reason.INTERNAL, "attach comes first, with both pools")
        return self._own, self._peer

    def _raw(self) -> RawNixl:
        if self._nixl is None:
            raise InternalError(Reason.INTERNAL, "nixl_start comes first")
        return self._nixl
