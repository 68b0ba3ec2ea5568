"""Role "server" of a child process: a kvgrpc server on the event loop of the process, stamped and measured.

Its pool is that of an attached engine, because the baselines also write into it, and a server's own pool takes no
writers. The process may also call its own server beside a thread that runs pure Python, like a server embedded in an
engine.
"""

import asyncio
import contextlib
import cProfile
import math
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from bench.plan import METRICS, SOURCE_WRITES, TLS_DIR, YES, pool
from bench.roles.role import Answer
from bench.roles.stamps import Stamps
from bench.stages.calls import Caller
from bench.stages.profiling import describe, new_profile
from kvgrpc import __version__
from kvgrpc.config import Config
from kvgrpc.config_security import TlsConfig
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.engine import Engine
from kvgrpc.errors import InternalError, Reason
from kvgrpc.server import Server
from kvgrpc.service import telemetry
from kvgrpc.service.heap import calm_collector

_WARM_PULLS = 10
_LOOK_S = 0.001


class ServerRole:
    """The commands of this role are its public coroutine methods."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._engine: Engine | None = None
        self._profile: cProfile.Profile | None = None
        self._stamps = Stamps()
        self._stamps.install()

    async def perform(self, command: str, arguments: dict[str, Any], fds: list[int]) -> Answer:  # noqa: ARG002
        """Performs one command."""
        answer: Answer = await getattr(self, command)(**arguments)
        return answer

    async def close(self) -> None:
        await self.stop()

    async def start(
        self,
        data_paths: list[str],
        block_bytes: int,
        blocks: int,
        copy_threads: int,
        stamped: bool = False,
        checksums: bool = False,
    ) -> Answer:
        """Starts a server with a pool. Returns its address and the pool's file descriptor. `stamped` enables
        `stamps`.
        """
        await self.stop()
        self._stamps.on = stamped
        with tempfile.TemporaryDirectory(prefix="kvgrpc-bench-") as folder:
            config = Config(
                source_writes=os.environ.get(SOURCE_WRITES) == YES,
                checksums=checksums,
                listen="127.0.0.1:0",
                data_paths=tuple(data_paths),
                pool=None,
                copy_threads=copy_threads,
                session_socket=f"{folder}/session.sock",
                weights_revision="bench",
                tls=TlsConfig(dir=os.environ.get(TLS_DIR, "")),
                metrics=os.environ.get(METRICS, ""),
            )
            telemetry.configure("bench", __version__)
            self._server = Server(config)
            await self._server.start()
            layout = pool(block_bytes, blocks).layout()
            self._engine = await asyncio.to_thread(
                Engine.attach, config.session_socket, pool=layout, kind=PoolKind.SERVER_MANAGED
            )
        calm_collector()
        fd, nbytes = self._server.shared_memory(0)
        return {"address": self._server.address, "nbytes": nbytes}, [fd]

    async def compare(self, on: bool) -> Answer:
        """Turns checksums on or off, for the same server on the same memory."""
        assert self._server is not None
        self._server._node.state.moves.checksums = on  # noqa: SLF001 - no setting changes while a server runs
        return {}, []

    async def prefetched(self) -> Answer:
        """Waits until the source has computed the checksums of handed-over blocks, if checksums are on."""
        assert self._server is not None
        while not self._server._node.state.send.prefetch.idle:  # noqa: ASYNC110, SLF001 - nobody else needs to know
            await asyncio.sleep(_LOOK_S)
        return {}, []

    async def stop(self) -> Answer:
        """Ends the server."""
        server, self._server = self._server, None
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        if server is not None:
            await server.stop()
        return {}, []

    async def stamps(self) -> Answer:
        """Returns when the last byte of each read landed since the last call, in nanoseconds, on a stamped server."""
        return {"ended_ns": self._stamps.take()}, []

    async def processor_s(self) -> Answer:
        """Returns this process's processor time so far, in seconds, and the kernel's part of it."""
        return {"seconds": time.process_time(), "kernel_s": resource.getrusage(resource.RUSAGE_SELF).ru_stime}, []

    async def scrapes(self, count: int) -> Answer:
        """Returns the milliseconds for which each of several scrapes holds the event loop."""
        assert self._server is not None
        metrics = self._server._metrics  # noqa: SLF001 - what a scrape calls on the loop
        assert metrics is not None
        held_ms = []
        for _ in range(count):
            metrics._read_at = -math.inf  # noqa: SLF001 - readings of a moment ago would be given again
            began = time.perf_counter()
            metrics.readings()
            held_ms.append((time.perf_counter() - began) * 1e3)
        return {"held_ms": held_ms}, []

    async def profile(self) -> Answer:
        """Starts a profile of the event loop's thread."""
        self._profile = new_profile()
        self._profile.enable()
        return {}, []

    async def profiled(self, what: str, count: int) -> Answer:
        """Ends the profile. Returns lines for people, about one of `count` repetitions."""
        assert self._profile is not None
        self._profile.disable()
        return {"lines": describe(self._profile, what, count)}, []

    async def embedded_pulls(self, source: str, count: int, busy: bool, switch_s: float | None = None) -> Answer:
        """Pulls one block `count` times, called from this very process. Returns the milliseconds of each pull.

        `busy` adds a thread that runs pure Python. `switch_s` is the interpreter's switch interval; None keeps Python's
        own 5 ms.
        """
        if self._server is None:
            raise InternalError(Reason.INTERNAL, "start comes first")
        usual_s = sys.getswitchinterval()
        async with Caller(source, self._server.address) as caller:
            await caller.one_block(_WARM_PULLS)
            self._stamps.take()
            sys.setswitchinterval(switch_s or usual_s)
            try:
                with running_python() if busy else contextlib.nullcontext():
                    pulled = await caller.one_block(count)
            finally:
                sys.setswitchinterval(usual_s)
        ended_ns = self._stamps.take()
        total_ms = [one.seconds * 1e3 for one in pulled]
        tail_ms = [(one.woken_ns - end) / 1e6 for one, end in zip(pulled, ended_ns, strict=True)]
        return {"total_ms": total_ms, "tail_ms": tail_ms}, []


@contextlib.contextmanager
def running_python() -> Iterator[None]:
    """Runs a thread of pure Python that never releases the interpreter by itself."""
    ended = threading.Event()

    def compute() -> None:
        total = 0
        while not ended.is_set():
            for i in range(10_000):
                total += i & 3

    thread = threading.Thread(target=compute, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
