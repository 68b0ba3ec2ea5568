"""How an engine is, for whoever chooses among engines: what is free, and what waits."""

from dataclasses import dataclass

from kvgrpc.core.state.move import AT_ISSUER
from kvgrpc.core.state.node_state import NodeState
from kvgrpc.core.values.layout import PoolKind


@dataclass(frozen=True)
class GroupLoad:
    """Blocks of one group."""

    blocks: int
    free: int
    """Neither allocated nor pinned; where the engine manages its blocks, not pinned."""
    soft: int = 0
    """Held by nothing but leases that may be taken back at any time."""


@dataclass(frozen=True)
class EngineStatus:
    """An engine at one moment."""

    groups: tuple[GroupLoad, ...] = ()
    transfers: int = 0
    """That are not over."""
    waiting_turns: int = 0
    queued_bytes: int = 0
    """Of transfers whose access is open, and that have not moved yet."""
    leases: int = 0


def engine_status(state: NodeState) -> EngineStatus:
    """The engine as it is now. Linear in its blocks, by numpy, and in its moves."""
    queued = sum(
        max(transfer.nbytes - transfer.nbytes_done, 0)
        for move in state.moves
        if move.stage in AT_ISSUER and (transfer := state.transfers.find(move.transfer_id)) is not None
    )
    return EngineStatus(
        groups=tuple(_group(state, index) for index in range(len(state.pool.pool.groups))) if state.description else (),
        transfers=state.transfers.going_on,
        waiting_turns=state.turns.left()["waiting"],
        queued_bytes=queued,
        leases=len(state.leases),
    )


def _group(state: NodeState, index: int) -> GroupLoad:
    engine = state.pool
    blocks = engine.pool.groups[index].blocks
    if engine.pool_kind is PoolKind.SERVER_MANAGED:
        return GroupLoad(blocks, state.allocator.free_count(index))
    return GroupLoad(blocks, blocks - int(state.pins.pinned_mask(index).sum()))
