"""A world: some hosts, the network between them, and virtual time."""

from collections import Counter
from random import Random

from kvgrpc.core.limits import Limits
from kvgrpc.sim.agenda import Agenda
from kvgrpc.sim.faults import Faults
from kvgrpc.sim.host import Host, Surroundings
from kvgrpc.sim.memory import layout
from kvgrpc.sim.network import Network

IDLE_AFTER_S = 3_600.0
"""By then every bound of the protocol is over."""


class World:
    """`engines` hosts with `ranks` ranks each, of `blocks` blocks in each group; see `Node` for `writers`."""

    def __init__(  # noqa: PLR0913 - what a world is made of
        self, seed: int, *, engines: int = 2, ranks: int = 1, blocks: int = 48, faults: Faults | None = None,
        limits: Limits | None = None, writers: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.seed = seed
        self.agenda = Agenda()
        self.network = Network(self.agenda, self.rng("network"), faults or Faults())
        around = Surroundings(self.agenda, self.network, limits or Limits(), layout(blocks), ranks, writers)
        self.hosts = [Host(f"engine-{i}", around, self.rng(f"engine-{i}")) for i in range(engines)]
        for host in self.hosts:
            host.start()

    def rng(self, part: str) -> Random:
        """The source of randomness of one part: parts do not disturb each other."""
        return Random(f"{self.seed}/{part}")  # noqa: S311 - a simulation, no secrets

    def run(self, for_s: float) -> None:
        """Lets time pass."""
        end = self.agenda.now + for_s
        self.agenda.run(end)
        self.agenda.now = end

    def finish(self) -> None:
        """Mends everything, waits until nothing is left to do, and asserts that nothing is left over."""
        self.network.mend_all()
        for host in self.hosts:
            if not host.up:
                host.start()
        assert self.agenda.run(self.agenda.now + IDLE_AFTER_S), "something goes on for ever"
        for host in self.hosts:
            # Two that took each other for dead may never speak again. Nothing moves by now, and a person says so.
            host.release_quarantine(force=True)
        assert self.agenda.run(self.agenda.now + IDLE_AFTER_S), "something goes on for ever"
        for host in self.hosts:
            host.check_idle()

    def ends(self) -> Counter[str]:
        """How the transfers of all hosts ended."""
        total: Counter[str] = Counter()
        for host in self.hosts:
            for (direction, state), count in host.ledger.ends.items():
                total[f"{direction.value} {state.value}"] += count
        return total

    def failures(self) -> Counter[str]:
        """Why the transfers of all hosts failed."""
        total: Counter[str] = Counter()
        for host in self.hosts:
            total.update(host.ledger.failures)
        return total
