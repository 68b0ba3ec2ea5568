"""Checksums of blocks that peers read here, for destinations that compare them (ChecksumBlocks).

Checksums cover the bytes as they lie in memory. Those of a hand-over may be computed before a destination asks
(`send.checksum_prefetch`); all others are computed on request.
"""

import numpy as np

from kvgrpc.core.actions import Checksums
from kvgrpc.core.events import CallAbandoned, ChecksumBlocks, ChecksumsComputed
from kvgrpc.core.send.checksum_prefetch import TOO_LATE, ChecksumPrefetch, Wanted, begin
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.waiting_rows import ChecksumAsk, ChecksumAsks
from kvgrpc.core.tables.accesses import Access, AccessState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.pieces import pieces_of, portions_of
from kvgrpc.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unimplemented,
    full,
)

WAITING_MAX = 4_096
"""Maximum number of calls that wait for checksums."""
WAITING_OF_PEER_MAX = 1_024
WAITING_OF_ACCESS_MAX = 4
"""Maximum number of waiting calls under one access. A destination asks one at a time, but a lost call may still wait
beside the next one.
"""
RUNNING_MAX = 4
"""Maximum number of portions that the ranks compute at once."""
ALL_LAYERS = (0, 1 << 40)

GONE = DeadlineExceeded(
    Reason.DEADLINE, "the caller does not wait for these checksums any more", metadata={"phase": "checksum"}
)


class ChecksumCalls:
    """Calls of peers that wait for checksums. The ranks compute few portions at once, and peers take turns. A caller
    that gives up, or an access that ends, wastes only the portion under way.
    """

    def __init__(self, state: NodeState, prefetch: ChecksumPrefetch) -> None:
        self._state = state
        self._prefetch = prefetch

    @property
    def _asks(self) -> ChecksumAsks:
        return self._state.access.checksum_asks

    def ask(self, event: ChecksumBlocks) -> None:
        """Handles ChecksumBlocks: answers from the prefetch, or queues the call. Raises unless the access is open and
        covers the blocks, and when too many calls wait.
        """
        state = self._state
        peer = state.peers.caller(event.engine_id, event.incarnation, event.call.proof)
        access = state.access.rows.get(event.access_id)
        if access is None or access.peer != peer.key or access.kind is not AccessKind.READ:
            raise PreconditionFailed(Reason.ACCESS_NOT_FOUND, "no such access is open here")
        _check_open(access)
        if state.life.engine.pool.stages > 1:
            what = "ranks of several pipeline stages compute no checksums: pull without them"
            raise Unimplemented(Reason.FEATURE_UNAVAILABLE, what)
        self._check_room(access)
        wanted = [
            (state.pool.resolve(lists, f"blocks[{i}]", "blocks"), layers)
            for i, (lists, layers) in enumerate(event.blocks)
        ]
        _check_granted(wanted, state.pool.pins.blocks(access.owner, PinKind.ACCESS))
        if self._prefetch.answer(event.call.id, access, state.send.leases.get(access.lease_id), wanted):
            return
        portions = portions_of(state.life.engine.pool, wanted)
        ask = ChecksumAsk(event.call.id, access, portions, next(portions, None))
        self._asks.waiting[ask.name] = ask
        state.timers.set(Timer.CHECKSUMS, ask.name, state.now + state.limits.transfer_timeout_s)
        self._go_on(ask)
        self._give_turns()

    def computed(self, event: ChecksumsComputed) -> None:
        """Takes a rank's checksums of one portion, and goes on when all ranks have answered."""
        ask, awaited = self._asks.running.get(event.name, (None, None))
        if ask is None or awaited is None or not awaited.take(event.rank, event.values, event.message):
            return
        del self._asks.running[event.name]
        if ask.name in self._asks.waiting and awaited.error:
            self._refuse(ask, InternalError(Reason.DATA_PATH_FAILED, f"no checksums here: {awaited.error}"))
        elif ask.name in self._asks.waiting:
            ask.found.append(awaited.by_rank())
            ask.next = next(ask.portions, None)
            self._go_on(ask)
        self._give_turns()

    def abandoned(self, event: CallAbandoned) -> None:
        """Refuses a call whose caller no longer waits."""
        call = event.call_id
        if self._state.send.prefetch.waiting.pop(call, None):
            self._state.refuse(call, GONE)
        elif ask := self._asks.waiting.get(f"s{call}"):
            self._refuse(ask, GONE)

    def due(self, name: str) -> None:
        """Refuses the calls whose checksums the ranks did not compute in time."""
        if not self._prefetch.due(name):
            self._refuse(self._asks.waiting[name], TOO_LATE)

    def end_all(self, error: KVGrpcError) -> None:
        """Refuses all waiting calls for which the ranks compute: the incarnation ends."""
        for ask in self._asks.waiting.values():
            self._state.refuse(ask.call, error)

    def _check_room(self, access: Access) -> None:
        """Raises Exhausted when too many calls wait: in all, from one peer, or under one access."""
        waiting = [ask.access for ask in self._asks.waiting.values()]
        waiting += [other for other, _ in self._state.send.prefetch.waiting.values()]
        ours = [other for other in waiting if other.peer == access.peer]
        for what, count, most in (
            ("", len(waiting), WAITING_MAX),
            (" of one peer", len(ours), WAITING_OF_PEER_MAX),
            (" under one access", sum(other is access for other in ours), WAITING_OF_ACCESS_MAX),
        ):
            if count >= most:
                raise full(f"{most} calls{what} wait for checksums", most, retry_delay_s=0.1)

    def _go_on(self, ask: ChecksumAsk) -> None:
        """Queues the call's next portion; after the last one, answers the call."""
        if ask.next is not None:
            self._asks.queue.setdefault(ask.access.peer, {})[ask.name] = ask
            return
        ranks = range(self._state.life.engine.world_size)
        self._state.reply(ask.call, Checksums(tuple(b"".join(part[rank] for part in ask.found) for rank in ranks)))
        self._drop(ask)

    def _give_turns(self) -> None:
        state = self._state
        while self._asks.queue and len(self._asks.running) < RUNNING_MAX:
            peer, asks = next(iter(self._asks.queue.items()))
            ask = asks.pop(next(iter(asks)))
            del self._asks.queue[peer]
            if asks:
                self._asks.queue[peer] = asks  # behind the other peers
            try:
                _check_open(ask.access)
            except KVGrpcError as error:
                self._refuse(ask, error)
                continue
            assert ask.next is not None
            name = f"{ask.name}.{len(ask.found)}"
            self._asks.running[name] = ask, begin(state, name, pieces_of(state.life.engine.pool, ask.next))

    def _refuse(self, ask: ChecksumAsk, error: KVGrpcError) -> None:
        self._state.refuse(ask.call, error)
        self._drop(ask)

    def _drop(self, ask: ChecksumAsk) -> None:
        """Forgets a call. The ranks still finish its portion under way."""
        del self._asks.waiting[ask.name]
        self._state.timers.clear(Timer.CHECKSUMS, ask.name)
        asks = self._asks.queue.get(ask.access.peer, {})
        asks.pop(ask.name, None)
        if not asks:
            self._asks.queue.pop(ask.access.peer, None)


def _check_open(access: Access) -> None:
    if access.state is not AccessState.OPEN:
        raise PreconditionFailed(access.stale or Reason.ACCESS_CLOSED, "this access is not valid any more")


def _check_granted(wanted: Wanted, readable: Blocks) -> None:
    """Raises PermissionDenied for blocks that the access does not cover, and InvalidRequest for blocks listed twice for
    one layer. A rank thus never computes more than was granted.
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
