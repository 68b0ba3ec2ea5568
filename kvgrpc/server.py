"""A server: joins the service (the lead) and the data paths (its local ranks), and runs their life cycle.

Each process has one gRPC event loop. `Server.start` binds, makes the embedded pool and begins the first incarnation.
From then on everything happens through the runner. `stop` is orderly in any state.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvgrpc import __version__
from kvgrpc.client.credentials import Credentials
from kvgrpc.client.tls_probe import why_not_connected
from kvgrpc.config import Config, split_address
from kvgrpc.config_sources import reloaded
from kvgrpc.core.events import LifeBegan, MemoryGone
from kvgrpc.core.node import Node
from kvgrpc.core.values.compatibility import CHECKSUMS, KEY_COLUMNS, READS_PUSHES, EngineDescription
from kvgrpc.core.values.ids import INCARNATION_MAX
from kvgrpc.core.values.layout import PoolKind, PoolLayout
from kvgrpc.core.values.limits import PROTOCOL_MAX, PROTOCOL_MIN
from kvgrpc.core.values.networks import is_loopback
from kvgrpc.datapath.device_memory import MakeDeviceMemory
from kvgrpc.datapath.host.host_memory import check_room
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.datapath.local_rank import UNAIDED, DataPathStatus
from kvgrpc.errors import InvalidRequest, KVGrpcError, NotFound, Reason, Unimplemented
from kvgrpc.local_ranks import RankMaker, SharedRank, make_device_memory
from kvgrpc.service import telemetry
from kvgrpc.service.event_log import EventLog
from kvgrpc.service.file_watch import FileWatch
from kvgrpc.service.fleet.publication import LeadPublication
from kvgrpc.service.last_words import LastWords
from kvgrpc.service.last_work import LastWork
from kvgrpc.service.lead import Lead
from kvgrpc.service.metrics import endpoint as metrics
from kvgrpc.service.own_tls import own_tls
from kvgrpc.service.peers.port import PeerChannels
from kvgrpc.service.places import within_open_files
from kvgrpc.service.ready_file import ReadyFile
from kvgrpc.service.recovery import Recovery
from kvgrpc.service.rpc.health import Health
from kvgrpc.service.rpc.server import Listeners, build, connector
from kvgrpc.service.runner import RankPort, Ranks, Runner
from kvgrpc.service.session.session_server import SessionServer
from kvgrpc.service.session.workers import in_workers
from kvgrpc.service.tensors.delivery import RemoteStores
from kvgrpc.service.tensors.staging_store import StagingStore
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.description import pool_from_proto, pool_kind_from_proto

_log = logging.getLogger(__name__)
FEATURES = ("push", "layerwise", CHECKSUMS, KEY_COLUMNS)
"""Features of every server of this version beyond those of every version."""
MOVER_CLOSE_S = 2.0


class Server:
    """One lead with its local ranks. Make it, `await start()`, `await stop()`."""

    def __init__(
        self, config: Config, node: type[Node] = Node, *, device_memory: MakeDeviceMemory = make_device_memory
    ) -> None:
        """`device_memory` makes the memory of a pool on a device."""
        self.config = replace(
            config,
            engine_id=config.engine_id or f"engine-{secrets.token_hex(4)}",
            limits=within_open_files(config.limits),
        )
        self.address = self.admin_address = ""
        self._ready = ReadyFile(config.ready_file)
        writers = frozenset({"nixl"} if self.config.source_writes else ())
        checksums, networks = self.config.checksums, self.config.networks()
        self._runner = Runner(node(self.config.limits, writers, checksums=checksums, networks=networks))
        self._maker = RankMaker(self.config, self._runner, device_memory, lambda: self.address)
        self._runner.on_defect.append(self._fail_closed)
        self._recovery = Recovery(self._runner, self._end_last, self._begin_next)
        self._lives = asyncio.Lock()
        """Held while a life begins or ends: memory is made and given back then."""
        self._kept = False
        """True when some memory of a life that is over is not proved to be at rest."""
        self._ranks = Ranks(UNAIDED)
        self._sessions: SessionServer | None = None
        self._local: list[SharedRank] = []
        self._paths: list[DataPathStatus] = []
        self._features = (*FEATURES, "remote_ranks") if config.session_socket else FEATURES
        self._lead = Lead(self.config, self._runner, lambda: self._paths, self._read, self._progress_age_s, __version__)
        self.tls = own_tls(config.tls)
        connect = connector(self.config.limits, self.tls)
        stores = RemoteStores(connect)
        self._staging = StagingStore(self._lead, stores, self._pool_memory)
        files = None if self.tls is None else self.tls.files
        own = Credentials() if files is None else Credentials(cert=files.cert, key=files.key, ca=files.ca)
        why = partial(why_not_connected, own)
        self._channels = PeerChannels(self._runner, self.config.limits, self._lead.may_dial, connect, why)
        self._watches = (
            FileWatch(self.tls, (self._channels.renew, stores.renew)),
            FileWatch(self._lead.gate, ()),
            LeadPublication(self._lead),
        )
        self._last_words = LastWords(self._channels)
        self._grpc: Listeners | None = None
        self._health: Health | None = None
        self._metrics: metrics.MetricsEndpoint | None = None
        self._last_work = LastWork(self._runner)

    def reload(self, settings: Config) -> None:
        """Lets the reloaded values of the settings hold. Connections that are there stay."""
        self.config = reloaded(self.config, settings)
        self._lead.use(self.config)

    async def start(self) -> None:
        """Serves. Raises Exhausted if the pool or the spill does not fit, AddressInUse if the address is taken,
        InvalidRequest for an unusable session socket or device, PreconditionFailed if the pool cannot be on that
        device. Then nothing is left of the server.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        check_room("tensors.spill_bytes", self.config.tensors.spill_bytes)
        self._ready.remove()  # a killed process may have left it
        if self.config.session_socket:
            self._sessions = SessionServer(self._lead, self._staging, self, self.config.session_socket)
        self._runner.start(self._channels, self._ranks, self._sessions)
        self._events = EventLog(self._runner, self.config.data_paths)
        self._runner.on_end.append(partial(telemetry.transfer_ended, self._runner.time))
        self._runner.on_trouble.append(self._events.transfer_ended)
        self._grpc, self._health = build(self._lead, self._staging, self.config, self._sessions, self.tls)
        bound, *of_admin = self._grpc.bind(self.tls)
        self.address, self.admin_address = self._advertised(bound), "".join(of_admin)
        await self._begin_idle()
        await self._grpc.start()
        self._health.start()
        self._events.start()
        for watch in self._watches:
            watch.start()
        if self._sessions is not None:
            await self._sessions.start()
        self._metrics = metrics.begin(self._lead, self._staging, self.tls)
        more = {"admin_address": self.admin_address, "metrics": self.metrics_address}
        self._ready.write(self.address, self.config.engine_id, more)

    @property
    def metrics_address(self) -> str:
        """Address of the metrics; empty: there are none."""
        return self._metrics.address if self._metrics is not None else ""

    async def serve_forever(self) -> None:
        """Returns when the server was stopped."""
        assert self._grpc is not None
        await self._grpc.wait_for_termination()

    async def engine_over(self) -> None:
        """Returns when an engine has come and gone, or none has come in time."""
        assert self._sessions is not None
        await self._sessions.over.wait()

    async def stop(self, drain_s: float = 0.0, reason: str = "the server ends") -> None:
        """Takes no new work, lets work in progress go on for `drain_s` seconds, then ends everything in order. `reason`
        is what GetDrain says meanwhile.
        """
        try:
            await self._stop(drain_s, reason)
        finally:
            if self.tls is not None:
                self.tls.close()

    async def _stop(self, drain_s: float, reason: str) -> None:
        self._node.state.life.drain(reason, asyncio.get_running_loop().time(), stopping=True)
        self._lead.engine_watchers.changed()
        if self._grpc is None or self._health is None:
            return  # not started
        await self._health.look()
        await self._last_work.wait(drain_s)
        await self._recovery.stop()
        for watch in self._watches:
            await watch.stop()
        await self._health.stop()
        self._events.stop()
        if self._metrics is not None:
            await self._metrics.stop()
        self._runner.feed(LifeBegan(self._node.state.life.incarnation, b"", None))
        await asyncio.sleep(0)
        if self._sessions is not None:
            await self._sessions.stop()
        await self._staging.stop()
        await self._channels.stop()
        await self._lead.standing.end()
        await self._grpc.stop(grace=0.5)
        self._runner.stop()
        await self._close_ranks()
        self._ready.remove()

    def hurry(self) -> None:
        """Makes `stop` wait for nothing that is in progress."""
        self._last_work.hurry()

    @property
    def _node(self) -> Node:
        return self._runner.node

    # -- lives: with the embedded pool, with an engine, with neither

    async def begin_engine(
        self,
        request: session_pb2.AttachRequest,
        secret: bytes,
        worker: Callable[[int], RankPort],
        memory: Mapping[int, int],
    ) -> None:
        """Begins a new life for an attached engine, with its pool. Raises InvalidRequest or Exhausted, and
        PreconditionFailed for `memory` that does not fit the pool; the old life goes on then.
        """
        engine = self._attaching(request)
        async with self._lives:
            if in_workers(request.memory):
                workers = {rank: worker(rank) for rank in range(engine.world_size)}
                await self._begin(engine, secret, workers, [], request)
                return
            local = await self._make_ranks(engine.world_size, engine.pool.total_bytes, memory)
            for number, rank in enumerate(local):
                rank.worker = worker(number)
            await self._begin(engine, secret, dict(enumerate(local)), local, request)

    async def end_engine(self) -> None:
        """Ends an engine's life at once. Its memory goes, and the server waits for the next engine."""
        async with self._lives:
            await self._begin(None, b"", {}, [])
            if self.config.layout() is not None:
                await self._begin_idle()

    def shared_memory(self, rank: int) -> tuple[int, int]:
        """Returns (descriptor, bytes) of the attached engine's pool at a rank, for its worker."""
        if rank >= len(self._local):
            raise NotFound(Reason.NO_POOL, f"this engine has no rank {rank} with shared memory")
        memory = self._local[rank].memory
        assert isinstance(memory, SharedMemory)  # an engine's memory here is shared
        return memory.fd, memory.nbytes

    async def _begin_idle(self) -> None:
        """Begins the life without an engine: with the embedded pool, which the server manages, or with nothing."""
        layout = self.config.layout()
        if layout is None:
            await self._begin(None, b"", {}, [])
            return
        rank, self._paths = await asyncio.to_thread(self._maker.of_own_pool, layout.total_bytes)
        engine = self._describe(layout, PoolKind.SERVER_MANAGED, 1, reads_pushes=rank.mirrored)
        await self._begin(engine, secrets.token_bytes(32), {0: rank}, [rank])

    async def _begin(
        self, engine: EngineDescription | None, secret: bytes, ranks: dict[int, RankPort], local: list[SharedRank],
        request: session_pb2.AttachRequest | None = None,
    ) -> None:  # fmt: skip
        """Ends the present life and begins the next. The old memory goes when its last posting has ended."""
        old, self._local = self._local, local
        incarnation = engine.incarnation if engine else secrets.randbelow(INCARNATION_MAX) + 1
        attached, says = request is not None, request or session_pb2.AttachRequest()
        mirrored = says.memory == session_pb2.POOL_MEMORY_MIRRORED or any(rank.mirrored for rank in local)
        self._runner.feed(
            LifeBegan(incarnation, secret, engine, attached, not says.cannot_set_aside, mirrored, says.expects_pushes)
        )
        self._ranks.ranks = ranks
        assert self._health is not None
        await self._health.look()
        for rank in old:
            self._kept |= not await asyncio.to_thread(rank.close, MOVER_CLOSE_S)
        await self._last_words.say({peer for rank in old for peer in rank.accessed_peers})
        if old and not self._kept:
            self._runner.feed(MemoryGone())

    # -- a life that a defect ended, and the one after it

    def _fail_closed(self) -> None:
        """Forgets the last life after a defect: the new node has no engine, and nothing of the old life is heard. The
        end of an engine's session begins the next life; without a session the recovery does.
        """
        self._recovery.noted()
        for rank in self._local:
            rank.retired = True
        self._kept |= bool(self._ranks.ranks) and not self._local
        self._ranks.ranks = {}
        self._lead.standing.end_life()
        self._last_words.hold(self._runner.unclosed if self._local else [])
        if self._sessions is None or not self._sessions.lose():
            self._recovery.start()

    async def _end_last(self) -> None:
        assert self._health is not None
        await self._health.look()
        async with self._lives:
            await self._begin(None, b"", {}, [])

    async def _begin_next(self) -> None:
        async with self._lives:
            if self._node.state.life.defect and self.config.layout() is not None:
                await self._begin_idle()

    def _attaching(self, request: session_pb2.AttachRequest) -> EngineDescription:
        """Returns the description of the attaching engine. Raises InvalidRequest."""
        if request.HasField("pool"):
            layout = pool_from_proto(request.pool, "pool")
        elif (configured := self.config.layout()) is not None:
            layout = configured
        else:
            raise InvalidRequest(Reason.INVALID_FIELD, "the engine names no pool, and this server has none of its own")
        kind = pool_kind_from_proto(request.kind, "kind")
        reads = request.cannot_set_aside or request.memory == session_pb2.POOL_MEMORY_MIRRORED
        engine = self._describe(layout, kind, request.world_size or 1, reads_pushes=reads)
        return replace(
            engine,
            engine_id=request.engine_id or engine.engine_id,
            weights_revision=request.weights_revision or engine.weights_revision,
        )

    async def _make_ranks(self, count: int, nbytes: int, known: Mapping[int, int]) -> list[SharedRank]:
        """Makes ranks with shared memory in this process, new or `known` by its descriptors. Raises Exhausted if it
        does not fit, PreconditionFailed if it is of another size; no rank is left then.
        """
        made: list[SharedRank] = []
        try:
            for rank in range(count):
                local, self._paths = await asyncio.to_thread(self._maker.shared, rank, nbytes, known.get(rank))
                made.append(local)
        except KVGrpcError:
            for local in made:
                await asyncio.to_thread(local.close, MOVER_CLOSE_S)
            raise
        return made

    def _describe(
        self, layout: PoolLayout, kind: PoolKind, world_size: int, *, reads_pushes: bool
    ) -> EngineDescription:
        return EngineDescription(
            engine_id=self.config.engine_id,
            incarnation=secrets.randbelow(INCARNATION_MAX) + 1,
            address=self.address,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            weights_revision=self.config.weights_revision,
            pool=layout,
            pool_kind=kind,
            world_size=world_size,
            features=(*self._features, READS_PUSHES) if reads_pushes or self.config.checksums else self._features,
            required_features=(
                *((CHECKSUMS,) if self.config.checksums else ()),
                *((KEY_COLUMNS,) if layout.has_key_columns else ()),
            ),
            message_bytes=self.config.limits.message_bytes,
        )

    def _advertised(self, bound: str) -> str:
        """Returns the address that peers dial: the set one, or the bound one if it means one machine to every peer."""
        host, _ = split_address(bound, "listen")
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

    def _progress_age_s(self) -> float:
        if self._local:
            return max(rank.progress_age_s() for rank in self._local)
        # Workers move the bytes: only the postings they have not reported yet are known.
        oldest = self._node.oldest_posting()
        return 0.0 if oldest is None else self._runner.time() - oldest

    async def _read(self, rank: int, runs: list[tuple[int, int]]) -> list[bytes]:
        if rank >= len(self._local):
            raise Unimplemented(
                Reason.FEATURE_UNAVAILABLE,
                "this engine's workers hold its memory, and the server cannot read it: read it in the worker",
            )
        return await self._local[rank].read_runs(runs)

    def _pool_memory(self) -> NDArray[np.uint8] | None:
        """Returns the pool of an engine of one rank, if this process has it."""
        only = self._local[0] if len(self._local) == 1 and not self._local[0].mirrored else None
        memory = only.memory if only is not None else None
        return memory.as_numpy() if isinstance(memory, SharedMemory) else None

    async def _close_ranks(self) -> None:
        local, self._local = self._local, []
        for rank in local:
            await asyncio.to_thread(rank.close, MOVER_CLOSE_S)
