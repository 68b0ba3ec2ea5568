"""A server of FleetService alone, without an engine: what `kvgrpc fleet` runs. It keeps nothing that has to survive, so
several may run beside each other.
"""

import asyncio
import secrets
from typing import cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.config import Config
from kvgrpc.config_errors import invalid
from kvgrpc.core.values.ids import INCARNATION_MAX
from kvgrpc.envoy.v1 import ext_proc_pb2
from kvgrpc.service.call_queue import CallQueue
from kvgrpc.service.call_records import CallRecords
from kvgrpc.service.file_watch import FileWatch
from kvgrpc.service.fleet.reader import FleetReader
from kvgrpc.service.gateway.endpoint_picker import PROCESS, EndpointPicker
from kvgrpc.service.gateway.http_endpoints import HttpEndpoints
from kvgrpc.service.identity.gate import Gate
from kvgrpc.service.metrics import endpoint as metrics
from kvgrpc.service.metrics.fleet_readings import FleetMetrics
from kvgrpc.service.own_tls import own_tls
from kvgrpc.service.places import within_open_files
from kvgrpc.service.ready_file import ReadyFile
from kvgrpc.service.rpc.fleet import FleetService
from kvgrpc.service.rpc.health import EngineFreeHealth
from kvgrpc.service.rpc.method import Registrar
from kvgrpc.service.rpc.server import Listeners, add_reflection, bounded_server, connector
from kvgrpc.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc

FLEET = fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name
ENVOY, _, _METHOD = PROCESS.partition("/")
LOOK_S = 1.0
"""Interval between looks at the registry for health, in seconds."""


class FleetHost:
    """Header of a process without an engine."""

    def __init__(self, config: Config) -> None:
        """Raises InvalidRequest for a file of identities that is not usable."""
        self.gate = Gate(config)
        self.calls = CallRecords()
        self.call_queue = CallQueue()
        self.ticket = b""
        self._incarnation = secrets.randbelow(INCARNATION_MAX) + 1

    def header(self) -> common_pb2.ResponseHeader:
        return common_pb2.ResponseHeader(incarnation=self._incarnation)


class FleetServer:
    """FleetService, health and reflection at `listen`. Make it, `await start()`, `await stop()`."""

    def __init__(self, config: Config, version: str) -> None:
        """Raises InvalidRequest for settings that are not usable."""
        if not config.fleet.registry:
            raise invalid("fleet.registry", "is required: the registry to read")
        self._config, self._version, limits = config, version, within_open_files(config.limits)
        self._host = FleetHost(config)
        self._tls = own_tls(config.tls)
        self._reader = FleetReader(config.fleet, connector(limits, self._tls), config.may_dial, always=True)
        self._health = EngineFreeHealth()
        server, table, standing, calls = bounded_server(limits, self._host.call_queue)
        most = limits.message_bytes
        own = Registrar(table, self._host, standing, calls, most)
        ours = cast(grpc.aio.Server, own)
        others = cast(grpc.aio.Server, Registrar(table, self._host, standing, calls, most, ours=False))
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(self._host, self._reader, limits), ours)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, others)
        if config.fleet.http:
            _serve_envoy(own, self._reader, config)
        add_reflection(others, FLEET)
        self._grpc = Listeners(self._reader, (config.listen, server))
        self._watches = FileWatch(self._tls, ()), FileWatch(self._host.gate, ())
        self._ready = ReadyFile(config.ready_file)
        self._looking: asyncio.Task[None] | None = None
        self._metrics: metrics.MetricsEndpoint | None = None
        self.address = ""

    async def start(self) -> None:
        """Serves. Raises AddressInUse, and InvalidRequest for a file of the registry that is not usable."""
        self._ready.remove()
        (self.address,) = self._grpc.bind(self._tls)
        self._reader.begin()
        self._metrics = metrics.begin_at(
            self._config.metrics,
            FleetMetrics(self._reader, self._host.calls, self._host.call_queue, self._version),
            self._why_not_ready,
            self._tls,
        )
        await self._grpc.start()
        for watch in self._watches:
            watch.start()
        self._looking = asyncio.create_task(self._look_on())
        more = {"metrics": self._metrics.address if self._metrics is not None else ""}
        self._ready.write(self.address, "", more)

    async def stop(self) -> None:
        """Ends everything in order."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._set(serves=False)
        for watch in self._watches:
            await watch.stop()
        if self._metrics is not None:
            await self._metrics.stop()
        await self._grpc.stop(grace=0.5)
        self._ready.remove()
        if self._tls is not None:
            self._tls.close()

    def _why_not_ready(self) -> str:
        reading = self._reader.present
        return "" if reading is not None and reading.directory.complete else "the registry has not answered yet"

    async def _look_on(self) -> None:
        while True:
            await self._set(serves=not self._why_not_ready())
            await asyncio.sleep(LOOK_S)

    async def _set(self, *, serves: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for name in ("", FLEET):
            await self._health.set(name, states.SERVING if serves else states.NOT_SERVING)


def _serve_envoy(server: Registrar, reader: FleetReader, config: Config) -> None:
    """Adds the endpoint picker."""
    picker = EndpointPicker(reader, HttpEndpoints(config.fleet.http_rules), config.fleet.model)
    process = grpc.stream_stream_rpc_method_handler(
        picker.Process,
        request_deserializer=ext_proc_pb2.ProcessingRequest.FromString,
        response_serializer=ext_proc_pb2.ProcessingResponse.SerializeToString,
    )
    server.add_registered_method_handlers(ENVOY, {_METHOD: process})
