"""The Python client of kvgrpc: drives and watches transfers. It needs the base install only.

    from kvgrpc.client import connect

    async with connect("127.0.0.1:50051") as prefill, connect("127.0.0.1:50052") as decode:
        taken = await prefill.allocate(8)
        handed_over = await prefill.finished_blocks(taken, token_ids)
        target = await decode.allocate(8)
        pull = await decode.pull_blocks(handed_over.grant, token_ids, blocks=target)
        transfer = await decode.wait(pull.transfer.transfer_id, returned=True)

Every call has a deadline, retries UNAVAILABLE only, and raises the errors of `kvgrpc.errors`. `connect_sync` gives the
same methods to code without an event loop.
"""

from kvgrpc.client.cleaning import CleanedUp, CleanUp, clean_up
from kvgrpc.client.client import Client, connect
from kvgrpc.client.credentials import Credentials
from kvgrpc.client.fleet import Fleet, FleetEngines, FleetEvent
from kvgrpc.client.leases import HeldLease
from kvgrpc.client.moving import Moved, TransferFailed, check_transfer, move
from kvgrpc.client.redaction import redacted
from kvgrpc.client.scheduler import Scheduler, refusal, step_calls
from kvgrpc.client.sync import (
    SyncClient,
    SyncFleet,
    SyncHeldLease,
    SyncScheduler,
    SyncTensors,
    clean_up_sync,
    connect_sync,
    move_sync,
)
from kvgrpc.client.tensors import Tensors
from kvgrpc.client.tls_probe import why_unreachable
from kvgrpc.client.values import (
    block_ids,
    block_runs,
    content,
    in_seconds,
    is_over,
    is_returned,
    name_of,
    opaque_content,
    some_of,
)
from kvgrpc.client.watch import HistoryLost, IncarnationChanged, Pace, WatchEvent
from kvgrpc.client.watch_engine import EngineEvent, EngineUnreachable

__all__ = [
    "CleanUp",
    "CleanedUp",
    "Client",
    "Credentials",
    "EngineEvent",
    "EngineUnreachable",
    "Fleet",
    "FleetEngines",
    "FleetEvent",
    "HeldLease",
    "HistoryLost",
    "IncarnationChanged",
    "Moved",
    "Pace",
    "Scheduler",
    "SyncClient",
    "SyncFleet",
    "SyncHeldLease",
    "SyncScheduler",
    "SyncTensors",
    "Tensors",
    "TransferFailed",
    "WatchEvent",
    "block_ids",
    "block_runs",
    "check_transfer",
    "clean_up",
    "clean_up_sync",
    "connect",
    "connect_sync",
    "content",
    "in_seconds",
    "is_over",
    "is_returned",
    "move",
    "move_sync",
    "name_of",
    "opaque_content",
    "redacted",
    "refusal",
    "some_of",
    "step_calls",
    "why_unreachable",
]
