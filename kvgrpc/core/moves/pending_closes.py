"""Closes accesses at their issuers: a close is retried until it is answered, or until the issuer's life is over. An
issuer that goes on refusing a close is told again after its next handshake.

An issuer that misses a reader's close keeps its blocks until the lease runs out; one that misses a writer's close keeps
them for ever. An issuer declared dead may still live, so its closes wait for it to come back. If its blocks may wait
for this side's proof that it writes no more, it is dialled again a few times: no other move might do so. A cancelled
source closes its readers' accesses in the same way.

Unanswered closes are weighed. When they weigh too much, the life with most of them loses half: the oldest first, but
last those that prove that writes have ended. That frees nothing at the issuer. Its leases end by their own time, and
its blocks in quarantine stay there until another proof comes, or a re-key.
"""

from dataclasses import replace

from kvgrpc.core.actions import SendClose
from kvgrpc.core.events import AccessClosing, CloseAnswered, CloseOutcome
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import Move, MoveStage
from kvgrpc.core.state.waiting_rows import Closes
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.timers import Timer
from kvgrpc.errors import KVGrpcError

RETRY_DELAY_S = 1.0
RETRIES = 10
"""Number of times that a close is sent again, or a dead issuer dialled again. Each delay is twice the last: 17 minutes
in all.
"""


class PendingCloses:
    """Closes that no issuer has answered yet."""

    def __init__(self, state: NodeState, handshakes: Handshakes) -> None:
        self._state = state
        self._handshakes = handshakes

    @property
    def _closes(self) -> Closes:
        return self._state.moves.closes

    def close(self, move: Move, outcome: CloseOutcome, message: str = "") -> None:
        """Closes a move's access. While its issuer is still being reached, a close waits for the connection; a FAILED
        close does so only if the access may be open.
        """
        address = move.claims.address
        access_id = move.access_id or (move.registration_id if address else b"")
        if not access_id:
            return
        rests = not (move.postings or move.writes_may_land)
        closing = AccessClosing(access_id, outcome, quiesced=rests, token=move.token, message=message)
        peer, incarnation = move.peer or move.asked_of, self._state.life.incarnation
        send = SendClose(peer, closing, incarnation, move.trace, proves=rests and move.writes)
        reached = move.stage is MoveStage.ENDED and access_id not in self._closes.unsent.get(address, {})
        if move.peer or reached:
            self._tell(send)
        elif outcome is not CloseOutcome.FAILED or move.asked_of:
            self._closes.unsent.setdefault(address, {})[access_id] = send

    def cancel_reader(self, access: Access, message: str, trace: str) -> None:
        """Tells the lead that opened an access here that its transfer was cancelled: that lead closes the access."""
        closing = AccessClosing(
            access.id, CloseOutcome.CANCELLED, quiesced=True, token=access.opening.token, message=message
        )
        self._tell(SendClose(access.peer, closing, self._state.life.incarnation, trace))

    def reader_lost(self, access: Access, message: str, trace: str) -> None:
        """Tells the lead that opened an access here that its blocks are gone: that lead asks by renewing."""
        closing = AccessClosing(
            access.id, CloseOutcome.FAILED, quiesced=True, token=access.opening.token, message=message
        )
        self._tell(SendClose(access.peer, closing, self._state.life.incarnation, trace))

    def peer_ready(self, address: str, peer: Peer) -> None:
        """Sends the closes that waited for the issuer at an address, and at once those that it refused before."""
        self._tell_unsent(address, peer)
        for access_id, send in list(self._closes.kept.get(peer.key, {}).items()):
            self._closes.tries.pop(access_id, None)
            if access_id not in self._closes.sent:
                self._send(send)
            elif self._state.timers.when(Timer.CLOSE_RETRY, access_id.hex()) is not None:
                self._state.timers.clear(Timer.CLOSE_RETRY, access_id.hex())
                self.due(access_id.hex())

    def peer_failed(self, address: str, error: KVGrpcError, expected: str | None, lead: Peer | None) -> None:  # noqa: ARG002
        """Handles an issuer that cannot be used now. An issuer that answered is told; a known life that may have an
        access is told later. At other issuers the leases run out by themselves.
        """
        if lead is not None:
            self._tell_unsent(address, lead)
            return
        for send in self._closes.unsent.pop(address, {}).values():
            self._tell(send)

    def answered(self, event: CloseAnswered) -> None:
        """Drops an answered close, or retries it."""
        sent = self._closes.sent.get(event.access_id)
        if sent is None or (sent.closing.quiesced and not event.quiesced):
            return  # a late answer to an earlier close
        if event.access_id in self._closes.following:
            self._closes.tries.pop(event.access_id, None)
            self._state.timers.clear(Timer.CLOSE_RETRY, event.access_id.hex())
            self.due(event.access_id.hex())
        elif event.answered:
            self._forget(sent)
        else:
            self._retry_later(sent)

    def due(self, name: str) -> None:
        """Sends a close again, or the one that follows it."""
        sent = self._closes.sent.pop(bytes.fromhex(name))
        following = self._closes.following.pop(bytes.fromhex(name), None)
        if following is not None:
            self._drop(sent)
        self._send(following or sent)

    def peer_dead(self, peer: Peer) -> None:
        """Parks the unanswered closes of a dead life."""
        kept = self._closes.kept.get(peer.key, {})
        last = [self._closes.following.get(access_id, send) for access_id, send in kept.items()]
        for send in list(kept.values()):
            self._forget(send)
        for send in last:
            self._tell(send)

    def peer_back(self, peer: Peer) -> None:
        """Sends the parked closes of a life that shook hands again: it may still have its old accesses."""
        self._state.timers.clear(Timer.DEAD_PEER_RETRY, peer.key)
        self._closes.retries.pop(peer.key, None)
        for send in self._closes.parked(peer.key):
            self._send(send)

    def peer_forgotten(self, peer: str) -> None:
        """Drops the parked closes of a life that is forgotten."""
        self._state.timers.clear(Timer.DEAD_PEER_RETRY, peer)
        self._closes.retries.pop(peer, None)
        for send in self._closes.parked(peer):
            self._drop(send)

    def retry_dead_peer(self, peer: str) -> None:
        """Dials an issuer again that was declared dead."""
        life = self._state.peers.lives[peer]
        if not life.address:
            return
        # A life that claimed to be the next one may have lied: the claim counts only while that life lives.
        if not self._state.peers.live_on(life.replaced_by):
            self._handshakes.want(life.address, life.description.engine_id, life.description.incarnation, "")
        self._closes.retries[peer] += 1
        if self._closes.retries[peer] < RETRIES:
            self._await_retry(peer)

    def _tell_unsent(self, address: str, peer: Peer) -> None:
        for send in self._closes.unsent.pop(address, {}).values():
            self._tell(replace(send, peer=send.peer or peer.key))

    def _retry_later(self, send: SendClose) -> None:
        """Sends a close again after a delay, or after the issuer's next handshake if it was refused too many times."""
        access_id = send.closing.access_id
        tries = self._closes.tries.get(access_id, 0)
        if tries == RETRIES:
            self._not_sent(access_id)
            return
        self._closes.tries[access_id] = tries + 1
        delay_s = RETRY_DELAY_S * 2**tries
        self._state.timers.set(Timer.CLOSE_RETRY, access_id.hex(), self._state.now + delay_s)

    def _not_sent(self, access_id: bytes) -> None:
        """Sends a close no more until its issuer's next handshake."""
        self._closes.sent.pop(access_id, None)
        self._closes.following.pop(access_id, None)
        self._closes.tries.pop(access_id, None)
        self._state.timers.clear(Timer.CLOSE_RETRY, access_id.hex())

    def _forget(self, send: SendClose) -> None:
        """Forgets a close, and the one that follows it."""
        self._not_sent(send.closing.access_id)
        self._drop(send)

    def _keep(self, send: SendClose) -> None:
        """Keeps a close until it is answered, and makes room if it is one too many."""
        access_id, ledger = send.closing.access_id, self._state.ledger
        rows = self._closes.kept.setdefault(send.peer, {})
        before = rows.get(access_id)
        rows[access_id] = send
        ledger.remember(RowKind.CLOSE, send.kept_bytes - (before.kept_bytes if before else 0))
        while self._closes.kept and ledger.by_kind[RowKind.CLOSE] > ledger.limits.remembered_bytes:
            most = list(max(self._closes.kept.values(), key=len).values())
            for old in sorted(most, key=lambda send: send.proves)[: len(most) // 2 + 1]:
                self._forget(old)

    def _drop(self, send: SendClose) -> None:
        """Keeps a close no more."""
        rows = self._closes.kept[send.peer]
        dropped = rows.pop(send.closing.access_id)
        if not rows:
            del self._closes.kept[send.peer]
        self._state.ledger.remember(RowKind.CLOSE, -dropped.kept_bytes)

    def _tell(self, send: SendClose) -> None:
        """Sends a close now, or when its life is back; a forgotten life is not told."""
        peer = self._state.peers.lives.get(send.peer)
        if peer is None:
            return
        if peer.state is PeerState.DEAD:
            self._park(send)
        else:
            self._send(send)

    def _park(self, send: SendClose) -> None:
        self._keep(send)
        if send.proves:
            self._closes.retries[send.peer] = 0
            self._await_retry(send.peer)

    def _await_retry(self, peer: str) -> None:
        delay_s = RETRY_DELAY_S * 2 ** self._closes.retries[peer]
        self._state.timers.set(Timer.DEAD_PEER_RETRY, peer, self._state.now + delay_s)

    def _send(self, send: SendClose) -> None:
        if send.closing.access_id in self._closes.sent:
            self._closes.following[send.closing.access_id] = send
            return
        self._closes.sent[send.closing.access_id] = send
        self._state.emit(send)
        self._keep(send)
