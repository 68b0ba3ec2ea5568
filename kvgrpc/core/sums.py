"""Checksums of the blocks that peers read here, for whoever wants to compare (ChecksumBlocks).

They are of the bytes as they lie in memory when they are asked for: as long as an access is valid nobody writes its
blocks, so it does not matter when that is.
"""

import numpy as np

from kvgrpc.core.accesses import AccessState
from kvgrpc.core.actions import Checksums
from kvgrpc.core.chunks import Pieces, Summing, pieces_of
from kvgrpc.core.events import ChecksumBlocks, Summed
from kvgrpc.core.grants import Access as AccessKind
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


def begin(state: NodeState, name: str, pieces: Pieces) -> Summing:
    """Asks all ranks."""
    ranks = range(state.pool.world_size)
    for rank in ranks:
        state.emit(Sum(rank, name, pieces))
    return Summing(set(ranks))


class Sums:
    """Calls of peers that wait for sums."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
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
        if len(self._waiting) >= WAITING_MAX:
            raise Exhausted(Reason.LIMIT_EXCEEDED, f"{WAITING_MAX} calls wait for checksums", retry_delay_s=0.1)
        readable = state.pins.blocks(access.owner, PinKind.ACCESS)
        wanted = []
        for i, (lists, layers) in enumerate(event.blocks):
            blocks = state.resolve(lists, f"blocks[{i}]")
            _check_within(blocks, readable)
            wanted.append((blocks, layers))
        name = f"s{event.call.id}"
        self._waiting[name] = event.call.id, begin(state, name, pieces_of(state.pool.pool, wanted))
        state.timers.set(Timer.SUMS, name, state.now + state.limits.transfer_timeout_s)

    def summed(self, event: Summed) -> None:
        """A rank has summed up."""
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
        call, _ = self._waiting.pop(name)
        self._state.refuse(call, DeadlineExceeded(Reason.DEADLINE, "the ranks did not sum up in time"))

    def end_all(self, error: KVGrpcError) -> None:
        """The incarnation ends."""
        for call, _ in self._waiting.values():
            self._state.refuse(call, error)
        self._waiting.clear()


def _check_within(blocks: Blocks, readable: Blocks) -> None:
    for group, ids in enumerate(blocks):
        if len(ids) and not np.isin(ids, readable[group]).all():
            raise PermissionDenied(Reason.NOT_OWNER, f"group {group}: the access does not cover all of these blocks")
