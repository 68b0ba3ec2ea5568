"""Cleaning up after a request that failed: every server that has something of it is told, whatever the others say."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpc import aio

from kvgrpc.client.client import Client
from kvgrpc.client.options import Call
from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from kvgrpc.v1.transfer_pb2 import CancelTransferResponse

C = TypeVar("C")

CleanedUp = CancelTransferResponse | KVGrpcError
"""What one server said: its outcome, or why it did nothing."""


@dataclass(frozen=True)
class CleanUp(Generic[C]):
    """What one server is to end and free."""

    client: C
    transfer: str | bytes
    """Its transfer by id, or (bytes) all with this transfer key."""
    free_allocation_ids: Sequence[str] = ()
    """Allocations of this server: those of `allocate(...).blocks.allocation_id`."""


async def clean_up(
    sides: Sequence[CleanUp[Client]], *, message: str = "", timeout_s: float | None = None
) -> list[CleanedUp]:
    """Cancels and frees at all sides at once, and gives what each said, in their order. A side that cannot be reached,
    or refuses, keeps no other from being told; its error is in its place, as it is where a client is closed. Nor does a
    caller that is cancelled: its cancellation goes on once all have been told, or their deadlines are over.
    """
    telling = asyncio.gather(*(_one(side, message, timeout_s) for side in sides))
    try:
        return list(await asyncio.shield(telling))
    except asyncio.CancelledError:
        # Whoever cancels may close the clients next, and with them the calls.
        await asyncio.wait([telling])
        raise


async def _one(side: CleanUp[Client], message: str, timeout_s: float | None) -> CleanedUp:
    options: Call = {} if timeout_s is None else {"timeout_s": timeout_s}
    try:
        return await side.client.cancel(
            side.transfer, message=message, free_allocation_ids=side.free_allocation_ids, **options
        )
    except KVGrpcError as error:
        return error
    except aio.UsageError:
        pass  # it was closed before the call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled this: the client was closed meanwhile, and with it the call.
    return Unavailable(Reason.PEER_UNREACHABLE, "the client is closed")
