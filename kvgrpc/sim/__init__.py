"""Many nodes in virtual time, on a faulty network with slow and racing data paths, from one seed.

    world = World(seed=7, engines=2, faults=Faults(lose_request=0.05))
    traffic = Traffic(world)
    world.run(traffic.requests(20))
    world.finish()

The nodes are the real core; everything around them (network, movers, memory, engines) is modelled, so that whatever
the core allows to go wrong does go wrong here, and is found: `Host` checks the node's invariants after every event,
`Memory` the use of blocks at every write, `Ledger` the life of every transfer and the answer to every call. Same seed,
same run.
"""

from kvgrpc.sim.faults import Faults
from kvgrpc.sim.traffic import Traffic
from kvgrpc.sim.world import World

__all__ = ["Faults", "Traffic", "World"]
