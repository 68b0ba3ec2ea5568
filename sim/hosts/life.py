"""One life of a modelled engine: its description, its memory, its movers, and the doors by which peers reach its
memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvgrpc.core.events import Event
from kvgrpc.core.values.compatibility import READS_PUSHES, EngineDescription
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import PROTOCOL_MAX, PROTOCOL_MIN
from sim.engine.engine import Engine
from sim.world.memory import Memory, MemoryDoor
from sim.world.mover import Mover
from sim.world.sending_mover import SendingMover
from sim.world.surroundings import Surroundings


@dataclass(eq=False)
class Life:
    """The time from the attaching of an engine to its end."""

    key: str
    description: EngineDescription
    engine: Engine
    mover: Mover
    memories: list[Memory]
    world: Surroundings
    doors: dict[int, MemoryDoor] = field(default_factory=dict)
    """Doors that are offered now, by rank."""

    def __post_init__(self) -> None:
        for rank in range(len(self.memories)):
            self._open_door(rank)

    def rekey(self, rank: int, *, proves: bool) -> None:
        """Restarts a rank's data path. `proves` means that nothing comes by the old one any more."""
        self.mover.end_all(rank)
        self.doors[rank].open = not proves
        self.doors[rank].renewed = True
        self._open_door(rank)

    def end(self) -> None:
        """Burns the memory, so that a read that goes on gets garbage."""
        for memory in self.memories:
            memory.burn()

    def _open_door(self, rank: int) -> None:
        key = f"{self.key}/{rank}.{len(self.world.doors)}"
        self.doors[rank] = self.world.doors[key] = MemoryDoor(key, self.memories[rank])


def make_mover(
    world: Surroundings, address: str, rng: Random, memories: list[Memory], report: Callable[[Event], None]
) -> Mover:
    """Returns the movers of a life of the engine at an address."""
    agenda, faults, seen, tame = world.agenda, world.network.faults, world.seen, address in world.liars
    if address in world.collective:
        return SendingMover(agenda, rng, faults, memories, report, seen, world.wires, tame=tame)
    return Mover(agenda, rng, faults, memories, report, seen, tame=tame)


def describe(address: str, incarnation: int, world: Surroundings) -> EngineDescription:
    """Returns an engine's description. In the simulator its id is its address."""
    return EngineDescription(
        engine_id=address,
        incarnation=incarnation,
        address=address,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        weights_revision="w1",
        pool=world.pool_of(address),
        pool_kind=PoolKind.SERVER_MANAGED if world.given_out else PoolKind.ENGINE_MANAGED,
        world_size=world.ranks_of(address),
        features=(READS_PUSHES,) if world.checksums or address in world.cannot_set_aside | world.mirrored else (),
    )
