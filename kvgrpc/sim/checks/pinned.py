"""Whether the pins of one lead are what its engine uses, what memory was given to transfers, and what is free."""

from collections.abc import Callable, Iterable

from kvgrpc.core.state import NodeState
from kvgrpc.core.state.engine_status import engine_status
from kvgrpc.core.tables.pins import EXCLUSIVE, Pin
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.sim.rules import Rule, broken
from kvgrpc.sim.world.memory import Memory

Uses = Callable[[int, int], bool]
"""Whether an engine has a use for a block of a group."""


def check_pins(pins: Iterable[Pin], uses: Uses, memories: list[Memory], *, voided: bool) -> None:
    """`voided`: the engine has taken blocks back of which the lead does not know yet."""
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
    """What the lead says to be free for a group is what nothing pins and nobody got, in any group of its space."""
    held: dict[int, set[int]] = {space: set() for space in pool.spaces}
    for pin in state.pins:
        _add(held, pool, pin.blocks)
    for allocation_id in map(str, state.allocator.kept_bytes):
        _add(held, pool, state.allocator.find(allocation_id) or ())
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
