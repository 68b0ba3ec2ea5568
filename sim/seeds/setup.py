"""Draws the world of a seed. A setup is all that a run needs: the same setup runs the same way anywhere."""

from dataclasses import dataclass, field, replace
from random import Random

from kvgrpc.core.values.limits import Limits
from sim.seeds.chaos import Mishaps
from sim.seeds.traffic import TrafficHabits
from sim.world.faults import ROUGH, STORMY, Faults
from sim.world.memory import cell_bytes

WRITES = frozenset({"loopback"})
"""Data paths over which the source of a push writes; without them its destination reads."""

TIGHT = Limits(
    lease_ttl_s=2.0,
    in_flight_bytes=5,
    firm_ttl_s=0.5,
    lease_cap_s=10.0,
    queue_timeout_s=3.0,
    transfer_timeout_s=2.0,
    least_bytes_per_s=100.0,
    settle_timeout_s=1.0,
    registration_timeout_s=5.0,
    peer_grace_s=1.5,
    connect_timeout_s=1.0,
    open_wait_s=0.5,
    idempotency_s=2.0,
    leases=15,
    transfers=40,
    transfer_history=2,
    idempotency_keys=60,
    accesses=25,
    peers=2,
    tombstones=3,
    ended_leases=3,
    rekey_interval_s=5.0,
)
"""Limits at which every table of a lead is full now and then, and every deadline is near."""

UNLUCKY = Mishaps(
    crash=0.4, crash_in_event=0.3, lose_engine=0.4, lose_rank=0.2, cut=0.5, cut_one_way=0.3, isolate=0.2, stop=0.4
)
"""Mishaps with which every host has some trouble within a minute."""
DOOMED = Mishaps(
    crash=1.5, crash_in_event=1.0, lose_engine=1.5, lose_rank=0.7, cut=2.0, cut_one_way=1.0, isolate=0.7, stop=1.5
)
"""Mishaps with which something happens every second."""

HANG_UPS = (0.0, 0.1, 0.5)
"""Possible shares of clients that leave between prefill and decode."""
COMPARED = 0.25
"""Share of the worlds that compare what arrives with its source."""
CORRUPT = 0.03
"""Share of their postings that bring a cell as something else."""

ALIASED = 0.25
"""Share of the worlds whose engines have groups that share their blocks."""

RANKS = (1, 2, 4)
"""Possible numbers of ranks of unlike engines."""
STAGED = 0.4
"""Share of the worlds of unlike engines in which some have ranks in two stages."""
HEAD_DIMS = (1, 32)
"""Possible head dimensions of unlike engines: with the one they are re-packed, with the other moved run by run."""

IMPATIENT = 0.25
"""Share of the worlds in which a little memory in quarantine is already too much."""
BUDGETS = (0.0, 0.05, 0.1)
"""Possible budgets of quarantine, as a share of each group."""
GRACES_S = (0.5, 1.5, 3.0)
"""Possible graces before a re-key, in seconds."""
INTERVALS_S = (2.0, 5.0, 20.0)
"""Possible intervals between two re-keys, in seconds."""

HONEST_AND_ONE = 3
"""Minimum number of engines of a world with a liar."""
CALM = 0.5
CALM_RATE_PER_S = 10.0
LIES = (0.05, 0.2, 0.5)
"""Possible shares of a liar's false messages. A liar that lied all the time would soon be left alone."""
INVENTIONS_PER_S = (0.5, 2.0, 10.0)

FOCUSED = 0.25
"""Share of the worlds with a liar that are about pushes whose source writes, and about who may speak of them."""
OTHER_LIVES = 0.5
"""Share of accesses in such a world of which the liar speaks in the name of other lives."""
SUMMED = 0.2
"""Share of the worlds with a liar that are about checksums."""
FALSE_CHECKSUMS = 0.3
"""Share of the answers about checksums in such a world that are false, or never come."""

TRESPASSES_PER_S = (5.0, 20.0)
"""Possible rates of a stranger's calls, per second."""
GIVEN_OUT = 0.5
"""Share of the worlds with a stranger in which servers give out the blocks of their pools."""

QUICK_S = (0.0001, 0.002)
SLOW_S = (0.002, 0.05)
"""Ranges of a mover's time for a cell, in seconds: a posting takes some hundredths of a second, or a second."""


@dataclass(frozen=True)
class Setup:
    """One world, and its length."""

    seed: int
    steps: int
    """Number of handled events after which requests stop; what is in flight then goes on to its end."""
    engines: int = 3
    ranks: int = 1
    blocks: int = 24
    """Number of blocks of each group, on each engine."""
    faults: Faults = field(default_factory=Faults)
    mishaps: Mishaps = field(default_factory=Mishaps)
    habits: TrafficHabits = field(default_factory=TrafficHabits)
    limits: Limits = field(default_factory=Limits)
    writers: frozenset[str] = frozenset()
    aliased: bool = False
    """True if the groups of each engine share its blocks, and thus alias the same memory."""
    unlike: tuple[int, ...] = ()
    """Number of ranks of each engine, if they differ; heads then have `head_dim` elements."""
    head_dim: int = 1
    stages: tuple[int, ...] = ()
    """Number of pipeline stages that the ranks of each of these engines form."""
    checksums: bool = False
    """True if what arrives is compared with its source. Only then is anything corrupted on its way."""
    hoarders: int = 0
    """Number of engines that cannot set blocks aside: the first ones."""
    mirrored: int = 0
    """Number of engines whose memory no data path reaches: the first ones, but no liar."""
    collective: int = 0
    """Number of engines whose ranks send to each other, if both can: the last ones."""
    liars: int = 0
    """Number of hosts that lie to the others: the last ones."""
    lies: float = 0.0
    """Share of the liars' messages that are false."""
    inventions_per_s: float = 0.0
    """Rate of the liars' unasked messages, per second."""
    other_lives: float = 0.0
    """Share of accesses for the liars' pushes of which they speak in the name of other lives."""
    false_checksums: float = 0.0
    """Share of the liars' answers about checksums that are false, or never come."""
    given_out: bool = False
    """True if servers give out the blocks of their pools. Each engine takes all of its own when its life begins."""
    trespasses_per_s: float = 0.0
    """Rate of calls in which a stranger names what is not its own, per second; see `strangers`."""
    rate_per_s: float = 5.0
    """Rate of requests, per second."""
    left_out: frozenset[int] = frozenset()
    """Requests that are not made, by number."""
    ring: int = 0
    """Number of requests of a ring, which replace all others: each is for an engine and the next one; see `rings`."""

    def describe(self) -> str:
        """Returns the setup as text for people."""
        if self.ring:
            return f"{self.engines} engines in a ring, of {self.blocks} blocks, {self.ring} requests at once"
        moves = "the source" if self.writers else "the destination"
        tight = ", tight limits" if self.limits.transfers == TIGHT.transfers else ""
        tight += ", checksums" if self.checksums else ""
        tight += ", aliased groups" if self.aliased else ""
        tight += f", engines of {', '.join(map(str, self.unlike))} ranks" if self.unlike else ""
        tight += f" in {', '.join(map(str, self.stages))} stages" if self.stages else ""
        tight += f", {self.hoarders} engines cannot set blocks aside" if self.hoarders else ""
        tight += f", {self.mirrored} engines have mirrors" if self.mirrored else ""
        tight += f", {self.collective} engines send when they are asked to" if self.collective else ""
        tight += ", servers give blocks out" if self.given_out else ""
        tight += f", a stranger calls {self.trespasses_per_s:g} times a second" if self.trespasses_per_s else ""
        if self.liars:
            tight += f", {self.liars} of them lies with {self.lies:.0%} of its messages"
        return (
            f"{self.engines} engines of {self.ranks} ranks and {self.blocks} blocks, {self.rate_per_s:g} requests a "
            f"second, {moves} of a push moves the bytes{tight}"
        )


def drawn(  # noqa: PLR0913 - each by name, and off
    seed: int, steps: int, *, liars: bool = False, unlike: bool = False, mirrors: bool = False,
    collective: bool = False, strangers: bool = False, rings: bool = False,
) -> Setup:  # fmt: skip
    """Returns the world of a seed. Each option but `rings` changes the same world. With `liars` one lead lies to the
    others. With `unlike` engines have other numbers of ranks. With `mirrors` no data path reaches the memory of some
    engines. With `collective` bytes move between all engines, or all but one, only if the ranks of both act. With
    `strangers` there is a caller without a ticket. `rings` gives another world, whose engines prefill for each other
    with too few blocks.
    """
    if rings:
        return _ring(seed, steps)
    setup = _honest(seed, steps)
    if unlike:
        setup = _split(setup, seed)
    elif liars:
        setup = _with_liar(setup, seed)
    if mirrors:
        setup = _mirrored(setup, Random(f"{seed}/mirrors"))  # noqa: S311 - a simulation, no secrets
    if collective:
        setup = _collective(setup, Random(f"{seed}/collective"))  # noqa: S311 - likewise
    return _visited(setup, Random(f"{seed}/strangers")) if strangers else setup  # noqa: S311 - likewise


def _ring(seed: int, steps: int) -> Setup:
    rng = Random(f"{seed}/ring")  # noqa: S311 - a simulation, no secrets
    engines, cell_s = rng.choice((2, 2, 3, 4)), rng.choice((QUICK_S, QUICK_S, SLOW_S))
    habits, blocks = TrafficHabits(turns=rng.choice((0.0, 0.5))), rng.choice((12, 16, 24))
    faults, aliased, ring = Faults(cell_s=cell_s), rng.random() < ALIASED, engines * rng.choice((6, 10))
    return Setup(seed, steps, engines=engines, blocks=blocks, habits=habits, faults=faults, aliased=aliased, ring=ring)


def _mirrored(setup: Setup, rng: Random) -> Setup:
    """Returns the same world, in which some engines have mirrors."""
    return replace(setup, mirrored=rng.randint(1, setup.engines))


def _collective(setup: Setup, rng: Random) -> Setup:
    """Returns the same world, in which ranks of all engines, or of all but one, move bytes only if both act."""
    return replace(setup, collective=max(setup.engines - rng.choice((0, 0, 0, 1)), 2))


def _visited(setup: Setup, rng: Random) -> Setup:
    """Returns the same world, with a stranger. A server gives a block to one group only, so it gives out no aliased
    blocks.
    """
    given_out = rng.random() < GIVEN_OUT and not setup.aliased
    return replace(setup, given_out=given_out, trespasses_per_s=rng.choice(TRESPASSES_PER_S))


def _split(setup: Setup, seed: int) -> Setup:
    """Returns the same world, whose engines have other numbers of ranks, and in some worlds stages."""
    split = _unlike(setup, Random(f"{seed}/unlike"))  # noqa: S311 - a simulation, no secrets
    rng = Random(f"{seed}/stages")  # noqa: S311 - a simulation, no secrets
    return _staged(split, rng) if rng.random() < STAGED else split


def _with_liar(setup: Setup, seed: int) -> Setup:
    """Returns the same world, in which one lead lies, in some worlds about one thing."""
    setup = _lying(setup, Random(f"{seed}/liars"))  # noqa: S311 - a simulation, no secrets
    about = Random(f"{seed}/other lives").random()  # noqa: S311 - a simulation, no secrets
    if about < FOCUSED:
        return _focused(setup)
    return _summed(setup) if about < FOCUSED + SUMMED else setup


def _lying(setup: Setup, rng: Random) -> Setup:
    """Returns the same world with a liar, and at least two others. Half of these worlds have no other trouble, so that
    more of the lies are heard.
    """
    if rng.random() < CALM:
        setup = replace(setup, faults=Faults(cell_s=setup.faults.cell_s), mishaps=Mishaps(), rate_per_s=CALM_RATE_PER_S)
    return replace(
        setup,
        engines=max(setup.engines, HONEST_AND_ONE),
        liars=1,
        lies=rng.choice(LIES),
        inventions_per_s=rng.choice(INVENTIONS_PER_S),
    )


def _focused(setup: Setup) -> Setup:
    """Returns the same world, in which everything is pushed, and every source writes."""
    faults, habits = replace(setup.faults, corrupt=0.0), replace(setup.habits, pushes=1.0)
    return replace(
        setup, faults=faults, habits=habits, writers=WRITES, checksums=False, hoarders=0, other_lives=OTHER_LIVES
    )


def _summed(setup: Setup) -> Setup:
    """Returns the same world, in which what arrives is compared with its source."""
    return replace(
        setup, checksums=True, faults=replace(setup.faults, corrupt=CORRUPT), false_checksums=FALSE_CHECKSUMS
    )


def _honest(seed: int, steps: int) -> Setup:
    setup = _drawn(seed, steps)
    rng = Random(f"{seed}/hang-ups")  # noqa: S311 - a simulation, no secrets
    setup = replace(setup, habits=replace(setup.habits, hang_ups=rng.choice(HANG_UPS)))
    if Random(f"{seed}/checksums").random() < COMPARED:  # noqa: S311 - a simulation, no secrets
        setup = replace(setup, checksums=True, faults=replace(setup.faults, corrupt=CORRUPT))
    rng = Random(f"{seed}/quarantine")  # noqa: S311 - a simulation, no secrets
    setup = _impatient(setup, rng) if rng.random() < IMPATIENT else setup
    return replace(setup, aliased=Random(f"{seed}/aliased").random() < ALIASED)  # noqa: S311 - a simulation, no secrets


def _unlike(setup: Setup, rng: Random) -> Setup:
    """Returns the same world, without checksums and aliasing, whose engines split heads over other numbers of ranks."""
    ranks = tuple(rng.choice(RANKS) for _ in range(setup.engines))
    head_dim, faults = rng.choice(HEAD_DIMS), replace(setup.faults, corrupt=0.0)
    # Whole cells move at once, also for each of several pairs.
    limits = replace(setup.limits, in_flight_bytes=setup.limits.in_flight_bytes * max(RANKS) * cell_bytes(head_dim))
    plain = replace(setup, checksums=False, aliased=False)
    return replace(plain, unlike=ranks, ranks=max(ranks), head_dim=head_dim, faults=faults, limits=limits)


def _staged(setup: Setup, rng: Random) -> Setup:
    """Returns the same world, in which some engines have two stages of one or two ranks each. The pairs of their ranks
    move unequal shares, which no limit on bytes in flight cuts into whole cells, so the limit is left out.
    """
    stages = tuple(rng.choice((1, 2)) for _ in setup.unlike)
    ranks = tuple(min(count, 2) * some if some > 1 else count for count, some in zip(setup.unlike, stages, strict=True))
    limits = replace(setup.limits, in_flight_bytes=Limits().in_flight_bytes)
    return replace(setup, unlike=ranks, ranks=max(ranks), stages=stages, limits=limits)


def _impatient(setup: Setup, rng: Random) -> Setup:
    """Returns the same world, whose leads re-key by themselves."""
    limits = replace(
        setup.limits,
        quarantine_share=rng.choice(BUDGETS),
        peer_grace_s=rng.choice(GRACES_S),
        rekey_interval_s=rng.choice(INTERVALS_S),
    )
    return replace(setup, limits=limits, hoarders=rng.choice((0, 0, 1, setup.engines)))


def _drawn(seed: int, steps: int) -> Setup:
    rng = Random(f"{seed}/setup")  # noqa: S311 - a simulation, no secrets
    setup = Setup(
        seed,
        steps,
        engines=rng.choice((2, 3, 3, 4, 5)),
        ranks=rng.choice((1, 1, 2, 3)),
        blocks=rng.choice((16, 24, 24, 48)),
        habits=TrafficHabits(
            pushes=rng.choice((0.0, 0.5, 1.0)),
            meddling=rng.choice((0.05, 0.2, 0.4)),
            mistakes=rng.choice((0.0, 0.05)),
            turns=rng.choice((0.0, 0.3)),
        ),
        writers=rng.choice((frozenset(), WRITES)),
        rate_per_s=rng.choice((2.0, 5.0, 10.0)),
    )
    if setup.writers and not setup.habits.pushes:
        setup = replace(setup, habits=replace(setup.habits, pushes=0.5))  # otherwise no source would write
    cell_s = rng.choice((QUICK_S, QUICK_S, SLOW_S))
    weather = rng.randrange(8)
    if weather == 0:
        return setup
    if weather < 5:
        return replace(setup, faults=replace(ROUGH, cell_s=cell_s), mishaps=UNLUCKY)
    if weather == 5:
        return replace(setup, faults=replace(ROUGH, cell_s=cell_s), mishaps=DOOMED)
    return replace(setup, faults=replace(STORMY, cell_s=cell_s), mishaps=DOOMED, limits=TIGHT)
