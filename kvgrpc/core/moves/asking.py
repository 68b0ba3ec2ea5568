"""Asking sources to send, for ranks whose data path moves bytes only then (PostSend)."""

from kvgrpc.core.actions import AnswerSend, SendPostSend
from kvgrpc.core.events import PostSendAnswered, SendWanted
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import Stage
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.values.sends import SendAnswer


class Asking:
    """The destination's side: a rank asks, its lead knows under which access."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def wanted(self, event: SendWanted) -> None:
        """A rank wants bytes of a peer's rank, or to meet it."""
        state, ask = self._state, event.ask
        move = state.moves.of_posting(event.posting_id) if event.posting_id else None
        over = move is None or move.peer != event.peer or not move.access_id or move.stage is Stage.ENDED
        if not state.lives_on(event.peer):
            self._refuse(event, "the peer is gone")
        elif ask.meets and not state.peers[event.peer].met:
            # It introduced itself, and knows this lead only once it has the answer to that.
            state.meetings.setdefault(event.peer, []).append(event)
        elif over and not ask.meets:
            self._refuse(event, "the transfer is over")
        else:
            access_id, trace = (move.access_id, move.trace) if move is not None else (b"", "")
            state.emit(SendPostSend(event.peer, event.rank, access_id, ask, trace, state.incarnation))

    def peer_heard(self, peer: Peer) -> None:
        """A peer has brought up its liveness stream, or was dialled: it is asked to meet our ranks."""
        if peer.met:
            self._ask_again(peer)

    def peer_dead(self, peer: Peer) -> None:
        """Ranks that waited to meet one are told that it is gone."""
        self._ask_again(peer)

    def answered(self, event: PostSendAnswered) -> None:
        """The source sends, or does not. Whoever asked is told also when the peer is dead by now: its posting waits for
        that. An ask of a life before this one is nobody's.
        """
        state = self._state
        ours = event.incarnation in (0, state.incarnation) and state.description is not None
        if ours and event.rank < state.pool.world_size:
            state.emit(AnswerSend(event.rank, event.peer, event.answer))

    def _ask_again(self, peer: Peer) -> None:
        for event in self._state.meetings.pop(peer.key, ()):
            self.wanted(event)

    def _refuse(self, event: SendWanted, why: str) -> None:
        ask = event.ask
        answer = SendAnswer(ask.source_rank, ask.epoch, ask.sequence, error=why)
        self._state.emit(AnswerSend(event.rank, event.peer, answer))
