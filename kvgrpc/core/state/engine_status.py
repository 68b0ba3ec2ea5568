"""How an engine is, for those that choose among engines: what is free, and what waits."""

from dataclasses import dataclass

from kvgrpc.core.state.node_state import NodeState


@dataclass(frozen=True)
class GroupLoad:
    """Blocks of one group's space: groups of one space have the same numbers."""

    blocks: int
    free: int
    """Neither allocated nor pinned; where the engine manages its blocks, not pinned."""
    soft: int = 0
    """Held by nothing but leases that may be taken back at any time."""


@dataclass(frozen=True)
class EngineStatus:
    """An engine at one moment."""

    groups: tuple[GroupLoad, ...] = ()
    """In the order of the pool's; none while there is no pool."""
    transfers: int = 0
    """That are not over."""
    waiting_turns: int = 0
    """Moves that wait for their turn."""
    queued_bytes: int = 0
    """Of transfers whose access is open, what has not moved yet."""
    leases: int = 0


def engine_status(state: NodeState) -> EngineStatus:
    """The engine as it is now. It costs a look at each group, however much there is in it."""
    groups = state.description.pool.groups if state.description is not None else ()
    return EngineStatus(
        groups=tuple(
            GroupLoad(group.blocks, state.pins.free[space], state.pins.reclaimable(space))
            for space, group in zip(state.pins.spaces, groups, strict=True)
        ),
        transfers=state.transfers.going_on,
        waiting_turns=state.turns.waiting,
        queued_bytes=state.transfers.queued_bytes,
        leases=len(state.leases),
    )
