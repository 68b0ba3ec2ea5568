"""Mishaps of whole hosts and links: crashes, lost engines and ranks, stopped processes, and cut links."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random

from sim.hosts.host import Host
from sim.hosts.world import World
from sim.world.faults import Range

DOWN_S = (0.001, 20.0)
"""Range of downtimes in seconds, from far below the grace of liveness to well above it."""
CUT_S = (0.1, 20.0)
STOP_S = (0.01, 15.0)
RANK_DOWN_S = (0.001, 2.0)
GRACES = (0.8, 1.6)
"""Durations of every other stop and cut, in graces of liveness, so that peers are declared dead, or nearly so."""
LONGER = 1.3
"""Factor by which some movers are stopped longer than their lead: peers hear the lead again before its bytes move."""
MIDST_CELLS = 8
"""Number of cells whose maximum copy time bounds the delay of a mishap, so that a posting is likely in flight."""
PEER_STRUCK = 0.25
"""Probability that a mishap strikes the side that does not move the bytes."""
DOOM_EVENTS = 40
"""Range of events within which a doomed lead crashes, in the middle of one of them."""


def _lasts(rng: Random, span: Range) -> float:
    """Returns a duration on a logarithmic scale: short ones are as likely as long ones."""
    low, high = span
    return low * math.exp(rng.random() * math.log(high / low))


@dataclass(frozen=True)
class Mishaps:
    """Expected number of each mishap in 10 seconds. By default there are none."""

    crash: float = 0.0
    """A lead crashes with its engine and ranks, between two events."""
    crash_in_event: float = 0.0
    """A lead crashes halfway through the actions of an event."""
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
        """Returns the mishaps without that kind."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Mishaps(**values | {kind: 0.0})


KINDS = tuple(field.name for field in fields(Mishaps))
"""Names of the mishaps."""


class Chaos:
    """Mishaps, drawn from the world's seed. Each kind draws from its own source, so that none disturbs another."""

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
        argument is the expected number over the whole time.
        """
        scale = 10.0 / over_s
        end = self._world.agenda.now + over_s
        self.keep_on(Mishaps(crash=crashes * scale, lose_engine=losses * scale, cut=cuts * scale), until=end)

    def keep_on(self, mishaps: Mishaps, *, until: float = float("inf")) -> None:
        """Lets mishaps happen until then, or until the world closes."""
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
        """Returns the time that a host is not heard, in seconds."""
        if rng.random() < 0.5:
            return _lasts(rng, span)
        return self._world.network.faults.silence_s[1] + self._world.limits.peer_grace_s * rng.uniform(*GRACES)

    def _strike(self, rng: Random, befall: Callable[[Host], None]) -> None:
        """Strikes any host now, or every other time a side of the next posting while its bytes move."""
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
