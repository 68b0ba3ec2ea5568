"""The gRPC servers of a lead: our services, and the services that every tool expects (health, reflection, channelz)."""

import asyncio
import logging
import socket
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz, channelz_pb2_grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvgrpc.config import Config, split_address
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.networks import is_loopback
from kvgrpc.errors import Reason
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc, rank_pb2, rank_pb2_grpc
from kvgrpc.service.address_in_use import AddressInUse
from kvgrpc.service.backlog import with_backlog
from kvgrpc.service.call_queue import CallQueue
from kvgrpc.service.fleet.reader import FleetReader
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import OWN, Places
from kvgrpc.service.rpc.admin import AdminService
from kvgrpc.service.rpc.call_stream import CallService
from kvgrpc.service.rpc.fleet import FleetService
from kvgrpc.service.rpc.handoff import HandoffService
from kvgrpc.service.rpc.handshake import HandshakeService
from kvgrpc.service.rpc.health import Health
from kvgrpc.service.rpc.lease import LeaseService
from kvgrpc.service.rpc.method import MethodTable, Registrar
from kvgrpc.service.rpc.peer import PeerService
from kvgrpc.service.rpc.pool import PoolService
from kvgrpc.service.rpc.rank import RankService, WorkerServer
from kvgrpc.service.rpc.reflection import Schema
from kvgrpc.service.rpc.scheduler import SchedulerService
from kvgrpc.service.rpc.tensor import TensorService
from kvgrpc.service.rpc.transfer import TransferService
from kvgrpc.service.tensors.staging_store import StagingStore
from kvgrpc.tls import Tls
from kvgrpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    calls_pb2,
    calls_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    handshake_pb2,
    handshake_pb2_grpc,
    lease_pb2,
    lease_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tensor_pb2,
    tensor_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from kvgrpc.wire.frames import FRAME_BYTES_MAX

_log = logging.getLogger(__name__)

SERVICES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (handshake_pb2, "HandshakeService"),
        (handoff_pb2, "HandoffService"),
        (transfer_pb2, "TransferService"),
        (lease_pb2, "LeaseService"),
        (scheduler_pb2, "SchedulerService"),
        (tensor_pb2, "TensorService"),
        (pool_pb2, "PoolService"),
        (admin_pb2, "AdminService"),
        (calls_pb2, "CallService"),
        (fleet_pb2, "FleetService"),
        (peer_pb2, "PeerService"),
        (rank_pb2, "RankService"),
    )
)
ADMIN_CONNECTIONS = 64
"""Maximum number of connections to the address for operators."""
PENDING_MAX = 4_096
"""Maximum number of calls that gRPC keeps before it hands them over. It cancels more, without a reason."""
WINDOW_BYTES = 256 * 1024
"""Number of bytes of answers that another lead may send before they are read, for each call."""
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
REFLECTION_V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"


class Listeners:
    """The gRPC servers of a lead, by the addresses that they bind: the first is for everybody, and the second, if there
    is one, for whoever looks after the server.
    """

    def __init__(self, reader: FleetReader, *servers: tuple[str, grpc.aio.Server]) -> None:
        self.reader = reader
        self._servers = servers

    def bind(self, tls: Tls | None) -> list[str]:
        """Binds the addresses, under TLS if there is one. Returns them with their ports. Raises AddressInUse."""
        return [_bind(server, listen, tls) for listen, server in self._servers]

    async def start(self) -> None:
        for _, server in self._servers:
            await server.start()

    async def wait_for_termination(self) -> None:
        """Returns when the servers were stopped."""
        for _, server in self._servers:
            await server.wait_for_termination()

    async def stop(self, grace: float) -> None:
        """Ends calls that last longer than `grace` seconds, and the servers."""
        await asyncio.gather(*(server.stop(grace) for _, server in self._servers))
        await self.reader.stop()


def _bind(server: grpc.aio.Server, listen: str, tls: Tls | None) -> str:
    host, _ = split_address(listen, "listen")
    _check_free(listen)  # gRPC says only that it failed, and writes to standard error why
    try:
        if tls is None:
            if not is_loopback(host):
                _log.warning("%s is served without TLS (insecure): who reaches it reads KV, and may call all", listen)
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, tls.server_credentials())
    except RuntimeError as error:
        raise AddressInUse(Reason.INVALID_FIELD, f"cannot bind {listen}: {error}") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_free(listen: str) -> None:
    """Raises AddressInUse for an address that cannot be bound."""
    host, port = split_address(listen, "listen")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise AddressInUse(Reason.INVALID_FIELD, f"cannot bind {listen}: {error.strerror or error}") from error


class Connector(Protocol):
    """Opens a channel from this lead to another one, under TLS with the identity of then."""

    def __call__(self, address: str, certificate_name: str = "") -> grpc.aio.Channel:
        """`certificate_name`: name that the other lead's certificate must have in place of the address's."""


def connector(limits: Limits, tls: Tls | None) -> Connector:
    """Returns the function that opens channels."""
    options = _channel_options(limits)

    def connect(address: str, certificate_name: str = "") -> grpc.aio.Channel:
        if tls is None:
            return grpc.aio.insecure_channel(address, options)
        named = [("grpc.ssl_target_name_override", certificate_name)] if certificate_name else []
        return grpc.aio.secure_channel(address, tls.channel_credentials(), [*options, *named])

    return connect


def _channel_options(limits: Limits) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC measures each connection by a ping beside what arrives, which costs a quarter of a beat or a check. Leads
        # answer with little, for which a window of one size is enough.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # A lead that comes back is reached within about a second; gRPC's default backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    ]


class _OthersFaults(logging.Filter):
    """Logs two errors of gRPC at INFO, without their traceback: an answer whose caller has just left, and bytes from a
    caller or a called peer that are no message. Neither is a defect.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, grpc.aio.InternalError | DecodeError):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            record.exc_info = None
        return True


_OTHERS_FAULTS = _OthersFaults()


def build(
    lead: Lead, staging: StagingStore, config: Config, sessions: WorkerServer | None, tls: Tls | None
) -> tuple[Listeners, Health]:
    """Returns the servers, not yet bound, and their health. Ranks on other hosts attach to `sessions`.

    With an address for admins only that one has AdminService, reflection and channelz, beside all other services.
    """
    for name in ("grpc._cython.cygrpc", "grpc._common"):
        logging.getLogger(name).addFilter(_OTHERS_FAULTS)
    health = Health(lead, SERVICES, tls)
    limits = config.limits
    reader = FleetReader(config.fleet, connector(limits, tls), lead.may_dial)
    made = partial(_server, _Shared(lead, staging, sessions, health, reader))
    if not config.admin_listen:
        return Listeners(reader, (config.listen, made(limits, admin=True))), health
    few = replace(limits, connections=min(limits.connections, ADMIN_CONNECTIONS))
    servers = (config.listen, made(limits, admin=False)), (config.admin_listen, made(few, admin=True))
    return Listeners(reader, *servers), health


@dataclass(frozen=True)
class _Shared:
    """The objects that the servers of one lead share."""

    lead: Lead
    staging: StagingStore
    sessions: WorkerServer | None
    health: Health
    reader: FleetReader


def _server(shared: _Shared, limits: Limits, *, admin: bool) -> grpc.aio.Server:
    lead = shared.lead
    server, table, standing, calls = bounded_server(limits, lead.call_queue)
    # Each stands for a server: generated code calls only the methods that `Registrar` has.
    most = limits.message_bytes
    registrar = Registrar(table, lead, standing, calls, most)
    ours = cast(grpc.aio.Server, registrar)
    others = cast(grpc.aio.Server, Registrar(table, lead, standing, calls, most, ours=False))
    handshake_pb2_grpc.add_HandshakeServiceServicer_to_server(HandshakeService(lead), ours)
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffService(lead), ours)
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(TransferService(lead), ours)
    lease_pb2_grpc.add_LeaseServiceServicer_to_server(LeaseService(lead), ours)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerService(lead), ours)
    tensor_pb2_grpc.add_TensorServiceServicer_to_server(TensorService(lead, shared.staging), ours)
    pool_pb2_grpc.add_PoolServiceServicer_to_server(PoolService(lead), ours)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(PeerService(lead, calls), ours)
    rank_pb2_grpc.add_RankServiceServicer_to_server(RankService(lead, shared.sessions), ours)
    calls_pb2_grpc.add_CallServiceServicer_to_server(CallService(lead, registrar.unary, most), ours)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(lead, shared.reader, limits), ours)
    health_pb2_grpc.add_HealthServicer_to_server(shared.health.servicer, others)
    if admin:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(lead), ours)
        channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz.aio.ChannelzServicer(), others)
        add_reflection(others, *SERVICES, "grpc.channelz.v1.Channelz")
    return server


def bounded_server(limits: Limits, queue: CallQueue) -> tuple[grpc.aio.Server, MethodTable, Places, Places]:
    """Returns a server without services, with its methods, and the places of standing calls and of all others. Its
    calls wait in the queue while it is busy.
    """
    server, backlog = with_backlog(
        lambda: grpc.aio.server(
            options=_server_options(limits),
            # A call takes a place when its request has arrived. This limit bounds calls whose request never comes.
            maximum_concurrent_rpcs=limits.standing + limits.calls + 2 * OWN * limits.connections,
        )
    )
    standing, calls = (
        Places(what, each, most, retry_s, of_tenant=limits.of_tenant(most))
        for what, each, most, retry_s in (
            ("streams and calls that wait", limits.standing_per_connection, limits.standing, 1.0),
            ("calls under way", limits.calls_per_connection, limits.calls, 0.1),
        )
    )
    queue.backlogs.append(backlog)
    table = MethodTable(queue, backlog)
    server.add_generic_rpc_handlers((table,))
    return server, table, standing, calls


def _server_options(limits: Limits) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        # Commands to a rank are as long as over the session socket. The registrar bounds all other replies.
        ("grpc.max_send_message_length", max(limits.message_bytes, FRAME_BYTES_MAX)),
        # gRPC's default lets two servers share a port, unnoticed.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        # A caller's library queues calls beyond this number, without an error.
        ("grpc.max_concurrent_streams", _streams(limits)),
        # Without this gRPC refuses calls of a library that holds others back, as UNAVAILABLE: it counts ended ones.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        # The call queue is fair, and gRPC is not: it cancels calls of all callers alike.
        ("grpc.server.max_pending_requests", PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
        ("grpc.server_handshake_timeout_ms", int(limits.connect_timeout_s * 1000)),
    ]


def _streams(limits: Limits) -> int:
    """Returns the number of open calls of a connection: no more than may have a place."""
    return min(limits.streams_per_connection, limits.standing_per_connection + limits.calls_per_connection)


def add_reflection(server: grpc.aio.Server, *names: str) -> None:
    """Adds reflection. v1 has the messages of v1alpha under another service name, so one servicer answers both."""
    names = (*names, "grpc.health.v1.Health", REFLECTION_V1, REFLECTION_V1ALPHA)
    schema = Schema(descriptor_pool.Default())
    servicer = reflection.aio.ReflectionServicer(names, schema)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (REFLECTION_V1, REFLECTION_V1ALPHA):
        server.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})
