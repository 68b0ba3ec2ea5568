"""A lease that stands for others: of the same blocks, which its one reader reads under it in place of each of them."""

from collections.abc import Iterator

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease


def stood_for(state: NodeState, lease: Lease) -> Iterator[Lease]:
    """Those of the others that are live."""
    for other in map(state.leases.find, lease.stands_for):
        if other is not None and other.live:
            yield other


def keep(state: NodeState, lease: Lease) -> None:
    """While this one lasts the others do, up to their caps."""
    for other in stood_for(state, lease):
        other.deadline = max(other.deadline, min(lease.deadline, other.cap))


def read(state: NodeState, lease: Lease) -> list[Lease]:
    """What was read under this one was read under the others, which are to end."""
    others = list(stood_for(state, lease))
    for other in others:
        other.read_as(lease, state.bytes_of([len(ids) for ids in other.blocks]))
    return others
