"""Checks that the pins of one lead match the engine's use, the memory given to transfers, and the free blocks."""

from collections.abc import Callable, Iterable

from kvgrpc.core.state import NodeState
from kvgrpc.core.state.engine_status import engine_status
from kvgrpc.core.tables.pins import EXCLUSIVE, Pin
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.layout import PoolLayout
from sim.rules import Rule, broken
from sim.world.memory import Memory

Uses = Callable[[int, int], bool]
"""Returns True if an engine uses a block of a group."""


def check_pins(pins: Iterable[Pin], uses: Uses, memories: list[Memory], *, voided: bool) -> None:
    """Checks the pins. `voided` means that the engine has taken blocks back that the lead still counts."""
    exclusive: list[Blocks] = []
    for pin in pins:
        if pin.kind in EXCLUSIVE:
            exclusive.append(pin.blocks)
        if not voided or pin.kind in EXCLUSIVE:
            _check_pin(pin, uses)
    of_stage: dict[int, set[int]] = {}
    for memory in memories:
        if memory.stage not in of_stage:
            of_stage[memory.stage] = {cell for blocks in exclusive for cell in memory.cells_of(blocks)}
        if memory.given.keys() != of_stage[memory.stage]:
            cell = min(memory.given.keys() ^ of_stage[memory.stage])
            owner = memory.given.get(cell, "nobody")
            broken(Rule.R1, f"cell {cell} belongs to {owner}, which is not what the lead's pins say", owner)


def check_free(state: NodeState, pool: PoolLayout) -> None:
    """Checks that the blocks a lead calls free for a group are neither pinned nor allocated in any group of its
    space.
    """
    held: dict[int, set[int]] = {space: set() for space in pool.spaces}
    for pin in state.pool.pins:
        _add(held, pool, pin.blocks)
    for allocation_id in map(str, state.pool.allocator.kept_bytes):
        _add(held, pool, state.pool.allocator.find(allocation_id) or ())
    for space, group, load in zip(pool.spaces, pool.groups, engine_status(state).groups, strict=True):
        free = group.blocks - len(held[space])
        if load.free != free:
            broken(Rule.R1, f"{load.free} blocks are said to be free for group {group.name}, and {free} are")


def _add(held: dict[int, set[int]], pool: PoolLayout, blocks: Blocks) -> None:
    for space, ids in zip(pool.spaces, blocks, strict=bool(blocks)):
        held[space].update(ids.tolist())


def _check_pin(pin: Pin, uses: Uses) -> None:
    for group, ids in enumerate(pin.blocks):
        for block in ids.tolist():
            if not uses(group, block):
                broken(Rule.R1, f"{pin.kind.value} {pin.owner} pins block {block}, which is free", pin.owner)
