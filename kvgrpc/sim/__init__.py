"""Many nodes in virtual time, on a faulty network with slow and racing data paths, from one seed.

    world = World(seed=7, engines=3, faults=ROUGH)
    Traffic(world).requests(20, over_s=5.0)
    Chaos(world).mishaps(over_s=5.0)
    world.run(30.0)
    world.finish()

The nodes are the real core; everything around them (network, movers, memory, engines) is modelled, so that whatever
the core allows to go wrong does go wrong here, and is found: `Host` checks the node's invariants after every event,
`Memory` the use of blocks at every write, `Engine` the KV that it is given, `Ledger` the life of every transfer and the
answer to every call. Same seed, same run.
"""

from kvgrpc.sim.chaos import Chaos
from kvgrpc.sim.faults import ROUGH, Faults
from kvgrpc.sim.traffic import Traffic
from kvgrpc.sim.world import World

__all__ = ["ROUGH", "Chaos", "Faults", "Traffic", "World"]
