"""What one life of a modelled engine works with: its lead, its blocks, the memory of its ranks, and its steps."""

from collections import Counter
from collections.abc import Callable
from random import Random

from kvgrpc.core.events import ReclaimBlocks
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.core.values.request_times import RequestTime
from kvgrpc.errors import KVGrpcError, Reason
from kvgrpc.sim.engine.blocks import BlockManager
from kvgrpc.sim.engine.jobs import Lead
from kvgrpc.sim.engine.requests import Offer
from kvgrpc.sim.engine.steps import Steps, Work
from kvgrpc.sim.rules import Rule, broken
from kvgrpc.sim.world.memory import Memory


class Worker:
    """Computing and recycling."""

    def __init__(self, lead: Lead, description: EngineDescription, memories: list[Memory]) -> None:
        self.lead = lead
        self.description = description
        self.memories = memories
        self.blocks = BlockManager(description.pool)
        self._lent: dict[str, Blocks] = {}
        """Blocks that were handed over, by their lease."""
        self._voided: dict[str, Blocks] = {}
        """Those that were taken back, until the lead knows it."""
        self._cancelled: dict[bytes, float] = {}
        """Keys that were cancelled before anything came under them, and until when nothing may come."""
        self._half_cancelled: dict[bytes, float] = {}
        self._line: set[RequestTime] = set()
        self.refused: Counter[str] = Counter()
        """Calls that were refused, by reason."""
        # Seeded by what a life is named by, so that a life always takes the same steps.
        self.rng = Random(description.incarnation)  # noqa: S311 - a simulation, no secrets
        of_stage = [description.pool.stage_layers(stage) for stage in range(description.pool.stages)]
        layers = [of_stage[rank // description.stage_ranks] for rank in range(description.world_size)]
        self._steps = Steps(self.rng, layers, lead.later, lead.handle)

    def cancelled(self, key: bytes, for_s: float) -> None:
        """The lead said that what comes under that key is refused, for so long at least."""
        self._cancelled[key] = self.lead.clock() + for_s

    def half_cancelled(self, key: bytes, for_s: float) -> None:
        """A push was cancelled at its source before both halves had met: so long a retry may be taken for the other."""
        self._half_cancelled[key] = self.lead.clock() + for_s

    def came(self, key: bytes, transfer: Transfer) -> None:
        """A call has made a transfer."""
        if transfer.created < self._cancelled.get(key, 0.0):
            broken(Rule.R5, f"{transfer.id} came although its key had been cancelled", transfer.id)

    def was_refused(self, error: KVGrpcError, key: bytes) -> None:
        """A call was refused: as cancelled only where its key was cancelled before anything came under it."""
        self.refused[error.reason] += 1
        expected = key in self._cancelled or self.lead.clock() <= self._half_cancelled.get(key, -1.0)
        if error.reason is Reason.CANCELLED and not expected:
            broken(Rule.R5, f"a retry is refused although what its key stood for is over: {error.message}")

    def take(self, tokens: int, by: RequestTime | None = None, *, in_line: bool = False) -> Blocks | None:
        """Blocks for that many tokens. None without room: then the lead is asked, in the name of `by`, for those that
        nobody has come for, and a later request finds them. Of those that stand in line only the oldest is served.
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
        """It has blocks, or waits no more."""
        if by is not None:
            self._line.discard(by)

    def compute(self, blocks: Blocks, offer: Offer) -> int:
        """Computes the KV of a prompt, now or in a step; the step's number, or 0."""
        if offer.in_step:
            return self.queue(blocks, lambda rank, layers: self.memories[rank].compute(blocks, offer.prompt, layers))
        for memory in self.memories:
            memory.compute(blocks, offer.prompt)
        return 0

    def queue(self, blocks: Blocks, do: Callable[[int, LayerRange], None]) -> int:
        """Queues work on blocks, which are not reused before it is done; the step's number."""
        self.blocks.share(blocks)
        return self._steps.queue(Work(do, lambda: self.free(blocks)))

    def lend(self, lease_id: str, blocks: Blocks) -> None:
        """The lead has them, until it returns that lease."""
        self._lent[lease_id] = blocks

    def take_back(self, lease_id: str) -> None:
        """They are not waited for any more, though they may be read."""
        blocks = self._lent.pop(lease_id, None)
        if blocks is not None:
            self._voided[lease_id] = blocks
            for memory in self.memories:
                memory.void(blocks)

    def void_known(self, lease_id: str) -> None:
        """The lead knows that they were taken back."""
        blocks = self._voided.pop(lease_id, None)
        if blocks is not None:
            for memory in self.memories:
                memory.void_known(blocks)

    def returned(self, lease_id: str) -> None:
        """A lease has ended: its blocks, unless they were taken back before, are the engine's again."""
        blocks = self._lent.pop(lease_id, None)
        if blocks is not None:
            self.free(blocks)

    def check_idle(self) -> None:
        """Nothing is in use."""
        if self._lent:
            broken(Rule.END, "blocks that were handed over were never returned", *self._lent)
        self.blocks.check_idle()

    def free(self, blocks: Blocks) -> None:
        """Unused blocks are overwritten at once: a read that goes on is found out."""
        unused = self.blocks.free(blocks)
        if not self.lead.at_rest(unused):
            listed = ", ".join(str(ids.tolist()) for ids in unused)
            broken(Rule.R1, f"blocks are reused that are pinned, some of {listed}")
        for memory in self.memories:
            memory.scrub(unused)
