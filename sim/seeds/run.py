"""Runs a world from its setup to its end, and collects the outcome."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sim.hosts.world import World
from sim.rules import Rule, Violated
from sim.seeds.chaos import Chaos
from sim.seeds.rings import Ring
from sim.seeds.setup import Setup
from sim.seeds.strangers import Stranger
from sim.seeds.traffic import Traffic
from sim.world.surroundings import Watcher
from sim.world.trace import Digest, tell

RING_BEGINS_S = 1.0
"""Time after which all engines of a ring are up, in seconds."""


@dataclass(frozen=True)
class Violation:
    """A rule that did not hold."""

    seed: int
    rule: Rule
    message: str
    step: int
    """Number of events before the violation."""
    about: tuple[str, ...] = ()
    """Names of the things that the violation is about."""


@dataclass
class Outcome:
    """Outcome of one or more worlds."""

    steps: int = 0
    """Number of events that nodes handled."""
    requests: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    """Number of transfers by direction and final state."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of failed transfers by reason."""
    violations: list[Violation] = field(default_factory=list)
    digests: dict[int, int] = field(default_factory=dict)
    """Digests of traces by seed, of worlds that were digested."""

    def add(self, other: "Outcome") -> None:
        """Adds another outcome."""
        self.steps += other.steps
        self.requests += other.requests
        self.virtual_s += other.virtual_s
        self.faults += other.faults
        self.ends += other.ends
        self.reasons += other.reasons
        self.violations += other.violations
        self.digests |= other.digests


def run(setup: Setup, watcher: Watcher | None = None) -> Outcome:
    """Runs one world, to its end or to the first broken rule."""
    world = World(
        setup.seed,
        engines=setup.engines,
        ranks=setup.ranks,
        blocks=setup.blocks,
        faults=setup.faults,
        limits=setup.limits,
        writers=setup.writers,
        checksums=setup.checksums,
        hoarders=setup.hoarders,
        mirrored=setup.mirrored,
        collective=setup.collective,
        liars=setup.liars,
        aliased=setup.aliased,
        unlike=setup.unlike,
        head_dim=setup.head_dim,
        stages=setup.stages,
        given_out=setup.given_out,
        watcher=watcher,
    )
    habits = setup.habits
    traffic = Traffic(
        world, habits.meddling, habits.pushes, habits.mistakes, habits.turns, habits.hang_ups, setup.left_out
    )

    def turn() -> None:
        world.run(RING_BEGINS_S)
        ring.begin()
        while not ring.done:
            world.run(RING_BEGINS_S)
        world.finish()

    def live() -> None:
        world.lie(setup.lies, setup.inventions_per_s, setup.other_lives, setup.false_checksums)
        if setup.trespasses_per_s > 0:
            Stranger(world).keep_on(setup.trespasses_per_s)
        traffic.keep_on(setup.rate_per_s)
        Chaos(world).keep_on(setup.mishaps)
        world.run_steps(setup.steps)
        world.finish()

    ring = Ring(world, setup.ring, habits.turns)
    violations = _found(turn if setup.ring else live, world)
    return Outcome(
        world.steps, traffic.made + ring.made, world.agenda.now, world.seen, world.ends(), world.failures(), violations
    )


def digested(setup: Setup) -> Outcome:
    """Runs a world like `run`, with the digest of all that happened, which is equal while all decisions are."""
    seen = Digest()
    outcome = run(setup, seen)
    outcome.digests[setup.seed] = seen.value
    return outcome


def _found(live: Callable[[], None], world: World) -> list[Violation]:
    try:
        live()
    except Violated as error:
        return [Violation(world.seed, error.rule, error.message, world.steps, error.about)]
    except Exception as error:  # noqa: BLE001 - whatever a lead raises would have stopped it
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = "" if at is None else f" in {at.tb_frame.f_code.co_qualname}"
        message = f"a lead is stopped by {type(error).__name__}{where}: {error}"
        return [Violation(world.seed, Rule.R6, message, world.steps, (tell(world.handled),))]
    return []
