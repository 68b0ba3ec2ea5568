"""The receiving side of a modelled engine: pulls, and reservations for pushes."""

from collections.abc import Callable

from kvgrpc.core.actions import (
    BlocksReserved,
    BlocksReturnedNews,
    FailedNews,
    LayersReceivedNews,
    PullStarted,
    ReceivedNews,
)
from kvgrpc.core.events import (
    AcknowledgeTransfers,
    Call,
    Destination,
    GiveDestination,
    LeaseRef,
    PullBlocks,
    PushSource,
    RenewLeases,
    ReserveBlocks,
)
from kvgrpc.core.values import grants
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.content import claim
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import KVGrpcError
from sim.engine.jobs import EngineFetch, content_of
from sim.engine.requests import PromptWish
from sim.engine.worker import Worker
from sim.rules import Rule, broken
from sim.world.memory import ALL_LAYERS, Prompt
from sim.world.network import Result

USE_S = 0.05
"""Time that an engine computes with received blocks before it frees them, in seconds."""
ROOM_S = 0.1
"""Interval between two looks for room, in seconds."""
RENEW_S = 1.0
"""Interval at which the engine lets the source of a push renew what will come, in seconds."""


class EngineFetches:
    """Pulls and reservations of one engine."""

    def __init__(self, plant: Worker) -> None:
        self._plant = plant
        self._fetches: dict[str, EngineFetch] = {}
        """Pulls and reservations, by transfer."""
        self._used: list[EngineFetch] = []
        """Fetches whose KV the engine computes with."""

    def pull(self, wish: PromptWish, token: bytes, ended: Callable[[FailedNews | None], None]) -> None:
        """Pulls with a grant. `ended` gets the failure, or None for success; it is never called for a refused call."""
        try:
            claims = grants.read_claims(token)
            content = content_of(wish.prompt, claims.token_count)
            use_tokens = claim(content, claims.token_count, wish.use_tokens).tokens
        except KVGrpcError as error:
            self._plant.refused[error.reason] += 1
            return
        fetch = EngineFetch(wish, use_tokens, min(wish.have_tokens, use_tokens), ended, claims.transfer_key)
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
                priority=wish.priority,
                request_time_us=wish.request_time_us,
            )

        self._plant.lead.call(ask, ENGINE, lambda result: self._pulling(fetch, result))
        if destination is None:
            self._plant.lead.later(wish.blocks_after_s or ROOM_S, lambda: self._give(fetch))

    def reserve(
        self, wish: PromptWish, key: bytes, source: PushSource | None, relay: Callable[[bytes], None],
        ended: Callable[[FailedNews | None], None],
    ) -> None:  # fmt: skip
        """Reserves blocks for a push. `relay` gets the grant; `ended` is as for `pull`."""
        tokens = len(wish.prompt.tokens)
        fetch = EngineFetch(wish, tokens, min(wish.have_tokens, tokens), ended, key)
        if not self._find_room(fetch):
            return
        destination, step = self._destination(fetch)

        def ask(call: Call) -> ReserveBlocks:
            named, of = (key, destination.blocks, content_of(wish.prompt)), (source, wish.request_id)
            return ReserveBlocks(call, *named, fetch.have_tokens, 0, *of, after_step=step, priority=wish.priority)

        def give(result: Result) -> None:
            self._pulling(fetch, result)
            if isinstance(result, BlocksReserved):
                relay(result.token)

        self._plant.lead.call(ask, ENGINE, give)
        if source is not None:
            self._renew(fetch, source)

    def _renew(self, fetch: EngineFetch, source: PushSource) -> None:
        """Renews what will come at its source, while the engine waits for it."""
        if fetch.over:
            return
        refs = (LeaseRef(key=fetch.key),)
        self._plant.lead.call(lambda call: RenewLeases(call, refs, source=source), ENGINE, lambda _: None)
        self._plant.lead.later(RENEW_S, lambda: self._renew(fetch, source))

    def shares(self, prompt: Prompt) -> Blocks | None:
        """Returns the blocks of a received request that is still in use, for exactly that prompt."""
        for fetch in self._used:
            if fetch.wish.prompt == prompt and fetch.use_tokens == len(prompt.tokens):
                return fetch.blocks
        return None

    def received(self, news: ReceivedNews) -> None:
        """Takes received KV, which must be what was asked for."""
        fetch = self._fetches.pop(news.transfer_id)
        if fetch.over or news.use_tokens != fetch.use_tokens:
            broken(Rule.R3, f"{news.transfer_id} brought other tokens, or succeeded after it failed", news.transfer_id)
        fetch.over = True
        self._plant.lead.soon(lambda: fetch.ended(None))
        self._acknowledge(news.transfer_id)
        if fetch.blocks is None:
            return
        blocks, prompt = fetch.blocks, fetch.wish.prompt
        lied_to = self._plant.lead.lied_to(news.transfer_id)
        if lied_to:
            self._check_filled(fetch)
        for memory in self._plant.memories:
            memory.take_back(self._targets(fetch), Rule.R9)
            if lied_to:  # a lie is believed, and made good here: what follows from it is checked as usual
                memory.compute(blocks, Prompt(prompt.tokens[: news.use_tokens], prompt.salt))
            memory.check_holds(blocks, prompt, news.use_tokens, rule=self._rule(fetch), about=news.transfer_id)
        self._used.append(fetch)

        def free() -> None:
            self._used.remove(fetch)
            self._plant.free(blocks)

        self._plant.lead.later(USE_S, free)

    def failed(self, news: FailedNews) -> None:
        """Takes a failure. The blocks come back later."""
        fetch = self._fetches[news.transfer_id]
        if fetch.over:
            broken(Rule.R3, f"{news.transfer_id} failed twice", news.transfer_id)
        fetch.over = True
        self._plant.lead.soon(lambda: fetch.ended(news))

    def returned(self, news: BlocksReturnedNews) -> None:
        """Takes blocks back."""
        self._acknowledge(news.transfer_id)
        fetch = self._fetches.pop(news.transfer_id, None)
        if fetch is None:
            return  # a hand-over
        if not fetch.over:
            broken(Rule.R3, f"the blocks of {news.transfer_id} came back before its end", news.transfer_id)
        if fetch.blocks is not None:
            for memory in self._plant.memories if fetch.handed_in else ():
                memory.take_back(self._targets(fetch))
            self._plant.free(fetch.blocks)

    def layers(self, news: LayersReceivedNews) -> None:
        """Takes layers that may be used provisionally."""
        fetch = self._fetches[news.transfer_id]
        assert fetch.blocks is not None
        most = max(group.layers for group in self._plant.description.pool.groups)
        if not all(0 <= first < first + count <= most for first, count in news.layers_done):
            broken(Rule.R2, f"{news.transfer_id} offers layers that do not exist", news.transfer_id)
        if self._plant.lead.lied_to(news.transfer_id):
            self._check_filled(fetch, news.layers_done)
            return
        for memory in self._plant.memories:
            memory.check_holds(
                fetch.blocks, fetch.wish.prompt, fetch.use_tokens, news.layers_done, self._rule(fetch), news.transfer_id
            )

    def knows(self, transfer_id: str) -> bool:
        """Returns True if the transfer is a pull or reservation of this engine that is not over for good."""
        return transfer_id in self._fetches

    def check_idle(self) -> None:
        """Checks that all fetches have ended."""
        if self._fetches:
            broken(Rule.END, "pulls never ended", *self._fetches)

    def _check_filled(self, fetch: EngineFetch, layers: tuple[LayerRange, ...] = (ALL_LAYERS,)) -> None:
        """Checks KV from a liar: what this side has moved by itself must be there."""
        self._plant.lead.audit.check_arrived(fetch.transfer_id, self._targets(fetch), self._plant.memories, layers)

    def _rule(self, fetch: EngineFetch) -> Rule:
        """Returns the rule that wrong KV breaks: R11 if the key stands for another prompt, else R2: the KV was torn or
        stale.
        """
        offered = self._plant.lead.offered(fetch.key)
        asked = fetch.wish.prompt
        tokens = asked.tokens[: fetch.use_tokens]
        same = offered is not None and (offered.salt, offered.tokens[: len(tokens)]) == (asked.salt, tokens)
        return Rule.R2 if same else Rule.R11

    def _find_room(self, fetch: EngineFetch) -> bool:
        """Takes blocks, and computes the KV that the engine should already have."""
        blocks = self._plant.take(fetch.use_tokens, fetch.wish.by, in_line=fetch.wish.in_line)
        if blocks is None:
            return False
        fetch.blocks = blocks
        have = Prompt(fetch.wish.prompt.tokens[: fetch.have_tokens], fetch.wish.prompt.salt)
        for memory in self._plant.memories:
            memory.compute(self._plant.blocks.first(blocks, fetch.have_tokens), have)
        return True

    def _destination(self, fetch: EngineFetch) -> tuple[Destination, int]:
        """Returns the blocks to fill, and the step that still touches them."""
        targets = self._targets(fetch)
        step = 0
        if fetch.wish.in_step:
            step = self._plant.queue(targets, lambda rank, _: self._plant.memories[rank].soil(targets))
        return Destination(tuple(enumerate(targets)), fetch.have_tokens), step

    def _targets(self, fetch: EngineFetch) -> Blocks:
        assert fetch.blocks is not None
        return self._plant.blocks.rest(fetch.blocks, fetch.have_tokens)

    def _pulling(self, fetch: EngineFetch, result: Result) -> None:
        if isinstance(result, KVGrpcError):
            self._plant.was_refused(result, fetch.key)
            fetch.over = True
            if fetch.blocks is not None:
                self._plant.free(fetch.blocks)
            return
        assert isinstance(result, PullStarted | BlocksReserved)
        assert result.transfer is not None
        fetch.transfer_id = result.transfer.id
        self._plant.came(fetch.key, result.transfer)
        self._fetches[fetch.transfer_id] = fetch
        if fetch.blocks is not None:
            self._hand_in(fetch)

    def _give(self, fetch: EngineFetch) -> None:
        """Gives blocks to a pull that waits for them, as soon as there is room."""
        if fetch.over:
            self._plant.leave_line(fetch.wish.by)
            return
        if not fetch.transfer_id or not self._find_room(fetch):
            self._plant.lead.later(ROOM_S, lambda: self._give(fetch))
            return
        destination, step = self._destination(fetch)

        def give(result: Result) -> None:
            if not isinstance(result, KVGrpcError):
                self._hand_in(fetch)
            elif not fetch.over:  # refused only if it ended at this very moment: its blocks have come back by then
                broken(Rule.R5, f"{fetch.transfer_id} takes no blocks: {result}", fetch.transfer_id)

        self._plant.lead.call(lambda call: GiveDestination(call, fetch.transfer_id, destination, step), ENGINE, give)

    def _hand_in(self, fetch: EngineFetch) -> None:
        fetch.handed_in = True
        for memory in self._plant.memories:
            memory.give(self._targets(fetch), fetch.transfer_id)

    def _acknowledge(self, transfer_id: str) -> None:
        def acknowledge() -> None:
            self._plant.lead.call(lambda call: AcknowledgeTransfers(call, (transfer_id,)), ENGINE, lambda _: None)

        self._plant.lead.soon(acknowledge)
