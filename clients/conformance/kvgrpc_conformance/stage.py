"""Holds the servers of a case, shared by a group of cases or its own, and performs the runner's own steps on them."""

import asyncio
import signal
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    handshake_pb2,
    lease_pb2,
    lease_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

from . import schema
from .cases import Case
from .newer import NewerServer
from .parties import TLS, Parties
from .servers import Server
from .values import CaseError, Json

Request = TypeVar("Request", bound=Message)
CALL_S = 5.0
REST_S = 2.0
"""Seconds within which the blocks of a case must be returned after it."""


class Stage:
    """Servers by name."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._real: dict[str, Server] = {}
        self._newer: dict[str, NewerServer] = {}
        self._folder = folder
        secured = [name for name, settings in case.servers.items() if settings.get(TLS)]
        self._parties = Parties(folder / "tls", secured) if secured else None
        for name, settings in case.servers.items():
            if "answers" in settings:
                self._newer[name] = NewerServer(name, settings["answers"])
            elif self._parties is not None and name in secured:
                own = {**settings, TLS: {"dir": str(self._parties.folder_of(name))}}
                self._real[name] = Server(name, own, folder / name)
            else:
                self._real[name] = Server(name, settings, folder / name)

    async def start(self) -> None:
        """Starts all servers in parallel. Raises ServerFailedError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        await asyncio.gather(*(server.start() for server in self._all().values()))

    async def close(self) -> None:
        """Ends all servers."""
        await asyncio.gather(*(server.close() for server in self._all().values()))

    def _all(self) -> dict[str, Server | NewerServer]:
        return {**self._real, **self._newer}

    def is_real(self, name: str) -> bool:
        """Returns whether that server is a kvgrpc server, and not one that a case makes up."""
        return name in self._real

    def clients(self) -> dict[str, str]:
        """Returns the address of each server for clients."""
        return {name: server.address for name, server in self._all().items()}

    def settings(self, name: str) -> dict[str, Json]:
        """Returns what a client needs to be let in at a server, beside its address."""
        secured = self._parties is not None and name in self._real and self._real[name].under_tls
        return {TLS: {"dir": "$tls.client"}} if secured else {}

    def variables(self) -> dict[str, Json]:
        """Returns the variables for addresses, `$address.P` for other servers and `$clients.P` for clients, and for
        files: `$tls.client` and others, and the folder `$folder`.
        """
        peers = {name: server.peer_address for name, server in self._all().items()}
        tls = {} if self._parties is None else self._parties.variables()
        return {"address": peers, "clients": self.clients(), TLS: tls, "folder": str(self._folder)}

    def mark_logs(self) -> None:
        """Marks the logs at the begin of a case."""
        for server in self._real.values():
            server.mark_log()

    def logs(self) -> str:
        """Returns what the servers logged, where they did."""
        found = [(name, server.log()) for name, server in self._real.items()]
        return "\n".join(f"--- server {name}\n{log}" for name, log in found if log)

    async def act(self, step: dict[str, str]) -> Json:
        """Performs a step of the runner. Its answer has the form of an executor's answer."""
        ((what, name),) = step.items()
        if what == "seen":
            return {"ok": {"calls": self._newer[name].seen}}
        if what == "renew" and self._parties is not None:
            await asyncio.to_thread(self._parties.renew)
            return {"ok": {}}
        if name not in self._real:
            raise CaseError(f"{what}: there is no server process {name}")
        server = self._real[name]
        if what == "health":
            return {"ok": {"services": await _health(server)}}
        if what in ("restart", "stop", "kill"):
            await server.end(signal.SIGKILL if what == "kill" else signal.SIGTERM)
        if what in ("restart", "begin"):
            await server.begin()
        proxy = server.peers if what.endswith("Peers") else server.clients
        if what in ("cut", "cutPeers"):
            proxy.cut()
        elif what in ("uncut", "uncutPeers"):
            proxy.uncut()
        return {"ok": {}}

    async def tidy(self, allocations: list[tuple[str, str]]) -> str:
        """Ends what a case left. Returns why the servers are not as new, or an empty text."""
        for server in self._real.values():
            server.clients.uncut()
            server.peers.uncut()
        mine = {name: [id_ for at, id_ in allocations if at == name] for name in self._real}
        done = await asyncio.gather(
            *(_tidied(self._real[name], ids) for name, ids in mine.items()), return_exceptions=True
        )
        return "; ".join(f"{name}: {left}" for name, left in zip(mine, done, strict=True) if left)


async def _health(server: Server) -> dict[str, str]:
    services = sorted({method.partition("/")[0] for method in schema.methods()})
    async with server.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_S) for name in services]
    names = health_pb2.HealthCheckResponse.ServingStatus
    return {name.rpartition(".")[2]: names.Name(one.status) for name, one in zip(services, answers, strict=True)}


async def _tidied(server: Server, allocations: list[str]) -> str:
    if not server.alive():
        return "it has ended"
    async with server.channel() as channel:
        transfers = transfer_pb2_grpc.TransferServiceStub(channel)
        wanted = transfer_pb2.TransferFilter(
            states=[transfer_pb2.TRANSFER_STATE_PENDING, transfer_pb2.TRANSFER_STATE_ACTIVE]
        )
        listed = await transfers.ListTransfers(transfer_pb2.ListTransfersRequest(filter=wanted), timeout=CALL_S)
        for transfer in listed.transfers:
            await _quietly(
                transfers.CancelTransfer, transfer_pb2.CancelTransferRequest(transfer_id=transfer.transfer_id)
            )
        leases = lease_pb2_grpc.LeaseServiceStub(channel)
        for lease in (await leases.ListLeases(lease_pb2.ListLeasesRequest(), timeout=CALL_S)).leases:
            ref = lease_pb2.LeaseRef(lease_id=lease.lease_id)
            await _quietly(leases.ReleaseLease, lease_pb2.ReleaseLeaseRequest(lease=ref))
        pool = pool_pb2_grpc.PoolServiceStub(channel)
        for allocation in allocations:
            await _quietly(pool.FreeBlocks, pool_pb2.FreeBlocksRequest(allocation_id=allocation))
        return await _at_rest(pool, admin_pb2_grpc.AdminServiceStub(channel))


async def _quietly(method: "aio.UnaryUnaryMultiCallable[Request, Any]", request: Request) -> None:
    """Makes a call, and ignores that its object is already over."""
    try:
        await method(request, timeout=CALL_S)
    except aio.AioRpcError as error:
        if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
            raise


async def _at_rest(pool: "pool_pb2_grpc.PoolServiceAsyncStub", admin: "admin_pb2_grpc.AdminServiceAsyncStub") -> str:
    clock = asyncio.get_running_loop().time
    until = clock() + REST_S
    while True:
        try:
            groups = (await pool.GetPoolStatus(pool_pb2.GetPoolStatusRequest(), timeout=CALL_S)).groups
        except aio.AioRpcError:
            return ""  # without a pool nothing can be left over
        status = await admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_S)
        busy = status.counts.pending_transfer_count + status.counts.active_transfer_count + status.counts.lease_count
        free = all(group.free_block_count == group.block_count for group in groups)
        if not busy and free and status.admission == handshake_pb2.ADMISSION_OPEN:
            return ""
        if clock() >= until:
            return f"it is not at rest: {status.counts} {groups}"
        await asyncio.sleep(0.05)
