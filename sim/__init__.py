"""Many nodes in virtual time, on a faulty network with slow and racing data paths, from one seed.

    outcome = run(drawn(seed=7, steps=5_000))       # one of the worlds of `python -m sim`

    world = World(seed=7, engines=3, faults=ROUGH)  # one made by hand
    Traffic(world).requests(20, over_s=5.0)
    Chaos(world).mishaps(over_s=5.0)
    world.run(30.0)
    world.finish()

The nodes are the real core. Everything around them (network, movers, memory, engines) is a model, so that whatever the
core allows to go wrong does go wrong here, and is found. `Audit` compares the node's tables with each other and with
the world. `Memory` checks the use of blocks at every write. `Engine` checks the KV that it gets. `LeadAccounts` checks
the life of every transfer and the answer to every call. A failed check raises `Violated`. The same seed gives the same
run.
"""

from sim.hosts.world import World
from sim.rules import Rule, Violated
from sim.seeds.chaos import Chaos, Mishaps
from sim.seeds.run import Outcome, Violation, digested, run
from sim.seeds.setup import TIGHT, Setup, drawn
from sim.seeds.traffic import Traffic, TrafficHabits
from sim.world.faults import ROUGH, STORMY, Faults

__all__ = [
    "ROUGH",
    "STORMY",
    "TIGHT",
    "Chaos",
    "Faults",
    "Mishaps",
    "Outcome",
    "Rule",
    "Setup",
    "Traffic",
    "TrafficHabits",
    "Violated",
    "Violation",
    "World",
    "digested",
    "drawn",
    "run",
]
