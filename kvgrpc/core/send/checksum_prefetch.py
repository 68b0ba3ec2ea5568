"""Checksums of handed-over blocks, computed before a destination asks for them.

Nobody writes handed-over blocks, so their checksums may be computed at any time. An engine that compares checksums
computes them one lease at a time. `access.checksums` asks this module first.
"""

from collections.abc import Sequence

import numpy as np

from kvgrpc.core.actions import Checksums, ComputeChecksums
from kvgrpc.core.events import ChecksumsComputed
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.waiting_rows import Places, Prefetch, PrefetchTurn
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.leases import Lease, ended_error
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.pieces import Pieces, RankChecksums, pieces_of
from kvgrpc.errors import (
    DeadlineExceeded,
    InternalError,
    KVGrpcError,
    Reason,
)

AHEAD_BYTES_MAX = 64 << 20
"""Maximum number of bytes of prefetched checksums that are kept. Beyond it, checksums are computed on request."""

TOO_LATE = DeadlineExceeded(
    Reason.DEADLINE,
    "the ranks did not compute the checksums in time",
    retry_delay_s=1.0,
    metadata={"phase": "checksum"},
)

Wanted = Sequence[tuple[Blocks, LayerRange | None]]


def begin(state: NodeState, name: str, pieces: Pieces) -> RankChecksums:
    """Asks all ranks to compute the checksums of `pieces`."""
    ranks = range(state.life.engine.world_size)
    for rank in ranks:
        state.emit(ComputeChecksums(rank, name, pieces))
    return RankChecksums(set(ranks))


class ChecksumPrefetch:
    """Computes the checksums of each lease once its step is over. One lease has its turn at a time, so a call for
    another lease waits for one turn at most.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._turns = 0

    @property
    def _prefetch(self) -> Prefetch:
        return self._state.send.prefetch

    def announced(self, lease: Lease) -> None:
        """Queues a new lease of an engine without mirrors. With mirrors `copied` queues it, so it delays no other."""
        self._add(lease)

    def copied(self, lease: Lease) -> None:
        """Queues a lease that is in the mirrors."""
        self._add(lease)

    def go_on(self) -> None:
        """Starts the next lease if its step is over. Later leases usually wait for the same step or a later one, so
        they are not looked at.
        """
        state = self._state
        while self._prefetch.turn is None and self._prefetch.queue:
            lease = next(iter(self._prefetch.queue.values()))
            if lease.after_step > state.pool.steps.done():
                return
            del self._prefetch.queue[lease.id]
            if self._prefetch.nbytes + self._size(lease) <= AHEAD_BYTES_MAX:
                self._prefetch.nbytes += self._size(lease)
                self._turns += 1
                name = f"a{self._turns}"
                self._prefetch.turn = PrefetchTurn(
                    lease, name, begin(state, name, pieces_of(state.life.engine.pool, [(lease.blocks, None)]))
                )

    def answer(self, call: int, access: Access, lease: Lease, wanted: Wanted) -> bool:
        """Answers a call now or when its lease is ready. Returns False if the prefetch does not have its checksums."""
        state, turn = self._state, self._prefetch.turn
        self._prefetch.queue.pop(lease.id, None)
        under_way = turn is not None and turn.lease is lease
        places = _places(lease.blocks, wanted) if lease.checksums or under_way else None
        if places is None:
            return False
        if turn is None or not under_way:
            self._reply(call, lease, places)
            return True
        self._prefetch.waiting[call] = access, places
        if state.timers.when(Timer.CHECKSUMS, turn.name) is None:
            state.timers.set(Timer.CHECKSUMS, turn.name, state.now + state.limits.transfer_timeout_s)
        return True

    def computed(self, event: ChecksumsComputed) -> None:
        """Takes the checksums that a rank computed."""
        turn = self._prefetch.turn
        if turn is None or turn.name != event.name or not turn.awaited.take(event.rank, event.values, event.message):
            return
        self._prefetch.turn = None
        lease, error = turn.lease, turn.awaited.error
        if lease is not None and error:
            self._prefetch.nbytes -= self._size(lease)
            self._refuse(turn, InternalError(Reason.DATA_PATH_FAILED, f"no checksums here: {error}"))
        elif lease is not None:
            lease.checksums = turn.awaited.by_rank()
            for call, (_, places) in self._take(turn).items():
                self._reply(call, lease, places)
        self.go_on()

    def ended(self, lease: Lease) -> None:
        """Drops a lease that ended and still has its blocks. If the ranks are computing it, the next lease waits for
        their answers.
        """
        self._prefetch.queue.pop(lease.id, None)
        turn = self._prefetch.turn
        under_way = turn is not None and turn.lease is lease
        if lease.checksums or under_way:
            self._prefetch.nbytes -= self._size(lease)
        if turn is not None and under_way:
            turn.lease = None
            self._refuse(turn, ended_error(lease))
        self.go_on()

    def due(self, name: str) -> bool:
        """Refuses the calls that the ranks kept waiting too long. Returns False when `name` is not the current turn."""
        turn = self._prefetch.turn
        if turn is None or turn.name != name:
            return False
        self._refuse(turn, TOO_LATE)
        return True

    def _add(self, lease: Lease) -> None:
        """Adds a lease at the end of the queue."""
        if self._state.life.engine.pool.stages == 1:
            self._prefetch.queue[lease.id] = lease
            self.go_on()

    def _size(self, lease: Lease) -> int:
        return 4 * self._state.life.engine.world_size * sum(map(len, lease.blocks))

    def _reply(self, call: int, lease: Lease, places: Places) -> None:
        self._state.reply(call, Checksums(tuple(b"".join(rank[place] for place in places) for rank in lease.checksums)))

    def _refuse(self, turn: PrefetchTurn, error: KVGrpcError) -> None:
        for call in self._take(turn):
            self._state.refuse(call, error)

    def _take(self, turn: PrefetchTurn) -> dict[int, tuple[Access, Places]]:
        """Returns the waiting calls and stops their timer."""
        self._state.timers.clear(Timer.CHECKSUMS, turn.name)
        found, self._prefetch.waiting = self._prefetch.waiting, {}
        return found


def _places(blocks: Blocks, wanted: Wanted) -> Places | None:
    """Returns the positions of the wanted checksums among those of `blocks`, which contain all wanted blocks. Returns
    None unless they are checksums of whole blocks and lie side by side.
    """
    begins = np.cumsum([0, *map(len, blocks)])
    places = []
    for lists, layers in wanted:
        for group, ids in enumerate(lists):
            if not len(ids):
                continue
            first = int(np.argmax(blocks[group] == ids[0]))
            if layers is not None or not np.array_equal(blocks[group][first : first + len(ids)], ids):
                return None
            at = 4 * int(begins[group] + first)
            places.append(slice(at, at + 4 * len(ids)))
    return places
