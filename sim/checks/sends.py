"""Checks sends: they are only of what their reader may read, and both sides number them alike."""

from kvgrpc.core.actions import AnswerSend, Send
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import Access, AccessState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.values.grants import AccessKind
from sim.rules import Rule, broken
from sim.world.groups import OUT_OF_TURN
from sim.world.memory import Cells
from sim.world.wires import cells_in


def check_sent(action: Send, state: NodeState) -> None:
    """Checks that a rank sends only cells of blocks that this peer may read now."""
    where = Cells(state.life.engine.pool, action.rank, state.life.engine.world_size)
    readable: set[int] = set()
    for access in state.access.rows.values():
        if access.peer == action.peer and _is_read(access):
            readable.update(where.of(state.pool.pins.blocks(access.owner, PinKind.ACCESS)))
    offsets, nbytes = action.ask.offsets, action.ask.nbytes
    inside = bool((offsets >= 0).all() and (offsets + nbytes <= where.count * where.cell_bytes).all())
    if not inside or not readable.issuperset(cells_in(offsets, nbytes, where.cell_bytes)):
        broken(Rule.R2, f"rank {action.rank} sends {action.peer} cells that it may not read: {action.name}")


def _is_read(access: Access) -> bool:
    return access.kind is AccessKind.READ and access.state is AccessState.OPEN


def check_number(action: AnswerSend) -> None:
    """Checks that no source sees a number twice or misses one. A rank that does not know a send's outcome starts
    anew.
    """
    if OUT_OF_TURN in action.answer.error:
        broken(Rule.R9, f"rank {action.rank} and its source {action.peer} count otherwise: {action.answer.error}")
