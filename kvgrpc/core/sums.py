"""Checksums of the blocks that peers read here, for whoever wants to compare (ChecksumBlocks).

They are of the bytes as they lie in memory: as long as blocks are handed over nobody writes them, so it does not matter
when they are summed up. An engine that compares checksums sums up what it hands over before anybody asks, lease after
lease (`SumsAhead`); all else is summed up when it is asked for (`Sums`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvgrpc.core.accesses import Access, AccessState
from kvgrpc.core.actions import Checksums
from kvgrpc.core.calls import LayerRange
from kvgrpc.core.chunks import Pieces, Summing, pieces_of, portions_of
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
    InvalidRequest,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
)

WAITING_MAX = 4_096
"""Calls that may wait for the ranks."""
WAITING_OF_PEER_MAX = 1_024
WAITING_OF_ACCESS_MAX = 4
"""A destination asks for one after the other; a call that was lost may wait beside the next one."""
RUNNING_MAX = 4
"""Portions that the ranks sum up at once."""
ALL_LAYERS = (0, 1 << 40)
AHEAD_BYTES_MAX = 64 << 20
"""Of sums that nobody has asked for. What is handed over beyond that is summed up when somebody asks."""

GONE = DeadlineExceeded(Reason.DEADLINE, "nobody waits for these checksums any more")
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
        self.waiting: dict[int, tuple[Access, Places]] = {}
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

    def answer(self, call: int, access: Access, lease: Lease, wanted: Wanted) -> bool:
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
        self.waiting[call] = access, places
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
            for call, (_, places) in self._take(turn).items():
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

    def _take(self, turn: _Turn) -> dict[int, tuple[Access, Places]]:
        """The calls that waited; they wait no longer."""
        self._state.timers.clear(Timer.SUMS, turn.name)
        found, self.waiting = self.waiting, {}
        return found


@dataclass(eq=False)
class _Ask:
    """A call of a peer that the ranks sum up for."""

    call: int
    access: Access
    portions: Iterator[list[tuple[Blocks, LayerRange | None]]]
    next: list[tuple[Blocks, LayerRange | None]] | None
    """The portion that comes next; None: that was the last one."""
    found: list[tuple[bytes, ...]] = field(default_factory=list)
    """Of each portion, of each rank."""

    @property
    def name(self) -> str:
        """The ranks know its portions by that."""
        return f"s{self.call}"


class Sums:
    """Calls of peers that wait for sums. The ranks get portion by portion, few at once, of one peer after the other: so
    that a caller that is gone, or an access that is over, costs no more than what the ranks are at.
    """

    def __init__(self, state: NodeState, ahead: SumsAhead) -> None:
        self._state = state
        self._ahead = ahead
        self._waiting: dict[str, _Ask] = {}
        """By name."""
        self._queue: dict[str, dict[str, _Ask]] = {}
        """Those whose next portion is not begun: by peer, whose turns they have, and by name."""
        self._running: dict[str, tuple[_Ask, Summing]] = {}
        """Portions that the ranks are at, by name; also of those who wait no longer."""

    def ask(self, event: ChecksumBlocks, peer: Peer) -> None:
        """ChecksumBlocks: of blocks that the caller may read."""
        state = self._state
        access = state.accesses.get(event.access_id)
        if access is None or access.peer != peer.key or access.kind is not AccessKind.READ:
            raise PreconditionFailed(Reason.ACCESS_NOT_FOUND, "no such access is open here")
        _check_open(access)
        self._check_room(access)
        wanted = [(state.resolve(lists, f"blocks[{i}]"), layers) for i, (lists, layers) in enumerate(event.blocks)]
        _check_granted(wanted, state.pins.blocks(access.owner, PinKind.ACCESS))
        if self._ahead.answer(event.call.id, access, state.leases.get(access.lease_id), wanted):
            return
        portions = portions_of(state.pool.pool, wanted)
        ask = _Ask(event.call.id, access, portions, next(portions, None))
        self._waiting[ask.name] = ask
        state.timers.set(Timer.SUMS, ask.name, state.now + state.limits.transfer_timeout_s)
        self._go_on(ask)
        self._give_turns()

    def summed(self, event: Summed) -> None:
        """A rank has summed up."""
        self._ahead.summed(event)
        ask, summing = self._running.get(event.name, (None, None))
        if ask is None or summing is None or not summing.take(event):
            return
        del self._running[event.name]
        if ask.name in self._waiting and summing.error:
            self._refuse(ask, InternalError(Reason.DATA_PATH_FAILED, f"no checksums here: {summing.error}"))
        elif ask.name in self._waiting:
            ask.found.append(summing.by_rank())
            ask.next = next(ask.portions, None)
            self._go_on(ask)
        self._give_turns()

    def abandoned(self, call: int) -> None:
        """Nobody waits for the answer of that call any more."""
        if self._ahead.waiting.pop(call, None):
            self._state.refuse(call, GONE)
        elif ask := self._waiting.get(f"s{call}"):
            self._refuse(ask, GONE)

    def due(self, name: str) -> None:
        """The ranks took too long."""
        if not self._ahead.due(name):
            self._refuse(self._waiting[name], TOO_LATE)

    def end_all(self, error: KVGrpcError) -> None:
        """The incarnation ends."""
        for ask in self._waiting.values():
            self._state.refuse(ask.call, error)
        self._waiting.clear()
        self._queue.clear()
        self._running.clear()
        self._ahead.end_all()

    def _check_room(self, access: Access) -> None:
        """Raises Exhausted where too many wait: in all, of one peer, or under one access."""
        waiting = [ask.access for ask in self._waiting.values()]
        waiting += [other for other, _ in self._ahead.waiting.values()]
        ours = [other for other in waiting if other.peer == access.peer]
        for what, count, most in (
            ("", len(waiting), WAITING_MAX),
            (" of one peer", len(ours), WAITING_OF_PEER_MAX),
            (" under one access", sum(other is access for other in ours), WAITING_OF_ACCESS_MAX),
        ):
            if count >= most:
                raise Exhausted(Reason.LIMIT_EXCEEDED, f"{most} calls{what} wait for checksums", retry_delay_s=0.1)

    def _go_on(self, ask: _Ask) -> None:
        """The next portion waits for its turn; after the last one the call is answered."""
        if ask.next is not None:
            self._queue.setdefault(ask.access.peer, {})[ask.name] = ask
            return
        ranks = range(self._state.pool.world_size)
        self._state.reply(ask.call, Checksums(tuple(b"".join(part[rank] for part in ask.found) for rank in ranks)))
        self._drop(ask)

    def _give_turns(self) -> None:
        state = self._state
        while self._queue and len(self._running) < RUNNING_MAX:
            peer, asks = next(iter(self._queue.items()))
            ask = asks.pop(next(iter(asks)))
            del self._queue[peer]
            if asks:
                self._queue[peer] = asks  # behind the other peers
            try:
                _check_open(ask.access)
            except KVGrpcError as error:
                self._refuse(ask, error)
                continue
            assert ask.next is not None
            name = f"{ask.name}.{len(ask.found)}"
            self._running[name] = ask, begin(state, name, pieces_of(state.pool.pool, ask.next))

    def _refuse(self, ask: _Ask, error: KVGrpcError) -> None:
        self._state.refuse(ask.call, error)
        self._drop(ask)

    def _drop(self, ask: _Ask) -> None:
        """It waits no longer. What the ranks are at they end."""
        del self._waiting[ask.name]
        self._state.timers.clear(Timer.SUMS, ask.name)
        asks = self._queue.get(ask.access.peer, {})
        asks.pop(ask.name, None)
        if not asks:
            self._queue.pop(ask.access.peer, None)


def _check_open(access: Access) -> None:
    if access.state is not AccessState.OPEN:
        raise PreconditionFailed(access.stale or Reason.ACCESS_CLOSED, "this access is not valid any more")


def _check_granted(wanted: Wanted, readable: Blocks) -> None:
    """Raises PermissionDenied for blocks that the access does not cover, and InvalidRequest for those that are listed
    twice in some layer: nobody sums up more than was granted.
    """
    for group, granted in enumerate(readable):
        rows = [(lists[group], layers or ALL_LAYERS) for lists, layers in wanted if len(lists[group])]
        if not rows:
            continue
        ids = np.concatenate([some for some, _ in rows])
        if not np.isin(ids, granted).all():
            raise PermissionDenied(Reason.NOT_OWNER, f"group {group}: the access does not cover all of these blocks")
        if len(rows) == 1:
            continue
        ranges = [(first, first + count) for _, (first, count) in rows]
        first, end = np.repeat(ranges, [len(some) for some, _ in rows], axis=0).T
        order = np.lexsort((first, ids))
        ids, first, end = ids[order], first[order], end[order]
        twice = ids[1:][(ids[1:] == ids[:-1]) & (first[1:] < end[:-1])]
        if len(twice):
            raise InvalidRequest(
                Reason.BLOCK_DUPLICATE, f"group {group}: block {int(twice[0])} is listed twice for the same layers"
            )


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
