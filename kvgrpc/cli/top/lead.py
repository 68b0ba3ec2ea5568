"""One lead of `kvgrpc top`: asks what the view shows, page-bounded, and does what the operator wants."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvgrpc import client
from kvgrpc.cli.top.rows import Reading
from kvgrpc.client import Client, Credentials
from kvgrpc.errors import KVGrpcError, NotFound, PreconditionFailed, Unavailable, Unimplemented

ROWS_MAX = 1_000
"""Maximum number of rows that are asked for at one lead, for each kind."""


class WatchedLead:
    """A connection to one server, which is kept. Its readings never raise: a lead that is away says so."""

    def __init__(self, address: str, credentials: Credentials, timeout_s: float) -> None:
        self.address = address
        self._client = client.connect(address, timeout_s=timeout_s, credentials=credentials)

    async def close(self) -> None:
        await self._client.close()

    async def look(self, asks: tuple[str, ...]) -> Reading:
        try:
            replies: dict[str, Any] = {"status": await self._client.status()}
            for name in asks:
                replies[name] = await self._ask(name)
        except KVGrpcError as error:
            return Reading(self.address, time.monotonic(), error=str(error))
        return Reading(self.address, time.monotonic(), replies)

    async def _ask(self, name: str) -> Any:
        server = self._client
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "pool": server.pool_status,
            "pins": lambda: server.pins(limit=ROWS_MAX),
            "allocations": lambda: server.allocations(limit=ROWS_MAX),
            "leases": lambda: server.list_leases(limit=ROWS_MAX),
            "transfers": lambda: server.list_transfers(limit=ROWS_MAX),
            "peers": lambda: server.peers(limit=ROWS_MAX),
        }
        try:
            return await calls[name]()
        except (NotFound, PreconditionFailed, Unavailable, Unimplemented):  # no engine is attached
            return None

    async def cancel(self, transfer_id: str) -> str:
        return await self._done(self._client.cancel(transfer_id, message="kvgrpc top"), f"{transfer_id} is cancelled")

    async def release(self, lease_id: str) -> str:
        """Releases a lease. Returns what came of it."""
        return await self._done(self._client.release_lease(lease_id), f"{lease_id} is released")

    async def rekey(self) -> str:
        """Registers the memory of the lead's engine anew. Returns what came of it."""
        try:
            reply = await self._client.release_quarantine()
        except KVGrpcError as error:
            return str(error)
        return f"{reply.released_block_count} blocks left quarantine; {reply.left_block_count} are still there"

    async def drain(self, *, cancel: bool) -> str:
        """Starts or cancels a drain. Returns what came of it."""
        said = f"{self.address} takes work again" if cancel else f"{self.address} drains"
        return await self._done(drain(self._client, cancel=cancel), said)

    async def _done(self, call: Any, said: str) -> str:
        try:
            await call
        except KVGrpcError as error:
            return str(error)
        return said


async def drain(server: Client, *, cancel: bool) -> None:
    """Starts or cancels the drain of a server."""
    await (server.cancel_drain() if cancel else server.start_drain())
