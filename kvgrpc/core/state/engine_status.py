"""The load of an engine, for routers that choose among engines."""

from kvgrpc.core.state.node_state import NodeState
from kvgrpc.core.values.records import dataclass


@dataclass(frozen=True)
class GroupLoad:
    """Block counts of one group's space. Groups of one space have the same numbers."""

    blocks: int
    free: int
    """Number of blocks that are neither allocated by the server nor pinned."""
    soft: int = 0
    """Number of blocks that only soft leases hold."""


@dataclass(frozen=True)
class EngineStatus:
    """The load of an engine at one moment."""

    groups: tuple[GroupLoad, ...] = ()
    """Loads in the order of the pool's groups. Empty while there is no pool."""
    transfers: int = 0
    """Number of transfers that are not over."""
    waiting_turns: int = 0
    """Number of moves that wait for their turn."""
    queued_bytes: int = 0
    """Number of bytes that transfers with an open access still have to move."""
    leases: int = 0


def engine_status(state: NodeState) -> EngineStatus:
    """Returns the engine's present load. The cost is one lookup for each group, independent of the group's size."""
    groups = state.life.description.pool.groups if state.life.description is not None else ()
    return EngineStatus(
        groups=tuple(
            GroupLoad(group.blocks, state.pool.pins.free[space], state.pool.pins.reclaimable(space))
            for space, group in zip(state.pool.pins.spaces, groups, strict=True)
        ),
        transfers=state.transfers.going_on,
        waiting_turns=len(state.moves.turns.waiting),
        queued_bytes=state.transfers.queued_bytes,
        leases=len(state.send.leases),
    )
