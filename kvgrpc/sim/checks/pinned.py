"""Whether the pins of one lead are what its engine uses, and what memory was given to transfers."""

from collections.abc import Callable, Iterable

from kvgrpc.core.tables.pins import EXCLUSIVE, Pin
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.sim.rules import Rule, broken
from kvgrpc.sim.world.memory import Memory

Uses = Callable[[int, int], bool]
"""Whether an engine has a use for a block of a group."""


def check_pins(pins: Iterable[Pin], uses: Uses, memories: list[Memory], pool: PoolLayout, *, voided: bool) -> None:
    """`voided`: the engine has taken blocks back of which the lead does not know yet."""
    exclusive: set[int] = set()
    for pin in pins:
        if pin.kind in EXCLUSIVE:
            exclusive.update(_cells(pin, pool))
        if not voided or pin.kind in EXCLUSIVE:
            _check_pin(pin, uses)
    for memory in memories:
        if memory.given.keys() != exclusive:
            cell = min(memory.given.keys() ^ exclusive)
            owner = memory.given.get(cell, "nobody")
            broken(Rule.R1, f"cell {cell} belongs to {owner}, which is not what the lead's pins say", owner)


def _check_pin(pin: Pin, uses: Uses) -> None:
    for group, ids in enumerate(pin.blocks):
        for block in ids.tolist():
            if not uses(group, block):
                broken(Rule.R1, f"{pin.kind.value} {pin.owner} pins block {block}, which is free", pin.owner)


def _cells(pin: Pin, pool: PoolLayout) -> list[int]:
    return [
        region.offset + block * region.stride_bytes
        for region in pool.regions
        for block in pin.blocks[region.group].tolist()
    ]
