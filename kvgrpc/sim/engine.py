"""A modelled engine: computes KV into its blocks, hands them over, pulls, and recycles blocks the moment it may.

It trusts what its lead tells it, and nothing else, so a lead that returns a block too early, or offers KV that is not
the one asked for, is found out here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from kvgrpc.core import grants
from kvgrpc.core.actions import (
    BlocksReturned,
    EngineNews,
    Failed,
    HandedOver,
    LayersReceived,
    PartsReturned,
    Pulling,
    Received,
    Reserved,
)
from kvgrpc.core.compatibility import EngineDescription
from kvgrpc.core.content import claim
from kvgrpc.core.events import (
    AcknowledgeTransfers,
    Call,
    CancelTransfer,
    Destination,
    FinishedBlocks,
    GiveDestination,
    PullBlocks,
    PushSource,
    ReserveBlocks,
)
from kvgrpc.core.ids import mint_lease_id
from kvgrpc.core.limits import Limits, granted_ttl
from kvgrpc.core.pins import Blocks
from kvgrpc.core.state import ENGINE
from kvgrpc.errors import KVGrpcError
from kvgrpc.sim.blocks import BlockManager
from kvgrpc.sim.jobs import Fetch, HandOver, Lead, content_of
from kvgrpc.sim.memory import Memory, Prompt
from kvgrpc.sim.network import Result
from kvgrpc.sim.pushes import Pushes
from kvgrpc.sim.requests import Offer, PartPlan, Wish
from kvgrpc.sim.steps import Steps, Work

USE_S = 0.05
"""How long an engine computes with blocks that it received before it frees them."""
ROOM_S = 0.1
"""How often it looks for room."""
REPLACE = 0.3
"""How often a push that is preempted hands other blocks over before it takes back the first ones."""
START_OVER = 0.7
"""How often one starts over whose blocks were taken back."""


class Engine:
    """One life of an engine."""

    def __init__(
        self, lead: Lead, description: EngineDescription, secret: bytes, memories: list[Memory], limits: Limits
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Calls that were refused, by reason."""
        self._lead = lead
        self._description = description
        self._secret = secret
        self._memories = memories
        self._limits = limits
        self._blocks = BlockManager(description.pool)
        # Seeded by what a life is named by, so that a life always takes the same steps.
        rng = self._rng = Random(description.incarnation)  # noqa: S311 - a simulation, no secrets
        self._steps = Steps(rng, description.world_size, lead.later, lead.handle)
        self._minted = 0
        self._offers: dict[str, HandOver] = {}
        """By their transfer."""
        self._pushes = Pushes(lead, self._blocks, self._offers, self.refused, self._compute, self._free)
        self._fetches: dict[str, Fetch] = {}
        """By their transfer."""

    def offer(self, offer: Offer) -> bytes | None:
        """Computes a prompt and hands it over; the grant, or None without room. Equal prompts share their blocks."""
        whole = (known for known in self._offers.values() if not known.taken_back)
        shared = next((known for known in whole if known.prompt == offer.prompt), None)
        if shared is not None:
            blocks, step = self._blocks.share(shared.blocks), shared.step
        else:
            taken = self._blocks.take(len(offer.prompt.tokens))
            if taken is None:
                return None
            blocks, step = taken, self._compute(taken, offer)
        self._minted += 1
        lease_id = mint_lease_id(self._secret, self._description.incarnation, "engine", self._minted)
        made = HandOver(offer.prompt, blocks, lease_id, step)
        token = self._mint(offer, made)
        self._lead.later(offer.announce_after_s, lambda: self._announce(offer, made, token))
        return token

    def pull(self, wish: Wish, token: bytes, ended: Callable[[Failed | None], None]) -> None:
        """Pulls with a grant. `ended` is told the failure, or None for success; never for a refused call."""
        claims = grants.read_claims(token)
        content = content_of(wish.prompt, claims.token_count)
        try:
            use_tokens = claim(content, claims.token_count, wish.use_tokens).tokens
        except KVGrpcError as error:
            self.refused[error.reason] += 1
            return
        fetch = Fetch(wish, use_tokens, min(wish.have_tokens, use_tokens), ended)
        destination, step = None, 0
        if wish.all_local:
            destination = Destination((), use_tokens)
        elif not wish.blocks_after_s and self._find_room(fetch):
            destination, step = self._destination(fetch)

        def ask(call: Call) -> PullBlocks:
            return PullBlocks(
                call,
                token,
                content,
                wish.access_id,
                wish.use_tokens,
                destination,
                request_id=wish.request_id,
                after_step=step,
            )

        self._lead.call(ask, ENGINE, lambda result: self._pulling(fetch, result))
        if destination is None:
            self._lead.later(wish.blocks_after_s or ROOM_S, lambda: self._give(fetch))

    def push(self, offer: Offer, plans: Sequence[PartPlan]) -> None:
        """Computes a prompt and hands it over to be pushed, part by part."""
        self._pushes.start(offer, plans)

    def reserve(
        self, wish: Wish, key: bytes, source: PushSource | None, relay: Callable[[bytes], None],
        ended: Callable[[Failed | None], None],
    ) -> None:  # fmt: skip
        """Reserves blocks for a push; `relay` is given the grant, `ended` is as for `pull`."""
        tokens = len(wish.prompt.tokens)
        fetch = Fetch(wish, tokens, min(wish.have_tokens, tokens), ended)
        if not self._find_room(fetch):
            return
        destination, step = self._destination(fetch)

        def ask(call: Call) -> ReserveBlocks:
            return ReserveBlocks(
                call, key, destination.blocks, content_of(wish.prompt), fetch.have_tokens, 0, source, wish.request_id,
                after_step=step,
            )  # fmt: skip

        def give(result: Result) -> None:
            self._pulling(fetch, result)
            if isinstance(result, Reserved):
                relay(result.token)

        self._lead.call(ask, ENGINE, give)

    def cancel(self, key: bytes) -> None:
        """Cancels by transfer key."""
        self._lead.call(lambda call: CancelTransfer(call, key=key), ENGINE, lambda _: None)

    def preempt(self, number: int) -> None:
        """Takes the blocks of one of its hand-overs back at once. A push may start over then."""
        offers = [made for made in self._offers.values() if not made.taken_back]
        if not offers:
            return
        made = offers[number % len(offers)]
        if made.start_over is not None and self._rng.random() < REPLACE:
            made.start_over()
            return
        made.taken_back = True
        made.handed = False
        self._lead.void(made.lease_id)
        self._free(made.blocks)
        if made.start_over is not None and self._rng.random() < START_OVER:
            self._lead.later(self._rng.expovariate(20.0), made.start_over)

    def told(self, news: EngineNews) -> None:
        """Something that the lead says."""
        if isinstance(news, Received):
            self._received(self._fetches.pop(news.transfer_id), news)
        elif isinstance(news, Failed) and news.transfer_id in self._fetches:
            fetch = self._fetches[news.transfer_id]
            assert not fetch.over, "it failed twice"
            fetch.over = True
            self._lead.soon(lambda: fetch.ended(news))
        elif isinstance(news, Failed) and news.transfer_id in self._offers:
            self._offers[news.transfer_id].over = True
        elif isinstance(news, BlocksReturned):
            self._pushes.returned(news.lease_id)
            self._returned(news.transfer_id)
        elif isinstance(news, PartsReturned):
            self._pushes.returned(news.lease_id)
        elif isinstance(news, LayersReceived):
            fetch = self._fetches[news.transfer_id]
            assert fetch.blocks is not None
            for memory in self._memories:
                memory.check_holds(fetch.blocks, fetch.wish.prompt, fetch.use_tokens, news.layers_done)

    def check_idle(self) -> None:
        """Asserts that everything came back."""
        assert not self._offers, "hand-overs were never returned"
        self._pushes.check_idle()
        assert not self._fetches, "pulls never ended"
        self._blocks.check_idle()

    def _compute(self, blocks: Blocks, offer: Offer) -> int:
        """Computes the KV of a prompt, now or in a step; the step's number, or 0."""
        if offer.in_step:
            return self._queue(blocks, lambda rank: self._memories[rank].compute(blocks, offer.prompt))
        for memory in self._memories:
            memory.compute(blocks, offer.prompt)
        return 0

    def _queue(self, blocks: Blocks, do: Callable[[int], None]) -> int:
        """Queues work on blocks, which are not reused before it is done; the step's number."""
        self._blocks.share(blocks)
        return self._steps.queue(Work(do, lambda: self._free(blocks)))

    def _mint(self, offer: Offer, made: HandOver) -> bytes:
        me = self._description
        claims = grants.Claims(
            grants.Access.READ,
            me.engine_id,
            me.incarnation,
            me.address,
            made.lease_id,
            offer.key,
            granted_ttl(offer.ttl_s, self._limits),
            sum(len(ids) for ids in made.blocks),
            len(offer.prompt.tokens),
            offer.on_abort,
        )
        return grants.mint(claims, grants.signing_key(self._secret))

    def _announce(self, offer: Offer, made: HandOver, token: bytes) -> None:
        """FinishedBlocks; asked again at once under the same idempotency key, which must change nothing."""

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
                lease_id=made.lease_id,
            )

        first: list[Result] = []

        def give(result: Result) -> None:
            first.append(result)
            if isinstance(result, KVGrpcError):
                self.refused[result.reason] += 1
                self._free(made.blocks)
                return
            assert isinstance(result, HandedOver)
            assert result.transfer is not None
            assert result.token == token, "lead and engine mint different grants"
            self._offers[result.transfer.id] = made

        def give_again(result: Result) -> None:
            assert result is first[0], "the same key got another answer"

        key = {"key": made.lease_id, "method": "FinishedBlocks"}
        self._lead.call(ask, ENGINE, give, **key)
        if isinstance(first[0], HandedOver):
            self._lead.call(ask, ENGINE, give_again, **key)

    def _find_room(self, fetch: Fetch) -> bool:
        """Takes blocks, and computes the KV that the engine is said to have."""
        blocks = self._blocks.take(fetch.use_tokens)
        if blocks is None:
            return False
        fetch.blocks = blocks
        have = Prompt(fetch.wish.prompt.tokens[: fetch.have_tokens], fetch.wish.prompt.salt)
        for memory in self._memories:
            memory.compute(self._blocks.first(blocks, fetch.have_tokens), have)
        return True

    def _destination(self, fetch: Fetch) -> tuple[Destination, int]:
        """The blocks to fill, and the step that still touches them."""
        targets = self._targets(fetch)
        step = 0
        if fetch.wish.in_step:
            step = self._queue(targets, lambda rank: self._memories[rank].soil(targets))
        return Destination(tuple(enumerate(targets)), fetch.have_tokens), step

    def _targets(self, fetch: Fetch) -> Blocks:
        assert fetch.blocks is not None
        return self._blocks.rest(fetch.blocks, fetch.have_tokens)

    def _pulling(self, fetch: Fetch, result: Result) -> None:
        if isinstance(result, KVGrpcError):
            self.refused[result.reason] += 1
            fetch.over = True
            if fetch.blocks is not None:
                self._free(fetch.blocks)
            return
        assert isinstance(result, Pulling | Reserved)
        assert result.transfer is not None
        fetch.transfer_id = result.transfer.id
        self._fetches[fetch.transfer_id] = fetch
        if fetch.blocks is not None:
            self._hand_in(fetch)

    def _give(self, fetch: Fetch) -> None:
        """Gives blocks to a pull that waits for them, as soon as there is room."""
        if fetch.over:
            return
        if not self._find_room(fetch):
            self._lead.later(ROOM_S, lambda: self._give(fetch))
            return
        destination, step = self._destination(fetch)
        self._hand_in(fetch)

        def give(result: Result) -> None:
            # Refused only because it ended in this very moment: its blocks have come back by then.
            assert fetch.over or not isinstance(result, KVGrpcError), str(result)

        self._lead.call(lambda call: GiveDestination(call, fetch.transfer_id, destination, step), ENGINE, give)

    def _hand_in(self, fetch: Fetch) -> None:
        for memory in self._memories:
            memory.give(self._targets(fetch), fetch.transfer_id)

    def _received(self, fetch: Fetch, news: Received) -> None:
        assert not fetch.over, "it succeeded after it failed"
        assert news.use_tokens == fetch.use_tokens
        fetch.over = True
        self._lead.soon(lambda: fetch.ended(None))
        self._acknowledge(news.transfer_id)
        if fetch.blocks is None:
            return
        blocks = fetch.blocks
        for memory in self._memories:
            memory.take_back(self._targets(fetch))
            memory.check_holds(blocks, fetch.wish.prompt, news.use_tokens)
        self._lead.later(USE_S, lambda: self._free(blocks))

    def _returned(self, transfer_id: str) -> None:
        self._acknowledge(transfer_id)
        made = self._offers.pop(transfer_id, None)
        if made is not None:
            made.over = True
            if not made.taken_back:
                self._free(made.blocks)
            return
        if transfer_id not in self._fetches:
            return  # a registration that no part followed
        fetch = self._fetches.pop(transfer_id)
        assert fetch.over, "blocks came back before the end"
        if fetch.blocks is not None:
            for memory in self._memories:
                memory.take_back(self._targets(fetch))
            self._free(fetch.blocks)

    def _acknowledge(self, transfer_id: str) -> None:
        def acknowledge() -> None:
            self._lead.call(lambda call: AcknowledgeTransfers(call, (transfer_id,)), ENGINE, lambda _: None)

        self._lead.soon(acknowledge)

    def _free(self, blocks: Blocks) -> None:
        """Blocks that nobody uses are overwritten at once: whoever still reads them is found out."""
        unused = self._blocks.free(blocks)
        assert self._lead.at_rest(unused), "blocks are reused that are pinned"
        for memory in self._memories:
            memory.scrub(unused)
