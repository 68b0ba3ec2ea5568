"""The course of one request: who hands over and who fetches, what is retried, and who interferes."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Protocol

from kvgrpc.core.actions import FailedNews
from kvgrpc.core.events import (
    CancelScope,
    ConnectPeer,
    Event,
    LeaseRef,
    PushSource,
    RegisterPush,
    ReleaseLease,
    RenewLeases,
)
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.errors import NextStep
from sim.engine.requests import PartPlan, PromptOffer, PromptWish
from sim.hosts.host import Host
from sim.hosts.world import World
from sim.world.memory import Prompt

RETRIES = 2
TTLS_S = (0.3, 2.0, 5.0, 30.0)
FIRM_TTLS_S = (None, 0.0, 0.1, 1.0)
TOKENS = 1000
"""Size of the vocabulary."""
PRIORITIES = (0, 0, -1, 7)
OLD_GRANTS = 16
"""Number of grants that a confused router still has."""
LATE_S = (5.0, 60.0)
"""Range of delays of a late grant, in seconds."""


class StoryHabits(Protocol):
    """Probabilities of actions; see `traffic.TrafficHabits`."""

    @property
    def pushes(self) -> float: ...

    @property
    def meddling(self) -> float: ...

    @property
    def mistakes(self) -> float: ...

    @property
    def turns(self) -> float: ...

    @property
    def hang_ups(self) -> float: ...


@dataclass
class Counts:
    """Number of requests by their end."""

    received: int = 0
    pushed: int = 0
    given_up: int = 0


class PromptLibrary:
    """Beginnings that prompts share, and grants that were given out."""

    def __init__(self, rng: Random) -> None:
        self.stems = [tokens(rng, 96) for _ in range(3)]
        self.grants: deque[bytes] = deque(maxlen=OLD_GRANTS)


def tokens(rng: Random, count: int) -> tuple[int, ...]:
    """Returns that many random tokens."""
    return tuple(rng.choices(range(TOKENS), k=count))


class Story:
    """One request, with everything that follows from it."""

    def __init__(self, world: World, number: int, habits: StoryHabits, library: PromptLibrary, counts: Counts) -> None:
        self._world = world
        self._number = number
        self._habits = habits
        self._library = library
        self._counts = counts
        self._rng = world.rng(f"request/{number}")

    def begin(self) -> None:
        """Starts the request."""
        if self._often(self._habits.pushes):
            self._push()
        else:
            source, consumers = self._cast()
            self._hand_over(source, consumers, self._prompt())

    # -- pulls

    def _hand_over(self, source: Host, consumers: list[Host], prompt: Prompt) -> None:
        if not source.ready:
            return
        rng = self._rng
        offer = replace(
            self._offer(prompt, consumers),
            ttl_s=rng.choice(TTLS_S),
            announce_after_s=rng.choice((0.0, 0.0, 0.0, 0.01, 1.0)),
        )
        token = source.engine.offer(offer)
        if token is None:
            return
        self._library.grants.append(token)
        if self._often(self._habits.hang_ups):
            consumers = []
        for host in consumers:
            self._after(self._relay_s(), self._pull(source, host, offer, self._relayed(token), RETRIES))
            if self._mistaken():
                self._after(self._relay_s(), self._pull(source, host, offer, token, 0))
        if self._mistaken():
            astray = rng.choice(self._world.hosts)
            self._after(self._relay_s(), self._pull(source, astray, offer, token, 0))
        for host in (source, *consumers):
            if self._often(self._habits.meddling):
                self._after(rng.expovariate(10.0), self._meddle(source, host, offer, token))

    def _pull(self, source: Host, host: Host, offer: PromptOffer, token: bytes, retries: int) -> Callable[[], None]:
        """Returns a pull by one consumer, which is retried while that may help."""
        wish = self._wish(offer)

        def ended(failed: FailedNews | None) -> None:
            if failed is None:
                self._counts.received += 1
                if self._often(self._habits.turns):
                    self._turn_back(source, host, wish)
            elif failed.failure.next is NextStep.RETRY_HERE and retries:
                self._after(self._relay_s(), self._pull(source, host, offer, token, retries - 1))
            else:
                self._counts.given_up += 1

        def start() -> None:
            if host.ready:
                host.engine.pull(wish, token, ended)

        return start

    def _turn_back(self, source: Host, host: Host, wish: PromptWish) -> None:
        """Makes the next turn: D hands over what it received, and P pulls it."""
        if not self._world.closing and source is not host:
            self._hand_over(host, [source], wish.prompt)

    def _relayed(self, token: bytes) -> bytes:
        """Returns the grant that a router relays: mostly the same; else another one, or a damaged one."""
        if not self._mistaken():
            return token
        if self._rng.randrange(2):
            return self._rng.choice(self._library.grants)
        at = self._rng.randrange(len(token))
        return token[:at] + bytes([token[at] ^ 1 << self._rng.randrange(8)]) + token[at + 1 :]

    # -- pushes

    def _push(self) -> None:
        """Pushes to one or two engines: reservations, registrations and parts come in any order."""
        rng = self._rng
        source, hosts = self._cast()
        offer = self._offer(self._prompt(), hosts)
        plans = self._plans(len(offer.prompt.tokens))
        if rng.randrange(20):
            self._after(self._relay_s(), lambda: source.engine.push(offer, plans) if source.ready else None)
        if self._often(self._habits.hang_ups):
            hosts = []
        for host in hosts:
            self._after(self._relay_s(), self._reserve(source, host, offer, RETRIES))
        for lead in (source, *hosts):
            if self._often(self._habits.meddling):
                self._after(rng.expovariate(10.0), self._meddle(source, lead, offer, b""))

    def _reserve(self, source: Host, host: Host, offer: PromptOffer, retries: int) -> Callable[[], None]:
        """Returns a reservation at one destination. After a failure another engine takes its place."""
        rng = self._rng
        wish = replace(self._wish(offer), prompt=offer.prompt if rng.randrange(10) else self._prompt())
        known = PushSource(source.address) if rng.randrange(2) else None

        def relay(token: bytes) -> None:
            self._library.grants.append(token)
            if known is None:
                self._after(self._relay_s(), self._register(source, self._relayed(token)))
            if self._mistaken():
                self._after(self._relay_s(), self._register(rng.choice(self._world.hosts), token))
            if self._mistaken():
                self._after(rng.uniform(*LATE_S), self._register(source, token))

        def ended(failed: FailedNews | None) -> None:
            self._counts.pushed += failed is None
            self._counts.given_up += failed is not None
            others = [other for other in self._world.hosts if other is not source]
            if failed is not None and retries:
                self._after(self._relay_s(), self._reserve(source, rng.choice(others), offer, retries - 1))

        def reserve() -> None:
            if host.ready:
                host.engine.reserve(wish, offer.key, known, relay, ended)

        return reserve

    def _register(self, source: Host, token: bytes) -> Callable[[], None]:
        ids = self._rng.randbytes(32)

        def register() -> None:
            if source.up:
                source.call(lambda call: RegisterPush(call, token, "", ids[:16], ids[16:]), "router", lambda _: None)

        return register

    def _plans(self, count: int) -> list[PartPlan]:
        """Returns the parts of a push: the whole prompt, chunks of it, or single layers. Sometimes the last one
        fails.
        """
        rng = self._rng
        cuts = [0, *sorted({rng.randrange(0, count, 32) for _ in range(rng.choice((0, 0, 1, 3)))} - {0}), count]
        ranges: list[LayerRange | None] = [None] if rng.randrange(3) else [(0, 1), (1, 1)]
        steps = [(first, end, layers) for first, end in pairwise(cuts) for layers in ranges]
        plans = [PartPlan(*step, after_s=rng.choice((0.0, 0.01, 0.1)), last=step is steps[-1]) for step in steps]
        if rng.randrange(10) == 0:
            plans[-1] = replace(plans[-1], failure="the simulator says so")
        return plans

    # -- both

    def _cast(self) -> tuple[Host, list[Host]]:
        """Returns a source, and one or two consumers."""
        hosts = self._world.hosts
        source, *consumers = self._rng.sample(hosts, min(len(hosts), self._rng.choice((2, 2, 3))))
        return source, consumers

    def _offer(self, prompt: Prompt, consumers: list[Host]) -> PromptOffer:
        rng = self._rng
        offer = PromptOffer(
            key=rng.randbytes(16),
            request_id=f"r{self._number}",
            prompt=prompt,
            consumers=rng.choice((1, len(consumers))),
            on_abort=rng.choice(tuple(OnAbort)),
            priority=rng.choice(PRIORITIES),
            in_step=rng.random() < 0.3,
            firm_ttl_s=rng.choice(FIRM_TTLS_S),
            request_time_us=self._world.wall_us,
        )
        self._world.offered[offer.key] = prompt
        return offer

    def _meddle(self, source: Host, host: Host, offer: PromptOffer, token: bytes) -> Callable[[], None]:
        """Returns an action that a router, a peer or an operator may take at any time."""
        number = self._rng.randrange(100)
        ref = LeaseRef(token=token)

        def routed(lead: Host, ask: Callable[..., Event]) -> None:
            if lead.up:
                lead.call(ask, "router", lambda _: None)

        deeds: list[Callable[[], None]] = [
            lambda: self._cancel(source, host, offer, token),
            lambda: source.engine.preempt(number) if source.ready else None,
            lambda: routed(source, lambda call: RenewLeases(call, (ref,), float(1 + number))),
            lambda: routed(source, lambda call: ReleaseLease(call, ref)),
            lambda: routed(host, lambda call: ConnectPeer(call, source.address)),
            lambda: self._operate(host),
        ]
        return self._rng.choice(deeds)

    def _cancel(self, source: Host, host: Host, offer: PromptOffer, token: bytes) -> None:
        """Cancels at one of the sides. A pull may be retried under the same key."""
        rng = self._rng
        if not host.ready:
            return
        host.engine.cancel(offer.key, rng.choice((CancelScope.BOTH, *CancelScope)))
        if token and rng.randrange(2):
            others = [other for other in self._world.hosts if other is not source]
            self._after(self._relay_s(), lambda: self._offer_again(source, rng.choice(others), offer))

    def _offer_again(self, source: Host, host: Host, offer: PromptOffer) -> None:
        again = source.engine.offer(offer) if source.ready and not self._world.closing else None
        if again is not None:
            self._after(self._relay_s(), self._pull(source, host, offer, again, 0))

    def _operate(self, host: Host) -> None:
        """Lets an operator demand memory back, preferably where some is in quarantine."""
        quarantined = (other for other in self._world.hosts if other.up and any(other.node.state.pool.pins.quarantined))
        chosen = next(quarantined, host)
        if chosen.up:
            chosen.release_quarantine()

    def _wish(self, offer: PromptOffer) -> PromptWish:
        """Returns a wish: mostly for the prompt on offer, else for a longer, shorter or diverging one."""
        rng = self._rng
        wanted = offer.prompt.tokens
        use_tokens = 0
        kind = rng.randrange(8)
        if kind == 0:
            wanted = (*wanted, *tokens(rng, 20))
        elif kind == 1:
            wanted = wanted[: max(len(wanted) - 18, 1)]
        elif kind == 2:
            at = rng.randrange(len(wanted))
            wanted = (*wanted[:at], TOKENS, *wanted[at + 1 :])
            use_tokens = rng.choice((0, at - at % 16))
        return PromptWish(
            request_id=offer.request_id,
            prompt=Prompt(wanted, offer.prompt.salt if rng.randrange(20) else "other"),
            access_id=rng.randbytes(16),
            use_tokens=use_tokens,
            have_tokens=rng.choice((0, 0, 16, 32, 40)),
            all_local=rng.randrange(10) == 0,
            blocks_after_s=rng.choice((0.0, 0.0, 0.001, 0.5)),
            priority=rng.choice(PRIORITIES),
            in_step=rng.random() < 0.3,
            request_time_us=offer.request_time_us,
        )

    def _prompt(self) -> Prompt:
        rng = self._rng
        stem = rng.choice(self._library.stems)
        tail = tokens(rng, rng.choice((0, 1, 16, 40)))
        return Prompt((*stem[: rng.randrange(1, len(stem))], *tail), rng.choice(("", "", "salt")))

    def _often(self, probability: float) -> bool:
        return probability > 0 and self._rng.random() < probability

    def _mistaken(self) -> bool:
        if not self._often(self._habits.mistakes):
            return False
        self._world.seen["mistake"] += 1
        return True

    def _relay_s(self) -> float:
        return self._rng.expovariate(20.0)

    def _after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._world.agenda.after(delay_s, do)
