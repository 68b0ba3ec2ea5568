"""Renewing leases in batches: over one KeepAlive stream, by RenewLeases where there is none."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpc import aio

from kvgrpc.client.calls import Caller
from kvgrpc.errors import InternalError, Reason
from kvgrpc.v1.lease_pb2 import KeepAliveRequest, KeepAliveResponse, LeaseRef, RenewedLease, RenewLeasesRequest

if TYPE_CHECKING:
    from kvgrpc.v1.lease_pb2_grpc import LeaseServiceAsyncStub

STREAM_S = 60.0
"""Deadline of one stream; the next renewal opens another."""
WITHOUT_STREAM_S = 30.0
"""After a stream that did not even answer once, this long without trying another."""

Stream = aio.StreamStreamCall[KeepAliveRequest, KeepAliveResponse]


class Renewals:
    """Renews; one call at a time."""

    def __init__(self, caller: Caller, stub: "LeaseServiceAsyncStub") -> None:
        self._caller = caller
        self._stub = stub
        self._stream: Stream | None = None
        self._stream_after = 0.0

    async def renew(self, leases: Sequence[LeaseRef], timeout_s: float) -> Sequence[RenewedLease]:
        """One row a lease, in order. A stream that fails costs at most half of `timeout_s`, the fallback has the rest.

        Raises KVGrpcError when neither way got an answer.
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
        """Ends the stream; ends no lease."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def _over_stream(self, leases: Sequence[LeaseRef], timeout_s: float) -> Sequence[RenewedLease] | None:
        """None when the stream gives no answer. A stream that had answered before may just have come to its end, so
        only one that never did keeps the next renewals from trying again.
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
