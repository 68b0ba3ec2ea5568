"""Engines that wait for each other: each prefills for the next one in a ring, all at once, with small pools.

Every request gets an answer: its KV arrives, or is computed where it is needed. Blocks go to the oldest request in
line. The oldest request of all goes on within a bounded time, whoever waits for whom (R13).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvgrpc.core.actions import FailedNews
from sim.engine.requests import PromptOffer, PromptWish
from sim.hosts.host import Host
from sim.hosts.world import World
from sim.rules import Rule, broken
from sim.seeds.story import tokens
from sim.world.memory import Prompt

OLDEST_S = 30.0
"""Maximum time for which one request may be the oldest of all, in seconds: some firm times, and the computing of those
before it in line.
"""
LOOK_S = 0.5
AGAIN_S = 0.1
USE_S = 0.05
RELAY_S = 0.01


@dataclass
class Ring:
    """The requests of a world."""

    world: World
    requests: int
    turns: float
    """Share of requests with a next turn: the received KV is offered back, and pulled where the first turn was
    prefilled.
    """
    made: int = 0
    _waiting: dict[int, float] = field(default_factory=dict)
    """Unanswered requests by number, with the time since when each is the oldest of all, or will be."""

    def begin(self) -> None:
        """Starts all requests within a moment."""
        for number in range(self.requests):
            _Request(self, number, self.world.rng(f"ring/{number}")).begin()
        self.world.agenda.after(LOOK_S, self._look)

    def came(self, number: int) -> None:
        """Takes note of a request, or of the next turn of one."""
        self.made += 1
        self._waiting[number] = self.world.agenda.now

    def answered(self, number: int) -> None:
        """Takes note of a request's answer. The next request is the oldest from now on."""
        del self._waiting[number]
        now = self.world.agenda.now
        self._waiting = {other: max(since, now) if other > number else since for other, since in self._waiting.items()}

    @property
    def done(self) -> bool:
        """True once all requests have their answers."""
        return not self._waiting

    def _look(self) -> None:
        if not self._waiting:
            return
        oldest = min(self._waiting)
        if self.world.agenda.now - self._waiting[oldest] > OLDEST_S:
            broken(Rule.R13, f"request {oldest} is the oldest of {len(self._waiting)} that wait, and does not go on")
        self.world.agenda.after(LOOK_S, self._look)


class _Request:
    """One request. A lower number is an older request."""

    def __init__(self, ring: Ring, number: int, rng: Random) -> None:
        hosts = ring.world.hosts
        self._ring, self._number, self._rng = ring, number, rng
        self._source, self._destination = hosts[number % len(hosts)], hosts[(number + 1) % len(hosts)]
        self._prompt = Prompt(tokens(rng, rng.choice((48, 64, 96))))
        self._time_us = 0

    def begin(self) -> None:
        self._ring.came(self._number)
        self._after(self._number * 1e-3, self._prefill)

    def _prefill(self) -> None:
        self._time_us = self._ring.world.wall_us
        self._again(lambda: self._hand_over(self._source, self._destination, None))

    def _hand_over(self, source: Host, to: Host, firm_ttl_s: float | None) -> bool:
        offer = self._offer(firm_ttl_s)
        self._ring.world.offered[offer.key] = self._prompt
        token = source.engine.offer(offer)
        if token is None:
            return False
        self._after(RELAY_S, lambda: to.engine.pull(self._wish(), token, lambda failed: self._came(to, failed)))
        return True

    def _came(self, host: Host, failed: FailedNews | None) -> None:
        if failed is not None:
            self._again(lambda: self._compute(host))
            return
        self._answered(host)

    def _compute(self, host: Host) -> bool:
        if not host.engine.compute(self._offer(None), USE_S):
            return False
        self._answered(host)
        return True

    def _answered(self, host: Host) -> None:
        ring = self._ring
        ring.answered(self._number)
        if host is self._destination and self._rng.random() < ring.turns:
            self._number += ring.requests
            self._time_us = ring.world.wall_us
            ring.came(self._number)
            if not self._hand_over(self._destination, self._source, 0.0):
                self._again(lambda: self._compute(self._source))

    def _offer(self, firm_ttl_s: float | None) -> PromptOffer:
        """Returns an offer. A firm time of 0 is for the next turn, whose KV is already here."""
        key, in_line = self._rng.randbytes(16), firm_ttl_s is None
        return PromptOffer(
            key, self._name, self._prompt, 600.0, firm_ttl_s, request_time_us=self._time_us, in_line=in_line
        )

    def _wish(self) -> PromptWish:
        key, time_us = self._rng.randbytes(16), self._time_us
        return PromptWish(self._name, self._prompt, key, blocks_after_s=AGAIN_S, request_time_us=time_us, in_line=True)

    @property
    def _name(self) -> str:
        return f"ring-{self._number}"

    def _again(self, do: Callable[[], bool]) -> None:
        """Repeats `do` until it succeeds."""
        if not do():
            self._after(AGAIN_S, lambda: self._again(do))

    def _after(self, delay_s: float, do: Callable[[], None]) -> None:
        self._ring.world.agenda.after(delay_s, do)
