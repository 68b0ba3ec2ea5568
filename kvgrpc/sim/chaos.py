"""What befalls whole hosts and links: crashes, engines that are lost and attached anew, and cuts of the network."""

from kvgrpc.sim.host import Host
from kvgrpc.sim.world import World

DOWN_S = (0.001, 20.0)
"""From far below the grace of liveness to well above it."""
CUT_S = (0.1, 20.0)


class Chaos:
    """Mishaps, drawn from the world's seed. Each is the expected number over the whole time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng("chaos")

    def mishaps(
        self, over_s: float, *, crashes: float = 0.5, losses: float = 0.3, cuts: float = 0.5, rekeys: float = 20.0
    ) -> None:
        """Puts crashes of leads, losses of engines, cuts of links and re-keys on the agenda of the next `over_s`
        seconds.
        """
        kinds = ((crashes, self._crash), (losses, self._lose), (cuts, self._cut), (rekeys, self._rekey))
        for expected, befall in kinds:
            at_s = self._rng.expovariate(expected / over_s)
            while at_s < over_s:
                self._world.agenda.after(at_s, befall)
                at_s += self._rng.expovariate(expected / over_s)

    def _crash(self) -> None:
        host = self._host()
        if host.up:
            host.crash()
            self._world.agenda.after(self._rng.uniform(*DOWN_S), lambda: None if host.up else host.start())

    def _lose(self) -> None:
        host = self._host()
        if host.up:
            host.reattach()

    def _rekey(self) -> None:
        host = self._host()
        if host.up:
            host.release_quarantine()

    def _cut(self) -> None:
        one, other = (host.address for host in self._rng.sample(self._world.hosts, 2))
        self._world.network.cut(one, other)
        self._world.agenda.after(self._rng.uniform(*CUT_S), lambda: self._world.network.mend(one, other))

    def _host(self) -> Host:
        return self._rng.choice(self._world.hosts)
