"""A seeded workload: requests of all shapes, one after another. Each has a `Story`."""

from dataclasses import dataclass, field, fields

from sim.hosts.world import World
from sim.seeds.story import Counts, PromptLibrary, Story


@dataclass(frozen=True)
class TrafficHabits:
    """Probabilities of what schedulers and routers do, per request, or per engine of a request."""

    pushes: float = 0.0
    """A request is pushed instead of pulled."""
    meddling: float = 0.1
    """A router or engine cancels, preempts, renews or releases in the middle."""
    mistakes: float = 0.0
    """A grant is sent twice, swapped with another, sent to the wrong place, long after its time, or damaged."""
    turns: float = 0.0
    """A next turn follows: what D received is handed over there, and pulled back."""
    hang_ups: float = 0.0
    """The client leaves after the hand-over: nobody comes, and nobody says so."""

    def without(self, kind: str) -> "TrafficHabits":
        """Returns the habits without that kind."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return TrafficHabits(**values | {kind: 0.0})


KINDS = tuple(field.name for field in fields(TrafficHabits))
"""Names of the habits."""


@dataclass
class Traffic:
    """All requests of a world. Each draws from its own source, so that leaving one out changes no other."""

    world: World
    meddling: float = 0.1
    pushes: float = 0.0
    mistakes: float = 0.0
    turns: float = 0.0
    hang_ups: float = 0.0
    left_out: frozenset[int] = frozenset()
    """Requests that are not made, by number."""
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._rng = self.world.rng("traffic")
        self._library = PromptLibrary(self.world.rng("library"))
        self._habits = TrafficHabits(self.pushes, self.meddling, self.mistakes, self.turns, self.hang_ups)
        self.made = 0
        """Number of requests so far, including those that were left out."""

    @property
    def received(self) -> int:
        """Number of pulls that brought their KV."""
        return self.counts.received

    @property
    def pushed(self) -> int:
        """Number of pushes that brought their KV."""
        return self.counts.pushed

    @property
    def given_up(self) -> int:
        """Number of pulls and pushes that failed for good."""
        return self.counts.given_up

    def requests(self, count: int, over_s: float) -> None:
        """Puts `count` requests on the agenda, spread over the next `over_s` seconds."""
        for _ in range(count):
            self.world.agenda.after(self._rng.uniform(0, over_s), self._request)

    def keep_on(self, rate_per_s: float) -> None:
        """Lets requests come at that rate until the world closes."""

        def next_one() -> None:
            if not self.world.closing:
                self._request()
                self.keep_on(rate_per_s)

        self.world.agenda.after(self._rng.expovariate(rate_per_s), next_one)

    def _request(self) -> None:
        self.made += 1
        if self.made not in self.left_out:
            Story(self.world, self.made, self._habits, self._library, self.counts).begin()
