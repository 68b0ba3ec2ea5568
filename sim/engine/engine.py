"""A model of an engine: computes KV into its blocks, hands them over, pulls, and recycles blocks as early as it may.

It trusts what its lead tells it, and nothing else. So it detects a lead that returns a block too early, or that offers
KV other than the one asked for.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from kvgrpc.core.actions import (
    Allocated,
    BlocksReturnedNews,
    Cancelled,
    EngineNews,
    FailedNews,
    HandedOver,
    LayersReceivedNews,
    PartsReturnedNews,
    ReceivedNews,
)
from kvgrpc.core.events import AllocateBlocks, Call, CancelScope, CancelTransfer, FinishedBlocks, PushSource
from kvgrpc.core.node import TOMBSTONED
from kvgrpc.core.tables.transfers import Direction, State
from kvgrpc.core.values import grants
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.ids import mint_lease_id
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits, granted_ttl
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import KVGrpcError
from sim.engine.fetches import EngineFetches
from sim.engine.jobs import EngineHandOver, EngineLead, content_of
from sim.engine.pushes import AGAIN_S, EnginePushes
from sim.engine.requests import PartPlan, PromptOffer, PromptWish
from sim.engine.worker import Worker
from sim.rules import Rule, broken
from sim.world.memory import Memory
from sim.world.network import Result

REPLACE = 0.3
"""Probability that a preempted push hands over other blocks before it takes the first ones back."""
START_OVER = 0.7
"""Probability that a push whose blocks were taken back starts over."""
TOMBSTONES_SURE = 1_000
"""Number of tombstones below which a cancelled key may be forgotten for newer ones."""


class Engine:
    """One life of an engine."""

    def __init__(
        self, lead: EngineLead, description: EngineDescription, secret: bytes, memories: list[Memory], limits: Limits
    ) -> None:
        self._lead = lead
        self._description = description
        self._secret = secret
        self._limits = limits
        plant = self._plant = Worker(lead, description, memories)
        self._minted = 0
        self._offers: dict[str, EngineHandOver] = {}
        """Hand-overs, by transfer."""
        self._pushes = EnginePushes(plant, self._offers)
        self._fetches = EngineFetches(plant)

    @property
    def refused(self) -> Counter[str]:
        """Number of refused calls, by reason."""
        return self._plant.refused

    def begin(self) -> None:
        """Takes all blocks of a SERVER_MANAGED pool. The engine then gives them to its requests itself."""
        if self._description.pool_kind is PoolKind.ENGINE_MANAGED:
            return
        counts = tuple((i, group.blocks) for i, group in enumerate(self._description.pool.groups))

        def give(result: Result) -> None:
            if not isinstance(result, Allocated):
                broken(Rule.R5, f"an engine gets no blocks: {result}")

        self._lead.call(lambda call: AllocateBlocks(call, counts, no_expiry=True), ENGINE, give)

    def offer(self, offer: PromptOffer) -> bytes | None:
        """Computes a prompt and hands it over. Returns the grant, or None without room. Equal prompts share their
        blocks, also with a request that was received.
        """
        blocks = self._plant.blocks
        whole = (known for known in self._offers.values() if not known.taken_back)
        shared = next((known for known in whole if known.prompt == offer.prompt), None)
        received = self._fetches.shares(offer.prompt)
        if shared is not None:
            made = EngineHandOver(offer.prompt, blocks.share(shared.blocks), "", shared.step)
        elif received is not None:
            made = EngineHandOver(offer.prompt, blocks.share(received), "", 0)
        else:
            taken = self._plant.take(len(offer.prompt.tokens), offer.by, in_line=offer.in_line)
            if taken is None:
                return None
            made = EngineHandOver(offer.prompt, taken, "", self._plant.compute(taken, offer))
        self._minted += 1
        made.lease_id = mint_lease_id(self._secret, self._description.incarnation, "engine", self._minted)
        token = self._mint(offer, made)
        self._lead.later(offer.announce_after_s, lambda: self._announce(offer, made, token))
        return token

    def compute(self, offer: PromptOffer, for_s: float) -> bool:
        """Computes a prompt by itself, and uses it for `for_s` seconds. Returns False without room."""
        taken = self._plant.take(len(offer.prompt.tokens), offer.by, in_line=offer.in_line)
        if taken is None:
            return False
        self._plant.compute(taken, offer)
        self._lead.later(for_s, lambda: self._free(taken))
        return True

    def _free(self, blocks: Blocks) -> None:
        self._plant.free(blocks)

    def pull(self, wish: PromptWish, token: bytes, ended: Callable[[FailedNews | None], None]) -> None:
        """Pulls with a grant. `ended` gets the failure, or None for success; it is never called for a refused call."""
        self._fetches.pull(wish, token, ended)

    def push(self, offer: PromptOffer, plans: Sequence[PartPlan]) -> None:
        """Computes a prompt and hands it over to be pushed, part by part."""
        self._pushes.start(offer, plans)

    def reserve(
        self, wish: PromptWish, key: bytes, source: PushSource | None, relay: Callable[[bytes], None],
        ended: Callable[[FailedNews | None], None],
    ) -> None:  # fmt: skip
        """Reserves blocks for a push. `relay` gets the grant; `ended` is as for `pull`."""
        self._fetches.reserve(wish, key, source, relay, ended)

    def cancel(self, key: bytes, scope: CancelScope) -> None:
        """Cancels by transfer key."""

        def give(result: Result) -> None:
            if not isinstance(result, Cancelled):
                return
            for transfer in result.transfers:
                if not transfer.over:
                    broken(Rule.R5, f"{transfer.id} was cancelled and goes on", transfer.id)
                half = transfer.failure is not None and transfer.failure.phase == "rendezvous"
                if half and transfer.direction is Direction.SEND and transfer.state is State.CANCELLED:
                    self._plant.half_cancelled(key, self._limits.registration_timeout_s)
            if result.outcome == TOMBSTONED:
                sure = self._limits.tombstones >= TOMBSTONES_SURE
                self._plant.cancelled(key, self._limits.registration_timeout_s if sure else 0.0)

        self._lead.call(lambda call: CancelTransfer(call, key=key, scope=scope), ENGINE, give)

    def preempt(self, number: int) -> None:
        """Takes the blocks of one of its hand-overs back at once. A push may then start over."""
        offers = [made for made in self._offers.values() if not made.taken_back and not made.asking]
        if not offers:
            return
        made = offers[number % len(offers)]
        rng = self._plant.rng
        if made.start_over is not None and rng.random() < REPLACE:
            made.start_over()
            return
        if made.handed:
            self._plant.take_back(made.lease_id)
            self._lead.void(made.lease_id)
        made.taken_back = True
        made.handed = False
        self._plant.free(made.blocks)
        if made.start_over is not None and rng.random() < START_OVER:
            self._lead.later(rng.expovariate(20.0), made.start_over)

    def void_known(self, lease_id: str) -> None:
        """Takes note that the lead knows that the blocks of a lease were taken back."""
        self._plant.void_known(lease_id)

    def told(self, news: EngineNews) -> None:
        """Takes the lead's news."""
        if isinstance(news, ReceivedNews):
            self._fetches.received(news)
        elif isinstance(news, FailedNews) and self._fetches.knows(news.transfer_id):
            self._fetches.failed(news)
        elif isinstance(news, FailedNews) and news.transfer_id in self._offers:
            self._offers[news.transfer_id].over = True
        elif isinstance(news, BlocksReturnedNews):
            self._returned(news)
        elif isinstance(news, PartsReturnedNews):
            self._plant.returned(news.lease_id)
        elif isinstance(news, LayersReceivedNews):
            self._fetches.layers(news)

    def uses(self, group: int, block: int) -> bool:
        """Returns True if the engine uses a block."""
        return self._plant.blocks.in_use(group, block)

    def check_idle(self) -> None:
        """Checks that everything came back."""
        if self._offers:
            broken(Rule.END, "hand-overs were never returned", *self._offers)
        self._fetches.check_idle()
        self._plant.check_idle()

    def _mint(self, offer: PromptOffer, made: EngineHandOver) -> bytes:
        me = self._description
        claims = grants.Claims(
            grants.AccessKind.READ,
            me.engine_id,
            me.incarnation,
            me.address,
            made.lease_id,
            offer.key,
            granted_ttl(offer.ttl_s, self._limits),
            sum(len(ids) for ids in made.blocks),
            len(offer.prompt.tokens),
            offer.on_abort,
            request_time_us=offer.request_time_us,
        )
        return grants.mint(claims, grants.signing_key(self._secret))

    def _announce(self, offer: PromptOffer, made: EngineHandOver, token: bytes) -> None:
        """Calls FinishedBlocks, twice under the same idempotency key, which must change nothing."""

        def ask(call: Call) -> FinishedBlocks:
            return FinishedBlocks(
                call,
                offer.key,
                tuple(enumerate(made.blocks)),
                content_of(offer.prompt),
                ttl_s=offer.ttl_s,
                consumers=offer.consumers,
                on_abort=offer.on_abort,
                request_id=offer.request_id,
                after_step=made.step,
                priority=offer.priority,
                lease_id=made.lease_id,
                firm_ttl_s=offer.firm_ttl_s,
                request_time_us=offer.request_time_us,
                findable=True,
            )

        key = {"key": made.lease_id, "method": "FinishedBlocks"}

        def give(result: Result) -> None:
            if isinstance(result, KVGrpcError):
                self._plant.was_refused(result, offer.key)
                self._plant.free(made.blocks)
                return
            assert isinstance(result, HandedOver)
            assert result.transfer is not None
            if result.token != token:
                broken(Rule.R10, "lead and engine mint different grants", made.lease_id)
            self._offers[result.transfer.id] = made
            made.handed = True
            self._plant.lend(made.lease_id, made.blocks)
            self._lead.soon(lambda: self._lead.call(ask, ENGINE, lambda again: give_again(result, again), **key))

        def give_again(first: Result, result: Result) -> None:
            if result is not first:
                broken(Rule.R10, "the same idempotency key got another answer", made.lease_id)

        self._lead.call(ask, ENGINE, give, **key)

    def _returned(self, news: BlocksReturnedNews) -> None:
        made = self._offers.get(news.transfer_id)
        if made is not None and made.asking:
            # The answers to earlier calls come first: they may be about the same blocks.
            self._lead.later(AGAIN_S, lambda: self._returned(news))
            return
        self._plant.returned(news.lease_id)
        self._fetches.returned(news)
        if made is None:
            return
        del self._offers[news.transfer_id]
        made.over = True
        if not (made.handed or made.taken_back):
            made.taken_back = True
            self._plant.free(made.blocks)
