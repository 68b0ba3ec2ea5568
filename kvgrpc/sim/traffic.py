"""A seeded workload: a router that sends requests through engines, cancels some, retries others, and meddles."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from kvgrpc.core.actions import Failed
from kvgrpc.core.events import (
    ConnectPeer,
    Event,
    LayerRange,
    LeaseRef,
    PushSource,
    RegisterPush,
    ReleaseLease,
    RenewLeases,
)
from kvgrpc.core.grants import OnAbort
from kvgrpc.core.transfers import Next
from kvgrpc.sim.host import Host
from kvgrpc.sim.memory import Prompt
from kvgrpc.sim.requests import Offer, PartPlan, Wish
from kvgrpc.sim.world import World

RETRIES = 2
TTLS_S = (0.3, 2.0, 5.0, 30.0)
TOKENS = 1000
"""Size of the vocabulary."""


class Traffic:
    """Requests of all shapes. `meddling` is how often somebody cancels, preempts, renews or releases in the middle,
    `pushes` how many requests are pushed instead of pulled.
    """

    def __init__(self, world: World, meddling: float = 0.1, pushes: float = 0.0) -> None:
        self._world = world
        self._pushes = pushes
        self._rng = world.rng("traffic")
        self._meddling = meddling
        self._stems = [self._tokens(96) for _ in range(3)]
        """Beginnings that prompts share."""
        self._count = 0
        self.received = 0
        """Pulls that brought their KV."""
        self.pushed = 0
        """Pushes that brought theirs."""
        self.given_up = 0
        """Pulls and pushes that failed for good."""

    def requests(self, count: int, over_s: float) -> None:
        """Puts `count` requests on the agenda, spread over the next `over_s` seconds."""
        for _ in range(count):
            self._world.agenda.after(self._rng.uniform(0, over_s), self._request)

    def _request(self) -> None:
        rng = self._rng
        if self._pushes and rng.random() < self._pushes:
            self._push()
            return
        source, *consumers = rng.sample(self._world.hosts, min(len(self._world.hosts), rng.choice((2, 2, 3))))
        self._count += 1
        offer = Offer(
            key=rng.randbytes(16),
            request_id=f"r{self._count}",
            prompt=self._prompt(),
            ttl_s=rng.choice(TTLS_S),
            consumers=rng.choice((1, len(consumers))),
            on_abort=rng.choice(tuple(OnAbort)),
            announce_after_s=rng.choice((0.0, 0.0, 0.0, 0.01, 1.0)),
            in_step=rng.random() < 0.3,
        )
        token = source.engine.offer(offer) if source.up else None
        if token is None:
            return
        for host in consumers:
            self._after(self._relay_s(), self._pull(host, offer, token, RETRIES))
        for host in (source, *consumers):
            if rng.random() < self._meddling:
                self._after(rng.expovariate(10.0), self._meddle(source, host, offer, token))

    def _push(self) -> None:
        """A push to one or two engines: reservations, registrations and parts in any order."""
        rng = self._rng
        source, *hosts = rng.sample(self._world.hosts, min(len(self._world.hosts), rng.choice((2, 2, 3))))
        self._count += 1
        offer = Offer(
            rng.randbytes(16),
            f"r{self._count}",
            self._prompt(),
            consumers=rng.choice((1, len(hosts))),
            on_abort=rng.choice(tuple(OnAbort)),
            in_step=rng.random() < 0.3,
        )
        plans = self._plans(len(offer.prompt.tokens))
        if rng.randrange(20):
            self._after(self._relay_s(), lambda: source.engine.push(offer, plans) if source.up else None)
        for host in hosts:
            self._after(self._relay_s(), self._reserve(source, host, offer, RETRIES))
        for lead in (source, *hosts):
            if rng.random() < self._meddling:
                self._after(rng.expovariate(10.0), self._meddle(source, lead, offer, b""))

    def _reserve(self, source: Host, host: Host, offer: Offer, retries: int) -> Callable[[], None]:
        """A reservation at one destination; after a failure another engine takes its place."""
        rng = self._rng
        wish = replace(self._wish(offer), prompt=offer.prompt if rng.randrange(10) else self._prompt())
        known = PushSource(source.address) if rng.randrange(2) else None

        def relay(token: bytes) -> None:
            if known is None:
                ids = rng.randbytes(32)
                self._after(self._relay_s(), lambda: self._register(source, token, ids))

        def ended(failed: Failed | None) -> None:
            self._push_ended(failed)
            others = [other for other in self._world.hosts if other is not source]
            if failed is not None and retries:
                self._after(self._relay_s(), self._reserve(source, rng.choice(others), offer, retries - 1))

        def reserve() -> None:
            if host.up:
                host.engine.reserve(wish, offer.key, known, relay, ended)

        return reserve

    def _register(self, source: Host, token: bytes, ids: bytes) -> None:
        if source.up:
            source.call(lambda call: RegisterPush(call, token, "", ids[:16], ids[16:]), "router", lambda _: None)

    def _push_ended(self, failed: Failed | None) -> None:
        self.pushed += failed is None
        self.given_up += failed is not None

    def _plans(self, tokens: int) -> list[PartPlan]:
        """The whole prompt, chunks of it, or layer by layer; now and then it fails in the middle."""
        rng = self._rng
        cuts = [0, *sorted({rng.randrange(0, tokens, 32) for _ in range(rng.choice((0, 0, 1, 3)))} - {0}), tokens]
        ranges: list[LayerRange | None] = [None] if rng.randrange(3) else [(0, 1), (1, 1)]
        steps = [(first, end, layers) for first, end in pairwise(cuts) for layers in ranges]
        plans = [PartPlan(*step, after_s=rng.choice((0.0, 0.01, 0.1)), last=step is steps[-1]) for step in steps]
        if rng.randrange(10) == 0:
            plans[-1] = replace(plans[-1], failure="the simulator says so")
        return plans

    def _pull(self, host: Host, offer: Offer, token: bytes, retries: int) -> Callable[[], None]:
        """A pull by one consumer, tried again while that may help."""

        def ended(failed: Failed | None) -> None:
            if failed is None:
                self.received += 1
            elif failed.failure.next is Next.RETRY_HERE and retries:
                self._after(self._relay_s(), self._pull(host, offer, token, retries - 1))
            else:
                self.given_up += 1

        def start() -> None:
            if host.up:
                host.engine.pull(self._wish(offer), token, ended)

        return start

    def _meddle(self, source: Host, host: Host, offer: Offer, token: bytes) -> Callable[[], None]:
        """Something that a router, a peer or an operator may do at any time."""
        number = self._rng.randrange(100)
        ref = LeaseRef(token=token)

        def routed(lead: Host, ask: Callable[..., Event]) -> None:
            if lead.up:
                lead.call(ask, "router", lambda _: None)

        deeds: list[Callable[[], None]] = [
            lambda: host.engine.cancel(offer.key) if host.up else None,
            lambda: source.engine.preempt(number) if source.up else None,
            lambda: routed(source, lambda call: RenewLeases(call, (ref,), float(1 + number))),
            lambda: routed(source, lambda call: ReleaseLease(call, ref)),
            lambda: routed(host, lambda call: ConnectPeer(call, source.address)),
        ]
        return self._rng.choice(deeds)

    def _wish(self, offer: Offer) -> Wish:
        """Mostly the prompt on offer; else a longer or shorter one, or one that diverges from it somewhere."""
        rng = self._rng
        tokens = offer.prompt.tokens
        use_tokens = 0
        kind = rng.randrange(8)
        if kind == 0:
            tokens = (*tokens, *self._tokens(20))
        elif kind == 1:
            tokens = tokens[: max(len(tokens) - 18, 1)]
        elif kind == 2:
            at = rng.randrange(len(tokens))
            tokens = (*tokens[:at], TOKENS, *tokens[at + 1 :])
            use_tokens = rng.choice((0, at - at % 16))
        return Wish(
            request_id=offer.request_id,
            prompt=Prompt(tokens, offer.prompt.salt if rng.randrange(20) else "other"),
            access_id=rng.randbytes(16),
            use_tokens=use_tokens,
            have_tokens=rng.choice((0, 0, 16, 32, 40)),
            all_local=rng.randrange(10) == 0,
            blocks_after_s=rng.choice((0.0, 0.0, 0.001, 0.5)),
            in_step=rng.random() < 0.2,
        )

    def _prompt(self) -> Prompt:
        stem = self._rng.choice(self._stems)
        tail = self._tokens(self._rng.choice((0, 1, 16, 40)))
        return Prompt((*stem[: self._rng.randrange(1, len(stem))], *tail), self._rng.choice(("", "", "salt")))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(TOKENS) for _ in range(count))

    def _relay_s(self) -> float:
        return self._rng.expovariate(20.0)

    def _after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._world.agenda.after(delay_s, do)
