"""Leases that stand for others with the same blocks. One reader reads such a lease in place of each of them."""

from collections.abc import Iterator

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease


def stood_for(state: NodeState, lease: Lease) -> Iterator[Lease]:
    """Yields the live leases that `lease` stands for."""
    for other in map(state.send.leases.find, lease.stands_for):
        if other is not None and other.live:
            yield other


def keep(state: NodeState, lease: Lease) -> None:
    """Keeps the other leases alive while this one lasts, up to their caps."""
    for other in stood_for(state, lease):
        other.deadline = max(other.deadline, min(lease.deadline, other.cap))


def read(state: NodeState, lease: Lease) -> list[Lease]:
    """Marks the other leases as read under this one and returns them. The caller ends them."""
    others = list(stood_for(state, lease))
    for other in others:
        other.read_as(lease, state.pool.bytes_of([len(ids) for ids in other.blocks]))
    return others
