"""What befalls whole hosts and links: crashes, lost engines and ranks, processes that are stopped, and cut links."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random

from kvgrpc.sim.hosts.host import Host
from kvgrpc.sim.hosts.world import World
from kvgrpc.sim.world.faults import Range

DOWN_S = (0.001, 20.0)
"""From far below the grace of liveness to well above it."""
CUT_S = (0.1, 20.0)
STOP_S = (0.01, 15.0)
RANK_DOWN_S = (0.001, 2.0)
GRACES = (0.8, 1.6)
"""Every other stop and cut lasts about as long as the grace of liveness: some are declared dead, and some hardly."""
LONGER = 1.3
"""As many times as long as their lead some movers are stopped: its peers are heard again before their bytes move."""
MIDST_CELLS = 8
"""As long as so many cells take at most a posting is likely to be under way."""
PEER_STRUCK = 0.25
"""How often it is not the side that moves them."""
DOOM_EVENTS = 40
"""A lead that is doomed crashes in the middle of one of its next events."""


def _lasts(rng: Random, span: Range) -> float:
    """A duration; short ones are as likely as long ones, on a logarithmic scale."""
    low, high = span
    return low * math.exp(rng.random() * math.log(high / low))


@dataclass(frozen=True)
class Mishaps:
    """How often in 10 seconds each befalls a world. The default is a world that nothing befalls."""

    crash: float = 0.0
    """A lead crashes, and with it its engine and ranks, between two events."""
    crash_in_event: float = 0.0
    """It crashes when a part of what an event asks for is done."""
    lose_engine: float = 0.0
    """An engine dies; another attaches to the same lead at once."""
    lose_rank: float = 0.0
    """The process of a rank dies, and its engine with it; the other ranks' postings run on."""
    cut: float = 0.0
    """Nothing passes between two hosts."""
    cut_one_way: float = 0.0
    """Nothing passes from one host to another."""
    isolate: float = 0.0
    """Nothing passes between one host and all others."""
    stop: float = 0.0
    """The processes of a host are stopped for a while; its movers may run on, or be stopped for longer."""

    def without(self, kind: str) -> "Mishaps":
        """The same, but that never happens."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Mishaps(**values | {kind: 0.0})


KINDS = tuple(field.name for field in fields(Mishaps))
"""What may befall, by name."""


class Chaos:
    """Mishaps, drawn from the world's seed. Each kind draws from a source of its own: none disturbs another."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rngs = {kind: world.rng(f"chaos/{kind}") for kind in KINDS}
        self._deeds: dict[str, Callable[[Random], None]] = {
            "crash": self._crash,
            "crash_in_event": self._crash_in_event,
            "lose_engine": self._lose_engine,
            "lose_rank": self._lose_rank,
            "cut": lambda rng: self._cut(rng, one_way=False),
            "cut_one_way": lambda rng: self._cut(rng, one_way=True),
            "isolate": self._isolate,
            "stop": self._stop,
        }

    def mishaps(self, over_s: float, *, crashes: float = 0.5, losses: float = 0.3, cuts: float = 0.5) -> None:
        """Puts crashes of leads, losses of engines and cuts of links on the agenda of the next `over_s` seconds. Each
        is the expected number over the whole time.
        """
        scale = 10.0 / over_s
        end = self._world.agenda.now + over_s
        self.keep_on(Mishaps(crash=crashes * scale, lose_engine=losses * scale, cut=cuts * scale), until=end)

    def keep_on(self, mishaps: Mishaps, *, until: float = float("inf")) -> None:
        """Lets things happen until then, or until the world closes."""
        for kind in KINDS:
            if getattr(mishaps, kind) > 0:
                self._plan(kind, getattr(mishaps, kind) / 10.0, until)

    def _plan(self, kind: str, rate_per_s: float, until: float) -> None:
        rng, agenda = self._rngs[kind], self._world.agenda
        when = agenda.now + rng.expovariate(rate_per_s)

        def befall() -> None:
            if not self._world.closing:
                self._deeds[kind](rng)
                self._plan(kind, rate_per_s, until)

        if when < until:
            agenda.at(when, befall)

    def _crash(self, rng: Random) -> None:
        down_s = _lasts(rng, DOWN_S)

        def crash(host: Host) -> None:
            if host.up:
                self._world.seen["crash"] += 1
                host.crash()
                self._restart(host, down_s)

        self._strike(rng, crash)

    def _crash_in_event(self, rng: Random) -> None:
        host, events, down_s = rng.choice(self._world.hosts), rng.randrange(DOOM_EVENTS), _lasts(rng, DOWN_S)
        if host.up:
            self._world.seen["crash_in_event"] += 1
            host.doom(events)
            self._restart(host, down_s)

    def _restart(self, host: Host, after_s: float) -> None:
        def start() -> None:
            if host.lies and self._world.closing:
                return
            if not host.up:
                host.start()
            elif host.doomed:
                self._restart(host, after_s)

        self._world.agenda.after(after_s, start)

    def _lose_engine(self, rng: Random) -> None:
        def lose(host: Host) -> None:
            if host.ready and not host.stopped:
                self._world.seen["lose_engine"] += 1
                host.reattach()

        self._strike(rng, lose)

    def _lose_rank(self, rng: Random) -> None:
        number, down_s = rng.randrange(self._world.ranks), _lasts(rng, RANK_DOWN_S)

        def lose(host: Host) -> None:
            if host.ready and not host.stopped:
                self._world.seen["lose_rank"] += 1
                host.lose_rank(number % host.description.world_size, down_s)

        self._strike(rng, lose)

    def _cut(self, rng: Random, *, one_way: bool) -> None:
        one, other = (host.address for host in rng.sample(self._world.hosts, 2))
        self._world.seen["cut_one_way" if one_way else "cut"] += 1
        self._world.network.cut(one, other, one_way=one_way)
        self._world.agenda.after(self._silent_s(rng, CUT_S), lambda: self._world.network.mend(one, other))

    def _isolate(self, rng: Random) -> None:
        network, one, for_s = self._world.network, rng.choice(self._world.hosts).address, self._silent_s(rng, CUT_S)
        others = [host.address for host in self._world.hosts if host.address != one]
        self._world.seen["isolate"] += 1
        for other in others:
            network.cut(one, other)
            self._world.agenda.after(for_s, lambda other=other: network.mend(one, other))  # type: ignore[misc]

    def _stop(self, rng: Random) -> None:
        for_s = self._silent_s(rng, STOP_S)
        movers_s = rng.choice((0.0, for_s, for_s * LONGER, for_s * LONGER))

        def stop(host: Host) -> None:
            if host.up and not host.stopped:
                self._world.seen["stop"] += 1
                host.stop(for_s, movers_s=movers_s)

        self._strike(rng, stop)

    def _silent_s(self, rng: Random, span: Range) -> float:
        """How long a host is not heard."""
        if rng.random() < 0.5:
            return _lasts(rng, span)
        return self._world.network.faults.silence_s[1] + self._world.limits.peer_grace_s * rng.uniform(*GRACES)

    def _strike(self, rng: Random, befall: Callable[[Host], None]) -> None:
        """Any host, now; every other time one of the next two between which bytes move, while they are on their way."""
        world = self._world
        side = int(rng.random() < PEER_STRUCK)
        host, later_s = rng.choice(world.hosts), rng.uniform(0.0, MIDST_CELLS * world.network.faults.cell_s[1])
        if rng.random() < 0.5:
            befall(host)
            return

        def lurk(*addresses: str) -> None:
            struck = next(host for host in world.hosts if host.address == addresses[side])
            world.agenda.after(later_s, lambda: None if world.closing else befall(struck))

        world.ambushes.append(lurk)
