"""Allocations as messages: who holds blocks of a pool that the server manages."""

import numpy as np

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.allocator import Terms
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.block_ids import check_ids
from kvgrpc.service.lead import Lead
from kvgrpc.v1 import pool_pb2
from kvgrpc.wire.values import duration, pool_blocks

Row = tuple[str, Terms]
"""An allocation's id, and the terms it was made on."""


def holding(state: NodeState, group: int, block: int, where: str = "") -> list[Row]:
    """Returns the allocations that hold a block of any group of its space. `where` prefixes the two fields in errors.

    Raises OutOfRange for a block that does not exist.
    """
    groups = state.life.engine.pool.groups
    check_ids(np.array([group]), len(groups), f"{where}group")
    check_ids(np.array([block]), groups[group].blocks, f"{where}block")
    holders = state.pool.allocator.holders(group, block)
    return [row for row in state.pool.allocator.rows() if row[0] in holders]


def message(lead: Lead, row: Row) -> pool_pb2.Allocation:
    """Returns the message for an allocation as it is now."""
    state, (allocation_id, terms) = lead.runner.node.state, row
    due = state.timers.when(Timer.ALLOCATION, allocation_id)
    return pool_pb2.Allocation(
        allocation_id=allocation_id,
        request_id=terms.request_id,
        label=terms.label,
        owner=terms.owner,
        age=duration(lead.runner.time() - terms.since),
        remaining=None if due is None else duration(due - lead.runner.time()),
        blocks=pool_blocks(state.pool.allocator.find(allocation_id) or (), state.life.incarnation),
    )
