"""Cleans up after a failed request: tells every server that holds something of the request, even if others fail."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpc import aio

from kvgrpc.client.client import Client
from kvgrpc.client.options import CallOptions
from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from kvgrpc.v1.transfer_pb2 import CancelTransferResponse

C = TypeVar("C")

CleanedUp = CancelTransferResponse | KVGrpcError
"""Answer of one server: its outcome, or the error for which it did nothing."""


@dataclass(frozen=True)
class CleanUp(Generic[C]):
    """The transfer to cancel and the allocations to free at one server."""

    client: C
    transfer: str | bytes
    """Id of the transfer (str), or the transfer key of all transfers to cancel (bytes)."""
    free_allocation_ids: Sequence[str] = ()
    """Allocations of this server to free: `allocate(...).blocks.allocation_id`."""


async def clean_up(
    sides: Sequence[CleanUp[Client]], *, message: str = "", timeout_s: float | None = None
) -> list[CleanedUp]:
    """Cancels and frees at all sides at once, and returns each side's answer, in the order of `sides`. A side that
    cannot be reached, refuses, or whose client is closed does not stop the others; its error is in its place. If the
    caller is cancelled, its cancellation continues once all sides were told or their deadlines are over.
    """
    telling = asyncio.gather(*(_one(side, message, timeout_s) for side in sides))
    try:
        return list(await asyncio.shield(telling))
    except asyncio.CancelledError:
        # A cancelled caller may close the clients next, which would end these calls.
        await asyncio.wait([telling])
        raise


async def _one(side: CleanUp[Client], message: str, timeout_s: float | None) -> CleanedUp:
    options: CallOptions = {} if timeout_s is None else {"timeout_s": timeout_s}
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
