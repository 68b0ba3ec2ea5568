"""A server: joins the service (the lead) and the data paths (its local ranks), and is their life cycle.

One gRPC event loop per process. `Server.start` binds, makes the embedded pool and begins the first incarnation; from
then on everything happens through the runner. `stop` is orderly in any state.
"""

import asyncio
import json
import logging
import os
import secrets
from dataclasses import replace
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health

from kvgrpc.config import Config, is_loopback, random_engine_id, split_address
from kvgrpc.core.actions import EngineNews
from kvgrpc.core.compatibility import EngineDescription
from kvgrpc.core.events import LifeBegan
from kvgrpc.core.layout import PoolKind, PoolLayout
from kvgrpc.core.limits import PROTOCOL_MAX, PROTOCOL_MIN
from kvgrpc.core.node import Node
from kvgrpc.core.transfers import Transfer
from kvgrpc.datapath.memory import SharedMemory
from kvgrpc.errors import InvalidRequest, Reason, Unavailable
from kvgrpc.local_rank import DataPathStatus, LocalRank, make_paths
from kvgrpc.service import telemetry
from kvgrpc.service.grpc_server import SERVICES, build, channel_options, set_serving
from kvgrpc.service.lead import Lead
from kvgrpc.service.peers import PeerChannels
from kvgrpc.service.ranks import Ranks
from kvgrpc.service.runner import Runner

_log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.05
MOVER_CLOSE_S = 2.0


class AddressInUse(Unavailable):
    """The listen address is taken."""

    code = "UNAVAILABLE"


class Server:
    """One lead with its local ranks. Make it, `await start()`, `await stop()`."""

    def __init__(self, config: Config) -> None:
        self.config = replace(config, engine_id=config.engine_id or random_engine_id())
        self.address = ""
        self._node = Node(self.config.limits)
        self._runner = Runner(self._node)
        self._ranks = Ranks()
        self._local: list[LocalRank] = []
        self._paths: list[DataPathStatus] = []
        self._lead = Lead(self.config, self._runner, lambda: self._paths, self._read, self._progress_age_s)
        self._runner.on_transfer.append(self._trace_transfer)
        self._grpc: grpc.aio.Server | None = None
        self._health: health.aio.HealthServicer | None = None

    async def start(self) -> None:
        """Serves. Raises Exhausted when the pool does not fit, AddressInUse when the address is taken."""
        self._channels = PeerChannels(
            self._runner, self.config.limits, self.config.may_dial, channel_options(self.config.limits)
        )
        self._runner.start(self._channels, self._ranks, self)
        self._grpc, self._health = build(self._lead, self.config.limits)
        host, _ = split_address(self.config.listen, "listen")
        try:
            port = self._grpc.add_insecure_port(self.config.listen)
        except RuntimeError as error:
            raise AddressInUse(Reason.INVALID_FIELD, f"cannot bind {self.config.listen}: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = self._advertised(host, f"{shown}:{port}")
        if self.config.pool is not None:
            await self._begin_embedded(self.config.pool.layout())
        await self._grpc.start()
        await set_serving(self._health, self.config.pool is not None)
        self._write_ready_file()

    async def serve_forever(self) -> None:
        """Returns when the server was stopped."""
        assert self._grpc is not None
        await self._grpc.wait_for_termination()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Takes no new work, lets go on what is going on for `drain_s`, then ends everything in order."""
        self._node.state.draining = True
        if self._health is not None:
            await set_serving(self._health, False, (*SERVICES,))
        loop = asyncio.get_running_loop()
        until = loop.time() + drain_s
        while self._busy() and loop.time() < until:
            await asyncio.sleep(DRAIN_POLL_S)
        self._runner.feed(LifeBegan(self._node.state.incarnation, b"", None))
        await asyncio.sleep(0)
        await self._channels.stop()
        if self._grpc is not None:
            await self._grpc.stop(grace=0.5)
        self._runner.stop()
        await self._close_ranks()
        if self.config.ready_file:
            Path(self.config.ready_file).unlink(missing_ok=True)

    def tell(self, news: EngineNews) -> None:
        """News for an engine: nobody is attached to an embedded pool."""

    async def _begin_embedded(self, layout: PoolLayout) -> None:
        """The embedded pool: one rank in this process, blocks managed by us."""
        rank, self._paths = await asyncio.to_thread(self._make_rank, 0, layout.total_bytes)
        self._local = [rank]
        self._ranks.ranks = {0: rank}
        description = self._describe(layout, PoolKind.SERVER_MANAGED, world_size=1)
        self._runner.feed(LifeBegan(description.incarnation, secrets.token_bytes(32), description))

    def _make_rank(self, rank: int, nbytes: int) -> tuple[LocalRank, list[DataPathStatus]]:
        memory = SharedMemory.create(nbytes)
        paths, status = make_paths(memory, self.config.data_paths, self.config.copy_threads)
        limit = self.config.bandwidth_limit_bytes_per_s
        return LocalRank(rank, memory, paths, self._runner.feed_threadsafe, limit), status

    def _describe(self, layout: PoolLayout, kind: PoolKind, world_size: int) -> EngineDescription:
        """This engine, in a new life."""
        return EngineDescription(
            engine_id=self.config.engine_id,
            incarnation=secrets.randbits(63) + 1,
            address=self.address,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            weights_revision=self.config.weights_revision,
            pool=layout,
            pool_kind=kind,
            world_size=world_size,
        )

    def _advertised(self, host: str, bound: str) -> str:
        """The address that peers dial: set, or the bound one where that means one machine to everybody."""
        if self.config.advertise:
            advertised_host, port = split_address(self.config.advertise, "advertise")
            if is_loopback(advertised_host) and not is_loopback(host):
                raise InvalidRequest(Reason.INVALID_FIELD, "advertise names loopback, but the server listens elsewhere")
            return self.config.advertise if port else f"{advertised_host}:{bound.rpartition(':')[2]}"
        if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            raise InvalidRequest(
                Reason.INVALID_FIELD, f"listen {host} means every interface: set advertise to the one that peers dial"
            )
        return bound

    def _busy(self) -> bool:
        return bool(self._node.state.transfers.unfinished()) or len(self._node.state.leases) > 0

    def _progress_age_s(self) -> float:
        return max((rank.progress_age_s() for rank in self._local), default=0.0)

    def _read(self, rank: int, offset: int, nbytes: int) -> bytes:
        return self._local[rank].read(offset, nbytes)

    def _trace_transfer(self, transfer: Transfer) -> None:
        telemetry.transfer_ended(transfer, self._node.state.now)

    async def _close_ranks(self) -> None:
        local, self._local = self._local, []
        for rank in local:
            await asyncio.to_thread(rank.close, MOVER_CLOSE_S)

    def _write_ready_file(self) -> None:
        if not self.config.ready_file:
            return
        path = Path(self.config.ready_file)
        content = {"address": self.address, "engine_id": self.config.engine_id, "pid": os.getpid()}
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_text(json.dumps(content) + "\n")
        partial.rename(path)

