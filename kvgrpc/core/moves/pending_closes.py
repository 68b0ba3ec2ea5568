"""Closing accesses at their issuers: sent until answered, or until the issuer's life is over.

An issuer that does not know that a reader is gone would keep its blocks until the lease runs out; one that does not
know that a writer is gone, for ever. An issuer that was taken for dead may live and have missed nothing: its closings
wait for it to come back. For one whose blocks may wait for our word that we write no more it is reached for, a few
times: nobody else might have a reason to.
"""

from dataclasses import replace

from kvgrpc.core.actions import SendClose
from kvgrpc.core.events import CloseAnswered, Closing
from kvgrpc.core.moves.move import Move, Stage
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.tables.timers import Timer

RETRY_DELAY_S = 1.0
KNOCKS = 10
"""So often somebody who was taken for dead is reached for, each time after twice the delay: for 17 minutes."""


class PendingCloses:
    """Closings that no issuer has answered yet."""

    def __init__(self, state: NodeState, peering: Handshakes) -> None:
        self._state = state
        self._peering = peering
        self._sent: dict[bytes, SendClose] = {}
        self._following: dict[bytes, SendClose] = {}
        """What is to be said of an access once the closing under way is answered: an answer names no more than that."""
        self._unsent: dict[str, dict[bytes, SendClose]] = {}
        """By address, for issuers that are still being reached; those that name a life reached it before."""
        self._parked: dict[str, dict[bytes, SendClose]] = {}
        """By life, for issuers that were taken for dead."""
        self._knocks: dict[str, int] = {}
        """How often those of them were reached for that may wait for a proof."""

    def close(self, move: Move, *, dropped: bool, message: str = "") -> None:
        """Closes a move's access. A drop is worth a connection that is under way; a failure only an access that may be
        open.
        """
        address = move.claims.address
        access_id = move.access_id or (move.registration_id if address else b"")
        if not access_id:
            return
        rests = not (move.postings or move.outlived)
        closing = Closing(access_id, dropped, quiesced=rests, token=move.token, message=message)
        peer, incarnation = move.peer or move.asked_of, self._state.incarnation
        send = SendClose(peer, closing, incarnation, move.trace, proves=rests and move.writes)
        reached = move.stage is Stage.ENDED and access_id not in self._unsent.get(address, {})
        if move.peer or reached:
            self._tell(send)
        elif dropped or move.asked_of:
            self._unsent.setdefault(address, {})[access_id] = send

    def reached(self, address: str, peer: str) -> None:
        """The issuer at an address is connected."""
        for send in self._unsent.pop(address, {}).values():
            self._tell(replace(send, peer=send.peer or peer))

    def unreachable(self, address: str) -> None:
        """The issuer at an address cannot be reached now. A life that may have an access is told later; of others the
        leases run out by themselves.
        """
        for send in self._unsent.pop(address, {}).values():
            self._tell(send)

    def answered(self, event: CloseAnswered) -> None:
        """The issuer knows, or is asked again."""
        sent = self._sent.get(event.access_id)
        if sent is None or (sent.closing.quiesced and not event.quiesced):
            return  # the answer to an earlier one, which came late
        following = self._following.pop(event.access_id, None)
        if following is not None:
            self._sent[event.access_id] = following
            self._state.timers.clear(Timer.CLOSE_RETRY, event.access_id.hex())
            self._state.emit(following)
        elif event.answered:
            del self._sent[event.access_id]
            self._state.timers.clear(Timer.CLOSE_RETRY, event.access_id.hex())
        else:
            self._state.timers.set(Timer.CLOSE_RETRY, event.access_id.hex(), self._state.now + RETRY_DELAY_S)

    def due(self, name: str) -> None:
        """Time to ask again, or for what is to be said by now."""
        access_id = bytes.fromhex(name)
        send = self._sent[access_id] = self._following.pop(access_id, self._sent[access_id])
        self._state.emit(send)

    def peer_dead(self, peer: str) -> None:
        """A life was taken for dead: what it has not answered waits."""
        parked = {id_: self._following.pop(id_, send) for id_, send in self._sent.items() if send.peer == peer}
        for access_id in parked:
            del self._sent[access_id]
            self._state.timers.clear(Timer.CLOSE_RETRY, access_id.hex())
        for send in parked.values():
            self._park(send)

    def peer_back(self, peer: str) -> None:
        """It shook hands again: it may still have what was opened before."""
        self._state.timers.clear(Timer.KNOCK, peer)
        self._knocks.pop(peer, None)
        for send in self._parked.pop(peer, {}).values():
            self._send(send)

    def peer_gone(self, peer: str) -> None:
        """It is forgotten."""
        self._state.timers.clear(Timer.KNOCK, peer)
        self._knocks.pop(peer, None)
        self._parked.pop(peer, None)

    def knock(self, peer: str) -> None:
        """Time to reach for an issuer that was taken for dead."""
        life = self._state.peers[peer]
        if life.replaced_by or not life.address:
            return
        self._peering.want(life.address, life.description.engine_id, life.description.incarnation, "")
        self._knocks[peer] += 1
        if self._knocks[peer] < KNOCKS:
            self._await_knock(peer)

    def clear(self) -> None:
        """The incarnation ends; what was sent was sent."""
        self._sent.clear()
        self._following.clear()
        self._unsent.clear()
        self._parked.clear()
        for peer in self._knocks:
            self._state.timers.clear(Timer.KNOCK, peer)
        self._knocks.clear()

    def _tell(self, send: SendClose) -> None:
        """Tells a life now, or when it is back; not one that is forgotten."""
        peer = self._state.peers.get(send.peer)
        if peer is None:
            return
        if peer.state is PeerState.DEAD:
            self._park(send)
        else:
            self._send(send)

    def _park(self, send: SendClose) -> None:
        self._parked.setdefault(send.peer, {})[send.closing.access_id] = send
        if send.proves:
            self._knocks[send.peer] = 0
            self._await_knock(send.peer)

    def _await_knock(self, peer: str) -> None:
        delay_s = RETRY_DELAY_S * 2 ** self._knocks[peer]
        self._state.timers.set(Timer.KNOCK, peer, self._state.now + delay_s)

    def _send(self, send: SendClose) -> None:
        if send.closing.access_id in self._sent:
            self._following[send.closing.access_id] = send
            return
        self._sent[send.closing.access_id] = send
        self._state.emit(send)
