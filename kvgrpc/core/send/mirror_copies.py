"""Copies handed-over blocks of an engine whose memory no data path reaches.

The engine's ranks have mirrors in host memory, block for block, and peers read those. A block may be read once it is in
the mirrors of all ranks, after the step that writes it. Every hand-over is copied, even if an earlier one copied the
same blocks, because only the engine knows whether it has written them since.

Ranks copy in the order of the requests, and also copy leases that have ended meanwhile.
"""

from kvgrpc.core.actions import CopyOut
from kvgrpc.core.events import CopiedOut
from kvgrpc.core.send.leases import Leases
from kvgrpc.core.send.push_course import PushCourse
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.waiting_rows import MirrorCopy, MirrorPortion, Mirrors
from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.transfers import Failure, Side
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.parts import Part
from kvgrpc.core.values.pieces import pieces_of, portions_of
from kvgrpc.errors import NextStep, Reason

RUNNING_MAX = 2
"""Maximum number of portions that ranks copy at once. The second one runs while the end of the first is reported."""


class MirrorCopies:
    """Copies leases into the mirrors, portion by portion. It is called only in a life that has mirrors."""

    def __init__(self, state: NodeState, leases: Leases, course: PushCourse) -> None:
        self._state = state
        self._leases = leases
        self._course = course

    @property
    def _mirrors(self) -> Mirrors:
        return self._state.send.mirrors

    def announced(self, lease: Lease) -> None:
        """Copies blocks that were handed over to readers."""
        self._add(lease, 0, lease.blocks, None, lease.after_step)

    def part_came(self, lease: Lease, part: Part, blocks: Blocks) -> None:
        self._add(lease, part.number, blocks, part.layers, part.after_step)

    def go_on(self) -> None:
        """Starts the next copies in order, after a step is over or a portion has been copied."""
        state, mirrors = self._state, self._mirrors
        ready = [copy for copy in mirrors.stepping if copy.after_step <= state.pool.steps.done(copy.layers)]
        if ready:
            mirrors.stepping = [copy for copy in mirrors.stepping if copy not in ready]
            mirrors.queue += ready
        while mirrors.queue and len(mirrors.running) < RUNNING_MAX:
            copy = mirrors.queue[0]
            portion = next(copy.portions, None)
            if portion is not None:
                self._begin(copy, portion)
                continue
            del mirrors.queue[0]
            copy.begun = True
            self._look(copy)

    def copied(self, event: CopiedOut) -> None:
        """Takes a rank's report that it has copied a portion or failed."""
        portion = self._mirrors.running.get(event.name)
        if portion is None or event.rank not in portion.ranks:
            return
        copy = portion.copy
        portion.ranks.discard(event.rank)
        if not portion.ranks:
            del self._mirrors.running[event.name]
            copy.running -= 1
        if event.message and copy.lease.live:
            self._fail(copy.lease, event)
        elif not portion.ranks:
            self._look(copy)
        self.go_on()

    def _add(self, lease: Lease, number: int, blocks: Blocks, layers: LayerRange | None, after_step: int) -> None:
        lease.uncopied.add(number)
        portions = portions_of(self._state.life.engine.pool, [(blocks, layers)])
        self._mirrors.stepping.append(MirrorCopy(lease, number, after_step, layers, portions))
        self.go_on()

    def _begin(self, copy: MirrorCopy, portion: list[tuple[Blocks, LayerRange | None]]) -> None:
        state, mirrors = self._state, self._mirrors
        mirrors.begun += 1
        copy.running += 1
        # The name contains the incarnation, so a late report of another life does not match.
        name, ranks = f"c{mirrors.begun}-{state.life.incarnation:x}", set(range(state.life.engine.world_size))
        mirrors.running[name] = MirrorPortion(copy, set(ranks), state.now)
        pool = state.life.engine.pool
        of_stages = [pieces_of(pool, portion, stage) for stage in range(pool.stages)]
        for rank in sorted(ranks):
            state.emit(CopyOut(rank, name, of_stages[rank // state.life.engine.stage_ranks]))

    def _look(self, copy: MirrorCopy) -> None:
        """Makes the blocks readable once all portions are copied."""
        lease = copy.lease
        if not copy.begun or copy.running or not lease.live:
            return
        lease.uncopied.discard(copy.number)
        push = self._state.send.pushes.find(lease.transfer_id) if lease.pushed else None
        if push is None:
            self._state.react.lease_copied(lease)
            return
        for move in push.live:
            self._course.try_post(move)

    def _fail(self, lease: Lease, event: CopiedOut) -> None:
        """Ends a lease whose blocks could not be copied, and tells its readers."""
        lease.failed = f"rank {event.rank} of its engine could not copy it into its mirror: {event.message}"
        phase = "rendezvous" if lease.pushed else "readers"
        failure = Failure(
            Reason.SOURCE_FAILED, lease.failed, phase, Side.SOURCE, rank=event.rank, next=NextStep.RECOMPUTE
        )
        self._leases.end(lease, LeaseState.RELEASED, failure)
