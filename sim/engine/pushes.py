"""The pushes of a modelled engine: parts that are handed over as they are computed, and prefills that start over."""

from collections.abc import Sequence

from kvgrpc.core.actions import HandedOver
from kvgrpc.core.events import Call, FinishedBlocks, WaitsFor
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import KVGrpcError
from sim.engine.jobs import EngineHandOver, content_of
from sim.engine.requests import PartPlan, PromptOffer
from sim.engine.worker import Worker
from sim.world.network import Result

AGAIN_S = 0.05
"""Delay before a prefill that cannot start over yet tries again, in seconds."""


class EnginePushes:
    """Pushes from one engine; `offers` are the engine's."""

    def __init__(self, plant: Worker, offers: dict[str, EngineHandOver]) -> None:
        self._plant = plant
        self._offers = offers

    def start(self, offer: PromptOffer, plans: Sequence[PartPlan]) -> None:
        """Computes a prompt and hands it over to be pushed, part by part."""
        blocks = self._plant.take(len(offer.prompt.tokens))
        if blocks is None:
            return
        made = EngineHandOver(offer.prompt, blocks, "", self._plant.compute(blocks, offer))
        made.start_over = lambda: self._start_over(offer, made, plans)
        self._hand_over(offer, made, plans)

    def _hand_over(self, offer: PromptOffer, made: EngineHandOver, plans: Sequence[PartPlan]) -> None:
        at_s, epoch = 0.0, made.part_epoch
        for plan in plans:
            at_s += plan.after_s
            self._plant.lead.later(at_s, lambda plan=plan: self._hand_over_part(offer, made, plan, epoch))  # type: ignore[misc]

    def _start_over(self, offer: PromptOffer, made: EngineHandOver, plans: Sequence[PartPlan]) -> None:
        """Starts the prefill of a push over, in other blocks."""
        if made.asking:
            self._plant.lead.later(AGAIN_S, lambda: self._start_over(offer, made, plans))
            return
        blocks = None if made.over else self._plant.take(len(offer.prompt.tokens))
        if blocks is None:
            return
        if not made.handed and not made.taken_back:
            self._plant.free(made.blocks)
        made.blocks, made.step = blocks, self._plant.compute(blocks, offer)
        made.part_epoch += 1
        made.handed = made.taken_back = False
        self._hand_over(offer, made, plans)

    def _hand_over_part(self, offer: PromptOffer, made: EngineHandOver, plan: PartPlan, part_epoch: int) -> None:
        if made.over or made.taken_back or part_epoch != made.part_epoch:
            return
        blocks = self._plant.blocks.between(made.blocks, plan.first, plan.end, plan.layers)
        made.asking += 1

        def ask(call: Call) -> FinishedBlocks:
            return FinishedBlocks(
                call,
                offer.key,
                () if plan.failure else tuple(enumerate(blocks)),
                content_of(offer.prompt),
                request_id=offer.request_id,
                after_step=made.step,
                priority=offer.priority,
                waits_for=WaitsFor.REGISTRATION,
                last=plan.last,
                layers=plan.layers,
                failure=plan.failure,
                part_epoch=part_epoch,
                consumers=offer.consumers,
                on_abort=offer.on_abort,
                firm_ttl_s=offer.firm_ttl_s,
            )

        def give(result: Result) -> None:
            made.asking -= 1
            if isinstance(result, KVGrpcError):
                self._plant.refused[result.reason] += 1
            elif isinstance(result, HandedOver):
                assert result.transfer is not None
                self._offers[result.transfer.id] = made
                if made.handed and made.lease_id != result.lease.id:
                    # The push had ended, so this part belongs to another push: each returns the blocks.
                    self._plant.blocks.share(made.blocks)
                made.handed, made.lease_id = True, result.lease.id
                self._plant.lend(made.lease_id, made.blocks)
            none_comes = plan.last or (made.over and not made.asking)
            if none_comes and not made.handed and not made.taken_back:
                made.taken_back = True
                self._plant.free(made.blocks)

        self._plant.lead.call(ask, ENGINE, give)
