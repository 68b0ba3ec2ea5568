"""What an integrator writes against: Engine in the scheduler's process, Rank in each worker's.

    engine = Engine.attach("/run/kvgrpc.sock", pool=layout)       # or Engine.launch(...): a lead that ends with it
    handover = engine.finished_blocks(blocks, content(ids), transfer_key=key)     # no round trip
    pull = engine.pull(handover.grant, content(ids))              # at the other engine, when the request arrives
    pull.start(blocks)
    for event in engine.poll(): ...                               # each step: Received, Failed, BlocksReturned

    rank = Rank(ticket, rank=0)                                   # in the worker; rank.memory is the paged pool

No gRPC, no thread in the scheduler's process, and nothing here waits for a peer: a step costs one send and one read of
what is there.
"""

from kvgrpc.engine.connection import LeadDied
from kvgrpc.engine.engine import Engine
from kvgrpc.engine.events import (
    BlocksReturned,
    Event,
    Failed,
    LayersReceived,
    PartsReturned,
    PullOpened,
    Received,
    Reserved,
)
from kvgrpc.engine.handles import Content, HandOver, Pull, content
from kvgrpc.engine.pushes import Push, Reservation
from kvgrpc.engine.rank import Rank
from kvgrpc.engine.ticket import RankTicket

__all__ = [
    "BlocksReturned",
    "Content",
    "Engine",
    "Event",
    "Failed",
    "HandOver",
    "LayersReceived",
    "LeadDied",
    "PartsReturned",
    "Pull",
    "PullOpened",
    "Push",
    "Rank",
    "RankTicket",
    "Received",
    "Reservation",
    "Reserved",
    "content",
]
