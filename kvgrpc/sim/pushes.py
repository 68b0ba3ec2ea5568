"""The pushes of a modelled engine: parts that are handed over as they are computed, and prefills that start over."""

from collections import Counter
from collections.abc import Callable, Sequence

from kvgrpc.core.actions import HandedOver
from kvgrpc.core.events import Call, FinishedBlocks, WaitsFor
from kvgrpc.core.pins import Blocks
from kvgrpc.core.state import ENGINE
from kvgrpc.errors import KVGrpcError
from kvgrpc.sim.blocks import BlockManager
from kvgrpc.sim.jobs import HandOver, Lead, content_of
from kvgrpc.sim.network import Result
from kvgrpc.sim.requests import Offer, PartPlan


class Pushes:
    """Pushes from one engine; `offers`, `refused`, `compute` and `free` are the engine's."""

    def __init__(
        self,
        lead: Lead,
        blocks: BlockManager,
        offers: dict[str, HandOver],
        refused: Counter[str],
        compute: Callable[[Blocks, Offer], int],
        free: Callable[[Blocks], None],
    ) -> None:
        self._lead = lead
        self._blocks = blocks
        self._offers = offers
        self._refused = refused
        self._compute = compute
        self._free = free
        self._replaced: dict[str, Blocks] = {}
        """Blocks of parts that were replaced, by their lease."""

    def start(self, offer: Offer, plans: Sequence[PartPlan]) -> None:
        """Computes a prompt and hands it over to be pushed, part by part."""
        blocks = self._blocks.take(len(offer.prompt.tokens))
        if blocks is None:
            return
        made = HandOver(offer.prompt, blocks, "", self._compute(blocks, offer))
        made.start_over = lambda: self._start_over(offer, made, plans)
        self._hand_over(offer, made, plans)

    def _hand_over(self, offer: Offer, made: HandOver, plans: Sequence[PartPlan]) -> None:
        at_s, epoch = 0.0, made.part_epoch
        for plan in plans:
            at_s += plan.after_s
            self._lead.later(at_s, lambda plan=plan: self._hand_over_part(offer, made, plan, epoch))  # type: ignore[misc]

    def _start_over(self, offer: Offer, made: HandOver, plans: Sequence[PartPlan]) -> None:
        """The prefill of a push begins anew, in other blocks."""
        blocks = None if made.over else self._blocks.take(len(offer.prompt.tokens))
        if blocks is None:
            return
        if made.handed:
            self._replaced[made.lease_id] = made.blocks
        elif not made.taken_back:
            self._free(made.blocks)
        made.blocks, made.step = blocks, self._compute(blocks, offer)
        made.part_epoch += 1
        made.handed = made.taken_back = False
        self._hand_over(offer, made, plans)

    def _hand_over_part(self, offer: Offer, made: HandOver, plan: PartPlan, part_epoch: int) -> None:
        if made.over or made.taken_back or part_epoch != made.part_epoch:
            return
        blocks = self._blocks.between(made.blocks, plan.first, plan.end, plan.layers)

        def ask(call: Call) -> FinishedBlocks:
            return FinishedBlocks(
                call,
                offer.key,
                () if plan.failure else tuple(enumerate(blocks)),
                content_of(offer.prompt),
                request_id=offer.request_id,
                after_step=made.step,
                waits_for=WaitsFor.REGISTRATION,
                last=plan.last,
                layers=plan.layers,
                failure=plan.failure,
                part_epoch=part_epoch,
                consumers=offer.consumers,
                on_abort=offer.on_abort,
            )

        def give(result: Result) -> None:
            if isinstance(result, KVGrpcError):
                self._refused[result.reason] += 1
            elif isinstance(result, HandedOver):
                assert result.transfer is not None
                self._offers[result.transfer.id] = made
                made.handed, made.lease_id = True, result.lease.id
            if plan.last and not made.handed:
                made.taken_back = True
                self._free(made.blocks)

        self._lead.call(ask, ENGINE, give)

    def returned(self, lease_id: str) -> None:
        """The blocks of parts that were replaced, if these are some, are the engine's again."""
        blocks = self._replaced.pop(lease_id, None)
        if blocks is not None:
            self._free(blocks)

    def check_idle(self) -> None:
        """Asserts that everything came back."""
        assert not self._replaced, "parts that were replaced were never returned"
