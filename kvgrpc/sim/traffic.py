"""A seeded workload: a router that sends requests through pairs of engines, cancels some, and retries others."""

from collections.abc import Callable
from random import Random

from kvgrpc.core.actions import Failed
from kvgrpc.core.grants import OnAbort
from kvgrpc.core.transfers import Next
from kvgrpc.sim.host import Host
from kvgrpc.sim.memory import Prompt
from kvgrpc.sim.requests import Offer, Wish
from kvgrpc.sim.world import World

RETRIES = 2
TTLS_S = (0.3, 2.0, 5.0, 30.0)


class Traffic:
    """Requests of all shapes. `seed` is the world's unless given."""

    def __init__(self, world: World, seed: int | None = None, cancels: float = 0.1) -> None:
        self._world = world
        self._rng = Random(f"{world.seed if seed is None else seed}/traffic")  # noqa: S311 - a simulation, no secrets
        self._cancels = cancels
        self._stems = [tuple(self._rng.randrange(1000) for _ in range(96)) for _ in range(3)]
        """Beginnings that prompts share."""
        self._count = 0
        self.received = 0
        self.given_up = 0

    def requests(self, count: int, over_s: float) -> None:
        """Puts `count` requests on the agenda, spread over the next `over_s` seconds."""
        for _ in range(count):
            self._world.agenda.after(self._rng.uniform(0, over_s), self._request)

    def _request(self) -> None:
        source, *others = self._rng.sample(self._world.hosts, 2)
        consumers = self._rng.choice((1, 1, 1, 2))
        self._count += 1
        offer = Offer(
            key=self._rng.randbytes(16),
            request_id=f"r{self._count}",
            prompt=self._prompt(),
            ttl_s=self._rng.choice(TTLS_S),
            consumers=consumers,
            on_abort=self._rng.choice(tuple(OnAbort)),
            announce_after_s=self._rng.choice((0.0, 0.0, 0.0, 0.01, 1.0)),
        )
        token = source.engine.offer(offer) if source.up else None
        if token is None:
            return
        for host in others:
            self._after(self._relay_s(), self._pull(host, offer, token, RETRIES))
        for host in (source, *others):
            if self._rng.random() < self._cancels:
                self._after(self._rng.expovariate(10.0), self._cancel(host, offer.key))

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

    def _cancel(self, host: Host, key: bytes) -> Callable[[], None]:
        def cancel() -> None:
            if host.up:
                host.engine.cancel(key)

        return cancel

    def _wish(self, offer: Offer) -> Wish:
        """Mostly the prompt on offer; else a longer or shorter one, or one that diverges from it somewhere."""
        tokens = offer.prompt.tokens
        use_tokens = 0
        kind = self._rng.randrange(8)
        if kind == 0:
            tokens = (*tokens, *self._tokens(20))
        elif kind == 1:
            tokens = tokens[: max(len(tokens) - 18, 1)]
        elif kind == 2:
            at = self._rng.randrange(len(tokens))
            tokens = (*tokens[:at], 1000, *tokens[at + 1 :])
            use_tokens = self._rng.choice((0, at - at % 16))
        return Wish(
            request_id=offer.request_id,
            prompt=Prompt(tokens, offer.prompt.salt if self._rng.randrange(20) else "other"),
            access_id=self._rng.randbytes(16),
            use_tokens=use_tokens,
            have_tokens=self._rng.choice((0, 0, 16, 32, 40)),
            all_local=self._rng.randrange(10) == 0,
            blocks_after_s=self._rng.choice((0.0, 0.0, 0.001, 0.5)),
        )

    def _prompt(self) -> Prompt:
        stem = self._rng.choice(self._stems)
        cut = self._rng.randrange(1, len(stem))
        tail = self._tokens(self._rng.choice((0, 1, 16, 40)))
        return Prompt((*stem[:cut], *tail), self._rng.choice(("", "", "salt")))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(1000) for _ in range(count))

    def _relay_s(self) -> float:
        return self._rng.expovariate(20.0)

    def _after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._world.agenda.after(delay_s, do)
