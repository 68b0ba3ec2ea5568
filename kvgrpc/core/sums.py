"""Checksums of the blocks that peers read here, for whoever wants to compare (ChecksumBlocks).

They are of the bytes as they lie in memory: as long as blocks are handed over nobody writes them, so it does not matter
when they are summed up. An engine that compares checksums sums up what it hands over before anybody asks, lease after
lease (`SumsAhead`); all else is summed up when it is asked for (`Sums`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgrpc.core.accesses import AccessState
from kvgrpc.core.actions import Checksums
from kvgrpc.core.calls import LayerRange
from kvgrpc.core.chunks import Pieces, Summing, pieces_of
from kvgrpc.core.events import ChecksumBlocks, Summed
from kvgrpc.core.grants import Access as AccessKind
from kvgrpc.core.leases import Lease, ended_error
from kvgrpc.core.peers import Peer
from kvgrpc.core.pins import Blocks, PinKind
from kvgrpc.core.rank_actions import Sum
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.errors import (
    DeadlineExceeded,
    Exhausted,
    InternalError,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
)

WAITING_MAX = 4_096
"""Calls that may wait for the ranks."""
AHEAD_BYTES_MAX = 64 << 20
"""Of sums that nobody has asked for. What is handed over beyond that is summed up when somebody asks."""

TOO_LATE = DeadlineExceeded(Reason.DEADLINE, "the ranks did not sum up in time")

Wanted = Sequence[tuple[Blocks, LayerRange | None]]
Places = list[slice]
"""Which bytes of a lease's sums are wanted, of every rank."""


def begin(state: NodeState, name: str, pieces: Pieces) -> Summing:
    """Asks all ranks."""
    ranks = range(state.pool.world_size)
    for rank in ranks:
        state.emit(Sum(rank, name, pieces))
    return Summing(set(ranks))


@dataclass(eq=False)
class _Turn:
    """The lease that is being summed up ahead; None once it has ended."""

    lease: Lease | None
    name: str
    """The ranks know it by that."""
    summing: Summing


class SumsAhead:
    """Sums of what is handed over, once its step is over. One lease has its turn at a time: who asks for sums of
    another one waits for no more than that.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._queue: dict[str, Lease] = {}
        """Leases that wait for their turn, by id."""
        self._turn: _Turn | None = None
        self._turns = 0
        self._nbytes = 0
        self.waiting: dict[int, Places] = {}
        """Calls that wait for the lease that has its turn."""

    def announced(self, lease: Lease) -> None:
        """A lease stands."""
        if self._state.checksums:
            self._queue[lease.id] = lease
            self.go_on()

    @property
    def idle(self) -> bool:
        """Nothing is summed up, and nothing waits for its turn."""
        return self._turn is None and not self._queue

    def go_on(self) -> None:
        """The next lease has its turn if its step is over: those after it wait for the same step, or a later one."""
        state = self._state
        while self._turn is None and self._queue:
            lease = next(iter(self._queue.values()))
            if lease.after_step > state.step_done():
                return
            del self._queue[lease.id]
            if self._nbytes + self._size(lease) <= AHEAD_BYTES_MAX:
                self._nbytes += self._size(lease)
                self._turns += 1
                name = f"a{self._turns}"
                self._turn = _Turn(lease, name, begin(state, name, pieces_of(state.pool.pool, [(lease.blocks, None)])))

    def answer(self, call: int, lease: Lease, wanted: Wanted) -> bool:
        """Answers a call, now or when it can; False where its sums are not among these."""
        state, turn = self._state, self._turn
        self._queue.pop(lease.id, None)
        under_way = turn is not None and turn.lease is lease
        places = _places(lease.blocks, wanted) if lease.sums or under_way else None
        if places is None:
            return False
        if turn is None or not under_way:
            self._reply(call, lease, places)
            return True
        self.waiting[call] = places
        if state.timers.when(Timer.SUMS, turn.name) is None:
            state.timers.set(Timer.SUMS, turn.name, state.now + state.limits.transfer_timeout_s)
        return True

    def summed(self, event: Summed) -> None:
        """A rank has summed up."""
        turn = self._turn
        if turn is None or turn.name != event.name or not turn.summing.take(event):
            return
        self._turn = None
        lease, error = turn.lease, turn.summing.error
        if lease is not None and error:
            self._nbytes -= self._size(lease)
            self._refuse(turn, InternalError(Reason.DATA_PATH_FAILED, f"no checksums here: {error}"))
        elif lease is not None:
            lease.sums = turn.summing.by_rank()
            for call, places in self._take(turn).items():
                self._reply(call, lease, places)
        self.go_on()

    def ended(self, lease: Lease) -> None:
        """A lease ended, which still has its blocks. The ranks may be at them still: the next one waits for that."""
        self._queue.pop(lease.id, None)
        turn = self._turn
        under_way = turn is not None and turn.lease is lease
        if lease.sums or under_way:
            self._nbytes -= self._size(lease)
        if turn is not None and under_way:
            turn.lease = None
            self._refuse(turn, ended_error(lease.state, lease.id))

    def due(self, name: str) -> bool:
        """The ranks took too long for the calls that wait; whether that is the name of what they do here."""
        turn = self._turn
        if turn is None or turn.name != name:
            return False
        self._refuse(turn, TOO_LATE)
        return True

    def end_all(self) -> None:
        """The incarnation ends, and all leases have."""
        self._turn = None

    def _size(self, lease: Lease) -> int:
        return 4 * self._state.pool.world_size * sum(map(len, lease.blocks))

    def _reply(self, call: int, lease: Lease, places: Places) -> None:
        self._state.reply(call, Checksums(tuple(b"".join(rank[place] for place in places) for rank in lease.sums)))

    def _refuse(self, turn: _Turn, error: KVGrpcError) -> None:
        for call in self._take(turn):
            self._state.refuse(call, error)

    def _take(self, turn: _Turn) -> dict[int, Places]:
        """The calls that waited; they wait no longer."""
        self._state.timers.clear(Timer.SUMS, turn.name)
        found, self.waiting = self.waiting, {}
        return found


class Sums:
    """Calls of peers that wait for sums."""

    def __init__(self, state: NodeState, ahead: SumsAhead) -> None:
        self._state = state
        self._ahead = ahead
        self._waiting: dict[str, tuple[int, Summing]] = {}
        """By the name that the ranks know, with the call."""

    def ask(self, event: ChecksumBlocks, peer: Peer) -> None:
        """ChecksumBlocks: of blocks that the caller may read."""
        state = self._state
        access = state.accesses.get(event.access_id)
        if access is None or access.peer != peer.key or access.kind is not AccessKind.READ:
            raise PreconditionFailed(Reason.ACCESS_NOT_FOUND, "no such access is open here")
        if access.state is not AccessState.OPEN:
            raise PreconditionFailed(access.stale or Reason.ACCESS_CLOSED, "this access is not valid any more")
        if len(self._waiting) + len(self._ahead.waiting) >= WAITING_MAX:
            raise Exhausted(Reason.LIMIT_EXCEEDED, f"{WAITING_MAX} calls wait for checksums", retry_delay_s=0.1)
        readable = state.pins.blocks(access.owner, PinKind.ACCESS)
        wanted = []
        for i, (lists, layers) in enumerate(event.blocks):
            blocks = state.resolve(lists, f"blocks[{i}]")
            _check_within(blocks, readable)
            wanted.append((blocks, layers))
        if self._ahead.answer(event.call.id, state.leases.get(access.lease_id), wanted):
            return
        name = f"s{event.call.id}"
        self._waiting[name] = event.call.id, begin(state, name, pieces_of(state.pool.pool, wanted))
        state.timers.set(Timer.SUMS, name, state.now + state.limits.transfer_timeout_s)

    def summed(self, event: Summed) -> None:
        """A rank has summed up."""
        self._ahead.summed(event)
        call, summing = self._waiting.get(event.name, (0, None))
        if summing is None or not summing.take(event):
            return
        del self._waiting[event.name]
        self._state.timers.clear(Timer.SUMS, event.name)
        if summing.error:
            self._state.refuse(call, InternalError(Reason.DATA_PATH_FAILED, f"no checksums here: {summing.error}"))
        else:
            self._state.reply(call, Checksums(summing.by_rank()))

    def due(self, name: str) -> None:
        """The ranks took too long."""
        if not self._ahead.due(name):
            call, _ = self._waiting.pop(name)
            self._state.refuse(call, TOO_LATE)

    def end_all(self, error: KVGrpcError) -> None:
        """The incarnation ends."""
        for call, _ in self._waiting.values():
            self._state.refuse(call, error)
        self._waiting.clear()
        self._ahead.end_all()


def _check_within(blocks: Blocks, readable: Blocks) -> None:
    for group, ids in enumerate(blocks):
        if len(ids) and not np.isin(ids, readable[group]).all():
            raise PermissionDenied(Reason.NOT_OWNER, f"group {group}: the access does not cover all of these blocks")


def _places(blocks: Blocks, wanted: Wanted) -> Places | None:
    """Where the sums of what is wanted lie among those of `blocks`, which hold it all; None unless they lie there side
    by side, of whole blocks.
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
