"""Asks sources to send, for ranks whose data path moves bytes only if the source sends (PostSend)."""

from kvgrpc.core.actions import AnswerSend, SendPostSend
from kvgrpc.core.events import PostSendAnswered, SendWanted
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.values.sends import SendAnswer


class SendAsks:
    """The destination's side of PostSend: a rank asks, and its lead adds the access."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def wanted(self, event: SendWanted) -> None:
        """Asks a peer for a rank that wants bytes of the peer's rank, or a process group with it."""
        state, ask = self._state, event.ask
        move = state.moves.of_posting(event.posting_id) if event.posting_id else None
        over = move is None or move.peer != event.peer or not move.access_id or move.stage is MoveStage.ENDED
        if not state.peers.live_on(event.peer):
            self._refuse(event, "the peer is gone")
        elif ask.meets and not state.peers.lives[event.peer].met:
            # A peer that only introduced itself knows this lead only once it has the answer to its handshake.
            state.peers.meetings.setdefault(event.peer, []).append(event)
        elif over and not ask.meets:
            self._refuse(event, "the transfer is over")
        else:
            access_id, trace = (move.access_id, move.trace) if move is not None else (b"", "")
            state.emit(SendPostSend(event.peer, event.rank, access_id, ask, trace, state.life.incarnation))

    def peer_heard(self, peer: Peer) -> None:
        """Asks a peer to meet our ranks once its liveness stream stands, or it was dialled."""
        if peer.met:
            self._ask_again(peer)

    def peer_dead(self, peer: Peer) -> None:
        """Refuses our ranks that waited to meet a dead peer."""
        self._ask_again(peer)

    def answered(self, event: PostSendAnswered) -> None:
        """Passes the source's answer to the rank that asked. The rank needs it even if the peer is dead by now: its
        posting waits for it. An answer to an earlier life is dropped.
        """
        state = self._state
        ours = event.incarnation in (0, state.life.incarnation) and state.life.description is not None
        if ours and event.rank < state.life.engine.world_size:
            state.emit(AnswerSend(event.rank, event.peer, event.answer))

    def _ask_again(self, peer: Peer) -> None:
        for event in self._state.peers.meetings.pop(peer.key, ()):
            self.wanted(event)

    def _refuse(self, event: SendWanted, why: str) -> None:
        ask = event.ask
        answer = SendAnswer(ask.source_rank, ask.epoch, ask.sequence, error=why)
        self._state.emit(AnswerSend(event.rank, event.peer, answer))
