"""Renews leases in batches: over one KeepAlive stream, or with RenewLeases if there is none."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpc import aio

from kvgrpc.client.caller import Caller
from kvgrpc.errors import InternalError, Reason
from kvgrpc.v1.lease_pb2 import KeepAliveRequest, KeepAliveResponse, LeaseRef, RenewedLease, RenewLeasesRequest

if TYPE_CHECKING:
    from kvgrpc.v1.lease_pb2_grpc import LeaseServiceAsyncStub

STREAM_S = 60.0
"""Deadline of one stream, in seconds. The next renewal opens another."""
WITHOUT_STREAM_S = 30.0
"""Time without another attempt after a stream that never answered, in seconds."""

Stream = aio.StreamStreamCall[KeepAliveRequest, KeepAliveResponse]


class RenewalStream:
    """Renews the leases of a client; one call at a time."""

    def __init__(self, caller: Caller, stub: "LeaseServiceAsyncStub") -> None:
        self._caller = caller
        self._stub = stub
        self._stream: Stream | None = None
        self._stream_after = 0.0

    async def renew(self, leases: Sequence[LeaseRef], timeout_s: float) -> Sequence[RenewedLease]:
        """Returns one row for each lease, in order. A failed stream takes at most half of `timeout_s`; RenewLeases has
        the rest.

        Raises KVGrpcError if both fail.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + timeout_s
        rows = None
        if clock() >= self._stream_after:
            rows = await self._over_stream(leases, timeout_s / 2)
        if rows is None:
            request = RenewLeasesRequest(leases=leases)
            reply = await self._caller.read(self._stub.RenewLeases, request, {"timeout_s": until - clock()})
            rows = reply.leases
        if len(rows) != len(leases):
            raise InternalError(Reason.INTERNAL, f"{len(leases)} leases were renewed with {len(rows)} rows")
        return rows

    def close(self) -> None:
        """Ends the stream, but no lease."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def _over_stream(self, leases: Sequence[LeaseRef], timeout_s: float) -> Sequence[RenewedLease] | None:
        """Returns the rows, or None if the stream gives no answer. A stream that had answered before may just have
        reached its deadline, so only one that never answered delays the next attempt.
        """
        fresh = self._stream is None
        if self._stream is None:
            self._stream = self._stub.KeepAlive(timeout=STREAM_S, metadata=self._caller.headers())
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.write(KeepAliveRequest(leases=leases))
                reply = await self._stream.read()
        except (aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            reply = None
        if isinstance(reply, KeepAliveResponse):
            return reply.leases
        self.close()
        if fresh:
            self._stream_after = asyncio.get_running_loop().time() + WITHOUT_STREAM_S
        return None
