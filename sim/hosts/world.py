"""A world: some hosts, the network between them, and virtual time."""

from collections import Counter
from random import Random

from kvgrpc.core.events import Event
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.values.limits import Limits
from sim.hosts.host import Host
from sim.hosts.liar import Liar
from sim.rules import Rule, broken
from sim.world.agenda import Agenda
from sim.world.faults import Faults
from sim.world.memory import layout, split_layout
from sim.world.network import Network
from sim.world.surroundings import Surroundings, Watcher

IDLE_AFTER_S = 7_200.0
"""Virtual time after which every bound of the protocol is over, in seconds."""
EPOCH_US = 1_700_000_000 * 10**6
AUDIT_STEPS = 100
"""Number of events after which everything is compared with everything."""


class World:
    """A world of `engines` hosts with `ranks` ranks each, and `blocks` blocks in each group; see `Node` for `writers`.
    `hoarders` engines cannot set blocks aside, `mirrored` are mirrored, the ranks of `collective` send to each other,
    and `liars` hosts lie to the others. With `aliased`, the groups of each engine share its blocks. With `given_out`,
    servers give out the blocks of their pools. `unlike` has the ranks of each engine, if they differ; then heads have
    `head_dim` elements, and the ranks form `stages` stages.
    """

    def __init__(  # noqa: PLR0913 - what a world is made of
        self, seed: int, *, engines: int = 2, ranks: int = 1, blocks: int = 48, faults: Faults | None = None,
        limits: Limits | None = None, writers: frozenset[str] = frozenset(), checksums: bool = False,
        hoarders: int = 0, mirrored: int = 0, collective: int = 0, liars: int = 0, aliased: bool = False,
        unlike: tuple[int, ...] = (), head_dim: int = 1, stages: tuple[int, ...] = (), given_out: bool = False,
        watcher: Watcher | None = None,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.ranks = ranks
        self.agenda = Agenda()
        self.seen: Counter[str] = Counter()
        """Number of things that went wrong, by kind."""
        self._audited = 0
        self.network = Network(self.agenda, self.rng("network"), faults or Faults(), self.seen)
        around = self._around = Surroundings(
            self.agenda, self.network, limits or Limits(), layout(blocks, aliased=aliased), ranks, writers, checksums,
            seen=self.seen, watcher=watcher, given_out=given_out,
            cannot_set_aside=frozenset(f"engine-{i}" for i in range(hoarders)),
            mirrored=frozenset(f"engine-{i}" for i in range(min(mirrored, engines - liars))),
            collective=frozenset(f"engine-{i}" for i in range(engines - min(collective, engines), engines)),
            liars=frozenset(f"engine-{i}" for i in range(engines - liars, engines)),
            splits={f"engine-{i}": (split_layout(blocks, count, head_dim, *stages[i : i + 1]), count)
                    for i, count in enumerate(unlike)},
        )  # fmt: skip
        self.offered = around.offered
        """Prompt of each transfer key, to tell wrong KV from KV that was asked for wrongly."""
        self.ambushes = around.ambushes
        """Callbacks for the next posting: see `Surroundings`."""
        self.hosts = [Host(f"engine-{i}", around, self.rng(f"engine-{i}")) for i in range(engines)]
        for host in self.hosts:
            host.start()

    @property
    def steps(self) -> int:
        """Number of events that nodes have handled."""
        return self._around.steps

    @property
    def wall_us(self) -> int:
        """Time of day at every engine, in microseconds since the Unix epoch."""
        return EPOCH_US + int(self.agenda.now * 1e6)

    @property
    def closing(self) -> bool:
        """True once nothing new begins."""
        return self._around.closing

    @property
    def limits(self) -> Limits:
        """Limits of every lead."""
        return self._around.limits

    @property
    def handled(self) -> Event | None:
        """The event that a node handled last."""
        return self._around.handled

    def lie(self, odds: float, rate_per_s: float, other_lives: float, false_checksums: float) -> None:
        """Starts the liars until the world closes. `odds` and `false_checksums` are shares of false messages and
        checksums, `rate_per_s` is the rate of unasked messages, and `other_lives` the share of its pushes' accesses
        about which a liar speaks in the name of other lives.
        """
        for host in self.hosts:
            if host.lies:
                liar = Liar(host, self._around, self.rng(f"liar/{host.address}"), odds, other_lives, false_checksums)
                if rate_per_s > 0:
                    liar.keep_on(rate_per_s)

    def rng(self, part: str) -> Random:
        """Returns the source of randomness of one part, so that parts do not disturb each other."""
        return Random(f"{self.seed}/{part}")  # noqa: S311 - a simulation, no secrets

    def run(self, for_s: float) -> None:
        """Lets time pass."""
        end = self.agenda.now + for_s
        self._go(end)
        self.agenda.now = end

    def run_steps(self, steps: int) -> None:
        """Lets time pass until nodes have handled `steps` events in all, or nothing is left to do."""
        self._go(float("inf"), steps)

    def finish(self) -> None:
        """Mends everything but liars, which are gone from now on, waits until nothing is left to do, and checks that
        nothing is left over.
        """
        self._around.closing = True
        self.network.mend_all()
        for host in self.hosts:
            host.spare()
            if host.lies and host.up:
                host.crash()
            elif not host.up:
                host.start()
        self._come_to_rest()
        for host in self._honest():
            host.audit.check_quarantine(host.ledger.writes)
            self._check_told(host)
            # Two that declared each other dead may never speak again. Nothing moves by now, and the operator says so.
            host.release_quarantine(force=True)
        self._come_to_rest()
        for host in self._honest():
            host.check_idle()

    def ends(self) -> Counter[str]:
        """Returns the number of transfers of all hosts by direction and final state."""
        total: Counter[str] = Counter()
        for host in self.hosts:
            for (direction, state), count in host.ledger.ends.items():
                total[f"{direction.value} {state.value}"] += count
        return total

    def failures(self) -> Counter[str]:
        """Returns the number of failed transfers of all hosts by reason."""
        total: Counter[str] = Counter()
        for host in self.hosts:
            total.update(host.ledger.failures)
        return total

    def _honest(self) -> list[Host]:
        return [host for host in self.hosts if not host.lies]

    def _check_told(self, host: Host) -> None:
        sources = {other.life: other for other in self._honest() if other.ready}

        def can_tell(life: str, transfer_id: str) -> bool:
            source = sources.get(life)
            if (
                source is None
                or host.life not in source.node.state.peers.lives
                or not source.audit.saw_rest(transfer_id)
            ):
                return False
            return _admits(source, host.life) and _admits(host, life)

        host.audit.proven.check_told(host.ledger.writes, can_tell, host.mover.ends.missed)

    def _come_to_rest(self) -> None:
        self._go(self.agenda.now + IDLE_AFTER_S)
        if not self.agenda.idle:
            broken(Rule.END, "something goes on for ever")

    def _go(self, until: float, steps: float = float("inf")) -> None:
        around = self._around

        def go_on() -> bool:
            if around.steps - self._audited >= AUDIT_STEPS:
                self._audited = around.steps
                for host in self.hosts:
                    host.check()
            return around.steps < steps

        self.agenda.run(until, go_on)


def _admits(host: Host, life: str) -> bool:
    """Returns True if a handshake with that life of a peer is not refused for lack of room."""
    state = host.node.state
    living = sum(peer.state is not PeerState.DEAD for peer in state.peers.lives.values())
    return state.peers.live_on(life) or living < state.limits.peers
