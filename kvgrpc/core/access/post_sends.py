"""Sends: bytes that this engine's ranks send because a peer asked for them (PostSend).

A peer gets only bytes of blocks that its access covers. A send under way does not say what has arrived: the destination
concludes the transfer, and settles as if it had read by itself.
"""

from kvgrpc.core.actions import Send, SendUnderWay
from kvgrpc.core.events import CallAbandoned, PostSend, SendPosted
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import AccessState
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.coverage import covered
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.errors import (
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
)

WAITING_OF_PAIR_MAX = 4
"""Maximum number of waiting sends of one pair of ranks. A destination asks one at a time, but a lost call may still
wait beside the next one.
"""
POST_S = 15.0
"""Deadline for a rank to begin a send, in seconds: for a new process group it may first have to load a library."""

GONE = DeadlineExceeded(Reason.DEADLINE, "the caller does not wait for this send any more", metadata={"phase": "wire"})
TOO_LATE = DeadlineExceeded(Reason.DEADLINE, "the rank did not begin to send in time", metadata={"phase": "wire"})


class PostSends:
    """The source's side of data paths on which the source has to send."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def ask(self, event: PostSend) -> None:
        """Answers PostSend once the rank sends. Raises InvalidRequest for a pair of ranks that does not exist,
        Exhausted when too many sends of the pair wait, and the errors of `_check_granted`.
        """
        state, ask = self._state, event.ask
        peer = state.peers.caller(event.engine_id, event.incarnation, event.call.proof)
        pairs = peer.bridges.pairs if ask.meets else [pair.turned for pair in peer.bridges.outgoing.pairs]
        if (ask.source_rank, ask.rank) not in pairs:
            raise InvalidRequest(
                Reason.INVALID_FIELD, f"rank {ask.source_rank} sends nothing to rank {ask.rank} of this peer"
            )
        if not ask.meets:
            self._check_granted(peer, event)
        pair = f"{peer.key}/{ask.source_rank}.{ask.rank}"
        if sum(other == pair for _, other in state.access.sends.values()) >= WAITING_OF_PAIR_MAX:
            raise Exhausted(
                Reason.LIMIT_EXCEEDED, f"{WAITING_OF_PAIR_MAX} sends of this pair of ranks wait", retry_delay_s=0.1
            )
        name = f"p{event.call.id}"
        state.access.sends[name] = event.call.id, pair
        state.timers.set(Timer.SEND, name, state.now + POST_S)
        state.emit(Send(ask.source_rank, name, peer.key, ask))

    def posted(self, event: SendPosted) -> None:
        """Answers the call whose send a rank began or refused."""
        waiting = self._take(event.name)
        if waiting is None:
            return
        if event.message:
            refused = PreconditionFailed(
                Reason.NO_DATA_PATH if event.permanent else Reason.DATA_PATH_FAILED, event.message
            )
            self._state.refuse(waiting, refused)
        else:
            self._state.reply(waiting, SendUnderWay(event.values))

    def abandoned(self, event: CallAbandoned) -> None:
        """Refuses a send whose caller no longer waits."""
        if (call := self._take(f"p{event.call_id}")) is not None:
            self._state.refuse(call, GONE)

    def due(self, name: str) -> None:
        """Refuses a send that its rank did not begin in time."""
        call = self._take(name)
        assert call is not None, "its deadline goes with it"
        self._state.refuse(call, TOO_LATE)

    def end_all(self, error: KVGrpcError) -> None:
        """Refuses all waiting sends: the incarnation ends."""
        for call, _ in self._state.access.sends.values():
            self._state.refuse(call, error)
        self._state.access.sends.clear()

    def _check_granted(self, peer: Peer, event: PostSend) -> None:
        """Raises PreconditionFailed when the access is not open, and PermissionDenied for bytes it does not cover."""
        state, ask = self._state, event.ask
        access = state.access.rows.get(event.access_id)
        if access is None or access.peer != peer.key or access.kind is not AccessKind.READ:
            raise PreconditionFailed(Reason.ACCESS_NOT_FOUND, "no such access is open here")
        if access.state is not AccessState.OPEN:
            raise PreconditionFailed(access.stale or Reason.ACCESS_CLOSED, "this access is not valid any more")
        pool, blocks = state.life.engine.pool, state.pool.pins.blocks(access.owner, PinKind.ACCESS)
        stage = ask.source_rank * pool.stages // state.life.engine.world_size
        if not covered(pool, stage, blocks, ask.offsets, ask.nbytes):
            raise PermissionDenied(Reason.NOT_OWNER, "the access does not cover all of these bytes")

    def _take(self, name: str) -> int | None:
        """Removes a waiting send and returns its call id; None if it has been answered."""
        waiting = self._state.access.sends.pop(name, None)
        if waiting is None:
            return None
        self._state.timers.clear(Timer.SEND, name)
        return waiting[0]
