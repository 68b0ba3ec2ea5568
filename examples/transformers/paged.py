"""An engine on transformers' continuous batching, whose paged cache moves in blocks: this is all that it adds.

Received blocks enter by the engine's own prefix cache: a transfer fills blocks that no request has, and once they are
there they are entered under the prompt's tokens. Then the request comes, and finds them. Blocks are held as requests
hold them, under the names of transfers. Only whole blocks move; the decode engine computes the rest of the prompt, at
least its last token.

Steps are over when `step` returns, so no call names one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgrpc.core.values.grants import from_json
from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout
from kvgrpc.engine import BlocksReturned, Engine, HandOver, Pull, Rank, Received, content
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestState

PAGE_TOKENS = 16


@dataclass(eq=False)
class Loading:
    """A request whose KV comes from elsewhere."""

    id: str
    ids: list[int]
    count: int
    pull: Pull
    left: bool = False

    @property
    def holder(self) -> str:
        """Name under which its blocks are held until it has found them; another request may have its id."""
        return f"loading {id(self)}"


class PagedEngine:
    """A model with a paged cache, and a lead."""

    def __init__(self, model: Any, blocks: int, revision: str) -> None:
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        settings = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=blocks, max_batch_tokens=256, use_async_batching=False
        )
        self.model, self.manager = model, model.init_continuous_batching(greedy, settings)
        self.batches = self.manager._create_batch_processor()  # noqa: SLF001 - in this thread, step by step
        self.cache = self.batches.cache
        (self.blocks,) = self.cache.cache_allocators.values()
        config, memory = model.config, self.cache.cache_tensor
        layers, blocks = config.num_hidden_layers, memory.numel() // self.blocks.bytes_per_block
        shape = config.num_key_value_heads, config.head_dim, str(model.dtype).removeprefix("torch.")
        group = Group("full", GroupKind.FULL_ATTENTION, layers, PAGE_TOKENS, blocks, *shape)
        pool = uniform_layout(group, self.blocks.bytes_per_page, layers_per_region=group.layers)
        self.engine = Engine.launch(pool=pool, private_memory=True, weights_revision=revision)
        self.rank = Rank(self.engine.ticket, 0, [memory])
        self.given: dict[HandOver, str] = {}
        """Names under which blocks of hand-overs are held."""
        self.loading: dict[Pull, Loading] = {}
        self.arrived: list[Loading] = []
        """Requests whose KV has come, or will not."""
        self.answers: dict[str, list[int]] = {}

    def add(self, request_id: str, ids: Sequence[int], count: int) -> None:
        """Takes a request in."""
        self.manager.add_request(list(ids), request_id=request_id, max_new_tokens=count)

    def prefill(self, request_id: str, ids: Sequence[int]) -> None:
        """Takes a request in of which the first token is wanted, and the prompt's blocks."""
        self.add(request_id, ids, 2)  # transformers finds blocks of prompts after whose first token another one comes

    def hand_over(self, ids: Sequence[int], key: bytes) -> HandOver:
        """Hands over the whole blocks of a prompt that was computed here."""
        found = self.blocks.match_prefix_blocks([*ids, 0])
        tokens, name = len(found) * PAGE_TOKENS, f"given {key.hex()}"
        handover = self.engine.finished_blocks(found, content(ids[:tokens]), transfer_key=key)
        self.blocks.acquire_prefix_blocks(name, tokens, found)
        self.given[handover] = name
        self.engine.flush()
        return handover

    def take(self, request_id: str, ids: Sequence[int], count: int, kv_transfer_params: dict[str, Any]) -> Loading:
        """Takes a request in that was prefilled elsewhere."""
        pull = self.engine.pull(from_json(kv_transfer_params), content(ids), request_id=request_id)
        self.loading[pull] = Loading(request_id, list(ids), count, pull)
        return self.loading[pull]

    def step(self, timeout_s: float = 0.0) -> None:
        """Hears events, gives blocks to what waits for them, and computes a batch."""
        self._hear(timeout_s)
        for pull, request in self.loading.items():
            if not pull.started and not self._give_blocks(request):
                break
        for request in self.arrived:
            self.add(request.id, request.ids, request.count)
        if self.batches.prepare_next_batch():
            self.batches._generation_step(self.model)  # noqa: SLF001 - as above
            self.batches.update_batch()
        for request in self.arrived:  # it holds what it has found
            self.blocks.free_blocks(request.holder)
        self.arrived.clear()
        while (answer := self.manager.get_result(timeout=0)) is not None:
            self.answers[answer.request_id] = answer.generated_tokens

    def _hear(self, timeout_s: float) -> None:
        for event in self.engine.poll(timeout_s):
            match event:
                case BlocksReturned(given) if given in self.given:
                    self.free(given)
                case Received(pull, tokens) if pull in self.loading:
                    self._loaded(self.loading.pop(pull), tokens)
                case BlocksReturned(pull) if pull in self.loading:
                    self._loaded(self.loading.pop(pull), 0)

    def abort(self, request: Loading) -> None:
        """Ends a request; the blocks of its transfer come back with the transfer's end."""
        request.left = True
        request.pull.cancel("its client hung up")

    def free(self, handover: HandOver) -> None:
        """Lets the blocks of a hand-over go."""
        self.blocks.free_blocks(self.given.pop(handover))

    def _give_blocks(self, request: Loading) -> bool:
        """Gives a request's pull its blocks, if there are enough. Returns whether there were."""
        tokens, wanted = request.pull.use_tokens, RequestState(request.holder, request.ids)
        found = self.blocks.match_prefix_blocks([*request.ids[:tokens], 0])
        self.blocks.acquire_prefix_blocks(request.holder, len(found) * PAGE_TOKENS, found)
        while not self.cache.can_store_request_tokens(wanted, tokens):
            if not self.cache.evict_cached_blocks():
                self.blocks.free_blocks(request.holder)
                return False
            self.cache.pool.try_to_free_sectors()
        table = self.blocks.block_table[request.holder]
        request.pull.start(table[len(found) :], have_tokens=len(found) * PAGE_TOKENS)
        return True

    def _loaded(self, request: Loading, tokens: int) -> None:
        """Makes what was received findable, and the request one of this engine's own."""
        if request.left or not tokens:
            self.blocks.free_blocks(request.holder)
        if request.left:
            return
        if tokens:
            self.blocks.mark_complete_blocks(request.holder, request.ids, tokens // PAGE_TOKENS)
        self.arrived.append(request)

    def close(self) -> None:
        """Ends the engine and its lead."""
        self.engine.close()
        self.rank.close()
