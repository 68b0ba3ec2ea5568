"""Minimal engines with one bug each, as authors make them, by the promise that they break."""

from collections.abc import Sequence
from typing import Any

from kvgrpc.engine import HandOver, Pull, Push, Reservation, content
from tests.testing.minimal import MinimalAdapter, Served, Step
from tests.testing.split import SplitAdapter


class FreesWithTheRequest(MinimalAdapter):
    """The request is over once it is handed over, and so are its blocks."""

    def hand_over(self, served: Served) -> None:
        super().hand_over(served)
        assert served.handover is not None
        self.minimal.blocks.release(self.minimal.given.pop(served.handover))


class GoesOnWriting(MinimalAdapter):
    """The prefill engine decodes a token more into the last block."""

    def schedule(self) -> None:
        super().schedule()
        for table in self.minimal.given.values():
            self.minimal.kv[0][table[-1]][1, -1] += 1.0


class ForgetsBlocks(MinimalAdapter):
    """BlocksReturned is not heard."""

    def schedule(self) -> None:
        self.minimal.given.clear()
        super().schedule()


class HoldsOnce(MinimalAdapter):
    """A block that two hand-overs have is held by the first of them alone."""

    def hand_over(self, served: Served) -> None:
        held = {block for table in self.minimal.given.values() for block in table}
        super().hand_over(served)
        assert served.handover is not None
        table = self.minimal.given[served.handover]
        shared = [block for block in table if block in held]
        self.minimal.blocks.release(shared)
        self.minimal.given[served.handover] = [block for block in table if block not in held]


class ReusesSilently(MinimalAdapter):
    """A preemption frees blocks and tells nobody."""

    def take_back(self, handover: HandOver) -> bool:
        return True


class HandsOverEarly(MinimalAdapter):
    """No call names a step: what is handed over may not be computed yet."""

    def step_of(self, number: int) -> int:
        return 0


class LoadsEarly(MinimalAdapter):
    """Only hand-overs name a step: a load may come before an earlier step has written its last."""

    def start(self, served: Served, pull: Pull) -> None:
        number, self.number = self.number, 0
        super().start(served, pull)
        self.number = number


class NamesRequests(MinimalAdapter):
    """KV is named by its request, and not by its tokens."""

    def hand_over(self, served: Served) -> None:
        finished = self.engine.finished_blocks

        def named(blocks: Any, _: Any, **labels: Any) -> HandOver:
            return finished(blocks, content(opaque_id=served.id.encode(), tokens=len(served.ids)), **labels)

        self.engine.finished_blocks = named  # type: ignore[method-assign, assignment]
        super().hand_over(served)
        del self.engine.finished_blocks


class NamesNothing(MinimalAdapter):
    """Every prompt has the same name."""

    def hand_over(self, served: Served) -> None:
        assert served.request is not None
        served.request.ids = [1] * len(served.ids)
        super().hand_over(served)
        served.request.ids = served.ids

    def take(self, request_id: str, token_ids: Sequence[int], kv_transfer_params: dict[str, Any]) -> None:
        super().take(request_id, [1] * len(token_ids), kv_transfer_params)


class FreesAtOnce(MinimalAdapter):
    """An abort frees the blocks that a transfer still fills."""

    def abort(self, request_id: str) -> None:
        served = self.requests[request_id]
        super().abort(request_id)
        if served in self.loading and served.request is not None:
            self.loading.remove(served)
            self.minimal.release(served.request)


class LeavesSilently(MinimalAdapter):
    """An abort cancels nothing."""

    def let_go(self, pull: Pull | Reservation) -> None:
        pass


class TrustsTheEnd(MinimalAdapter):
    """A transfer that is over is taken for one that succeeded."""

    def loaded(self, served: Served) -> None:
        assert served.pull is not None
        served.pull.failed = False
        super().loaded(served)


class FindsTooEarly(MinimalAdapter):
    """Blocks are findable once they are given to a transfer."""

    def start(self, served: Served, pull: Pull) -> None:
        super().start(served, pull)
        assert served.request is not None
        self.minimal.blocks.register(served.request.table, served.request.ids)

    def loaded(self, served: Served) -> None:
        assert served.pull is not None
        if served.left or not served.pull.failed:
            super().loaded(served)
        else:
            served.taken = 0  # it fails, and computes nothing


class KnowsIdsOnly(MinimalAdapter):
    """What a transfer brings goes to the request that has its id now."""

    def loaded(self, served: Served) -> None:
        now = self.requests[served.id]
        super().loaded(served)
        if now is not served and now.request is not None and now in self.loading:
            now.taken = len(now.ids)


class ForgetsWithItsLead(MinimalAdapter):
    """A new lead begins with empty tables, and so does the engine."""

    def schedule(self) -> None:
        super().schedule()
        if any(handover.lost for handover in self.minimal.given if isinstance(handover, HandOver)):
            self.minimal.given.clear()


class FreesWhatItPushed(MinimalAdapter):
    """The request is over once its last part is computed, and so are its blocks."""

    def schedule(self) -> None:
        super().schedule()
        for push in [it for it in self.minimal.given if isinstance(it, Push) and not self.batch]:
            self.minimal.blocks.release(self.minimal.given.pop(push))


class PushesEarly(MinimalAdapter):
    """A part is handed over as if it were computed."""

    def push_next(self, served: Served) -> None:
        number, self.step_of = self.step_of, lambda _: 0  # type: ignore[method-assign, assignment]
        super().push_next(served)
        self.step_of = number  # type: ignore[method-assign]


class ReportsBeforeItComputes(MinimalAdapter):
    """A step's layers are all reported with the first of them."""

    def layer_done(self, step: Step, layer: int) -> None:
        self.minimal.ranks[0].layers_done(step.number, 0, len(self.minimal.kv))


class CountsOneTooMany(MinimalAdapter):
    """The next layer is reported with each."""

    def layer_done(self, step: Step, layer: int) -> None:
        self.minimal.ranks[0].layers_done(step.number, 0, layer + 2)


class ForgetsPushes(MinimalAdapter):
    """A push whose request left goes on, and waits for its destination."""

    def give_up(self, push: Push) -> None:
        pass


class FreesReservations(MinimalAdapter):
    """An abort cancels a reservation and frees its blocks."""

    def abort(self, request_id: str) -> None:
        served = self.requests[request_id]
        super().abort(request_id)
        if isinstance(served.pull, Reservation) and served in self.loading and served.request is not None:
            self.loading.remove(served)
            self.minimal.release(served.request)


class TrustsLayers(MinimalAdapter):
    """A request decodes once layers came."""

    def schedule(self) -> None:
        super().schedule()
        for served in self.loading:
            if isinstance(served.pull, Reservation) and served.pull in self.minimal.layers_here:
                served.taken = len(served.ids)


class FindsWhatIsPushed(MinimalAdapter):
    """Blocks are findable once they are reserved."""

    def reserve_blocks(self, served: Served) -> None:
        super().reserve_blocks(served)
        assert served.request is not None
        self.minimal.blocks.register(served.request.table, served.request.ids)

    def loaded(self, served: Served) -> None:
        assert served.pull is not None
        if served.left or not served.pull.failed:
            super().loaded(served)
        else:
            served.taken = 0  # it fails, and computes nothing


class ReportsForAll(SplitAdapter):
    """The first rank to end a step reports it for all."""

    def report(self, rank: int, batch: Sequence[Step]) -> None:
        for other in range(self.RANKS):
            super().report(other, batch)


class OneRankReports(SplitAdapter):
    """Only the first rank reports."""

    def report(self, rank: int, batch: Sequence[Step]) -> None:
        if not rank:
            super().report(rank, batch)


BROKEN: list[tuple[str, type[MinimalAdapter]]] = [
    ("handed_over_blocks_stay", FreesWithTheRequest),
    ("handed_over_blocks_are_not_written", GoesOnWriting),
    ("returned_blocks_are_freed", ForgetsBlocks),
    ("each_hand_over_holds", HoldsOnce),
    ("preempted_blocks_are_taken_back", ReusesSilently),
    ("hand_overs_name_their_step", HandsOverEarly),
    ("content_is_the_prompt", NamesRequests),
    ("content_is_the_prompt", NamesNothing),
    ("blocks_being_filled_stay", FreesAtOnce),
    ("loads_name_their_step", LoadsEarly),
    ("who_leaves_lets_go", LeavesSilently),
    ("what_failed_is_not_used", TrustsTheEnd),
    ("what_failed_is_not_used", FindsTooEarly),
    ("an_id_is_reused", KnowsIdsOnly),
    ("pushed_blocks_stay", FreesWhatItPushed),
    ("parts_name_their_step", PushesEarly),
    ("layers_are_reported_when_done", ReportsBeforeItComputes),
    ("layers_are_reported_when_done", CountsOneTooMany),
    ("given_up_pushes_end", ForgetsPushes),
    ("reserved_blocks_stay", FreesReservations),
    ("pushes_are_used_when_received", TrustsLayers),
    ("pushes_are_used_when_received", FindsWhatIsPushed),
    ("late_ranks_are_waited_for", ReportsForAll),
    ("late_ranks_are_waited_for", OneRankReports),
    ("a_lost_lead_is_survived", ForgetsWithItsLead),
]
"""Promises, and engines that break them."""
