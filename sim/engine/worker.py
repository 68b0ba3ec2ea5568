"""The equipment of one life of a modelled engine: its lead, its blocks, the memory of its ranks, and its steps."""

from collections import Counter
from collections.abc import Callable
from random import Random

from kvgrpc.core.events import ReclaimBlocks
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.core.values.request_times import RequestTime
from kvgrpc.errors import KVGrpcError, Reason
from sim.engine.blocks import BlockManager
from sim.engine.jobs import EngineLead
from sim.engine.requests import PromptOffer
from sim.engine.steps import Steps, Work
from sim.rules import Rule, broken
from sim.world.memory import Memory


class Worker:
    """Computes into blocks and recycles them."""

    def __init__(self, lead: EngineLead, description: EngineDescription, memories: list[Memory]) -> None:
        self.lead = lead
        self.description = description
        self.memories = memories
        self.blocks = BlockManager(description.pool)
        self._lent: dict[str, Blocks] = {}
        """Blocks that were handed over, by lease."""
        self._voided: dict[str, Blocks] = {}
        """Lent blocks that were taken back, until the lead knows."""
        self._cancelled: dict[bytes, float] = {}
        """Keys that were cancelled before anything came under them, and the time until which nothing may come."""
        self._half_cancelled: dict[bytes, float] = {}
        self._line: set[RequestTime] = set()
        self.refused: Counter[str] = Counter()
        """Number of refused calls, by reason."""
        # The seed is the name of the life, so that a life always takes the same steps.
        self.rng = Random(description.incarnation)  # noqa: S311 - a simulation, no secrets
        of_stage = [description.pool.stage_layers(stage) for stage in range(description.pool.stages)]
        layers = [of_stage[rank // description.stage_ranks] for rank in range(description.world_size)]
        self._steps = Steps(self.rng, layers, lead.later, lead.handle)

    def cancelled(self, key: bytes, for_s: float) -> None:
        """Takes note that the lead refuses what comes under that key, for at least `for_s` seconds."""
        self._cancelled[key] = self.lead.clock() + for_s

    def half_cancelled(self, key: bytes, for_s: float) -> None:
        """Takes note that a push was cancelled at its source before both halves met: for `for_s` seconds a retry may be
        taken for the other half.
        """
        self._half_cancelled[key] = self.lead.clock() + for_s

    def came(self, key: bytes, transfer: Transfer) -> None:
        """Checks a transfer that a call has made."""
        if transfer.created < self._cancelled.get(key, 0.0):
            broken(Rule.R5, f"{transfer.id} came although its key had been cancelled", transfer.id)

    def was_refused(self, error: KVGrpcError, key: bytes) -> None:
        """Checks a refused call: only a key that was cancelled before anything came under it may be refused as
        cancelled.
        """
        self.refused[error.reason] += 1
        expected = key in self._cancelled or self.lead.clock() <= self._half_cancelled.get(key, -1.0)
        if error.reason is Reason.CANCELLED and not expected:
            broken(Rule.R5, f"a retry is refused although what its key stood for is over: {error.message}")

    def take(self, tokens: int, by: RequestTime | None = None, *, in_line: bool = False) -> Blocks | None:
        """Returns blocks for that many tokens, or None without room. The lead is then asked, for `by`, to reclaim
        unclaimed blocks, which a later request finds. Of the requests in line only the oldest is served.
        """
        if in_line and by is not None:
            self._line.add(by)
            if by != min(self._line):
                return None
        taken = self.blocks.take(tokens)
        missing = () if taken is not None else self.blocks.lacks(tokens)
        if missing:
            self.lead.call(lambda call: ReclaimBlocks(call, missing, by=by), ENGINE, lambda _: None)
        else:
            self.leave_line(by)
        return taken

    def leave_line(self, by: RequestTime | None) -> None:
        """Leaves the line: the request has blocks, or no longer waits."""
        if by is not None:
            self._line.discard(by)

    def compute(self, blocks: Blocks, offer: PromptOffer) -> int:
        """Computes the KV of a prompt, now or in a step. Returns the step's number, or 0."""
        if offer.in_step:
            return self.queue(blocks, lambda rank, layers: self.memories[rank].compute(blocks, offer.prompt, layers))
        for memory in self.memories:
            memory.compute(blocks, offer.prompt)
        return 0

    def queue(self, blocks: Blocks, do: Callable[[int, LayerRange], None]) -> int:
        """Queues work on blocks, which are not reused before it is done. Returns the step's number."""
        self.blocks.share(blocks)
        return self._steps.queue(Work(do, lambda: self.free(blocks)))

    def lend(self, lease_id: str, blocks: Blocks) -> None:
        """Takes note that the lead has the blocks until it returns that lease."""
        self._lent[lease_id] = blocks

    def take_back(self, lease_id: str) -> None:
        """Takes lent blocks back, though they may still be read."""
        blocks = self._lent.pop(lease_id, None)
        if blocks is not None:
            self._voided[lease_id] = blocks
            for memory in self.memories:
                memory.void(blocks)

    def void_known(self, lease_id: str) -> None:
        """Takes note that the lead knows that they were taken back."""
        blocks = self._voided.pop(lease_id, None)
        if blocks is not None:
            for memory in self.memories:
                memory.void_known(blocks)

    def returned(self, lease_id: str) -> None:
        """Frees the blocks of a lease that has ended, unless they were taken back before."""
        blocks = self._lent.pop(lease_id, None)
        if blocks is not None:
            self.free(blocks)

    def check_idle(self) -> None:
        """Checks that nothing is in use."""
        if self._lent:
            broken(Rule.END, "blocks that were handed over were never returned", *self._lent)
        self.blocks.check_idle()

    def free(self, blocks: Blocks) -> None:
        """Frees blocks, and overwrites unused ones at once, so that a read that goes on is detected."""
        unused = self.blocks.free(blocks)
        if not self.lead.at_rest(unused):
            listed = ", ".join(str(ids.tolist()) for ids in unused)
            broken(Rule.R1, f"blocks are reused that are pinned, some of {listed}")
        for memory in self.memories:
            memory.scrub(unused)
