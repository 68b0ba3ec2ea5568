"""The integrator's API: Engine in the scheduler's process, Rank in each worker's.

    engine = Engine.attach("/run/kvgrpc.sock", pool=layout)       # or Engine.launch(...): a lead that ends with it
    handover = engine.finished_blocks(blocks, content(ids), transfer_key=key)     # no round trip
    pull = engine.pull(handover.grant, content(ids))              # at the other engine, when the request arrives
    pull.start(blocks)
    for event in engine.poll(): ...                               # each step: Received, Failed, BlocksReturned

    rank = Rank(ticket, rank=0)                                   # in the worker; rank.memory is the paged pool

`scheduler` is optional: its Scheduler decides what to take, give and keep. `session` connects to the lead, and to the
next lead; `transfers` has the handles and events.

The scheduler's process has no gRPC and no thread. Nothing here waits for a peer: a step costs one send and one read of
what is there.
"""

from kvgrpc.core.values.content import Item
from kvgrpc.datapath.mirror.device import Copy, CopyFailed, Device
from kvgrpc.engine.engine import Engine
from kvgrpc.engine.rank import Rank
from kvgrpc.engine.session.connection import LeadDied
from kvgrpc.engine.ticket import RankCredentials, RankTicket
from kvgrpc.engine.transfers.events import (
    BlocksReturned,
    Event,
    Failed,
    LayersReceived,
    PartsReturned,
    PullOpened,
    Received,
    Reserved,
)
from kvgrpc.engine.transfers.handles import Content, HandOver, Pull, content
from kvgrpc.engine.transfers.pushes import Push, Reservation

__all__ = [
    "BlocksReturned",
    "Content",
    "Copy",
    "CopyFailed",
    "Device",
    "Engine",
    "Event",
    "Failed",
    "HandOver",
    "Item",
    "LayersReceived",
    "LeadDied",
    "PartsReturned",
    "Pull",
    "PullOpened",
    "Push",
    "Rank",
    "RankCredentials",
    "RankTicket",
    "Received",
    "Reservation",
    "Reserved",
    "content",
]
