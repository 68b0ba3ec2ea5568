"""Closing accesses at their issuers: sent until answered, or until the issuer's life is over.

An issuer that does not know that a reader is gone would keep its blocks until the lease runs out. An issuer that was
taken for dead may live and have missed nothing: its closings wait for it to come back.
"""

from kvgrpc.core.actions import SendClose
from kvgrpc.core.events import CloseAnswered, Closing
from kvgrpc.core.pull import Pull
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer

RETRY_DELAY_S = 1.0


class Closings:
    """Closings that no issuer has answered yet."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._sent: dict[bytes, SendClose] = {}
        self._unsent: dict[str, dict[bytes, SendClose]] = {}
        """By address, for issuers that are still being reached."""
        self._parked: dict[str, dict[bytes, SendClose]] = {}
        """By life, for issuers that were taken for dead."""

    def close(self, pull: Pull, *, dropped: bool) -> None:
        """Closes a pull's access. A drop is worth a connection that is under way; a failure only an open access."""
        closing = Closing(pull.access_id, dropped, quiesced=not pull.postings, token=pull.token)
        send = SendClose(pull.peer, closing, self._state.incarnation, pull.trace)
        if pull.peer in self._parked:
            self._parked[pull.peer][pull.access_id] = send
        elif pull.peer:
            self._send(send)
        elif dropped:
            self._unsent.setdefault(pull.claims.address, {})[pull.access_id] = send

    def reached(self, address: str, peer: str) -> None:
        """The issuer at an address is connected."""
        for send in self._unsent.pop(address, {}).values():
            self._send(SendClose(peer, send.closing, send.incarnation, send.trace))

    def unreachable(self, address: str) -> None:
        """The issuer at an address cannot be reached; its leases run out by themselves."""
        self._unsent.pop(address, None)

    def answered(self, event: CloseAnswered) -> None:
        """The issuer knows, or is asked again."""
        if event.access_id not in self._sent:
            return
        if event.answered:
            del self._sent[event.access_id]
            self._state.timers.clear(Timer.CLOSE_RETRY, event.access_id.hex())
        else:
            self._state.timers.set(Timer.CLOSE_RETRY, event.access_id.hex(), self._state.now + RETRY_DELAY_S)

    def due(self, name: str) -> None:
        """Time to ask again."""
        self._state.emit(self._sent[bytes.fromhex(name)])

    def peer_dead(self, peer: str) -> None:
        """A life was taken for dead: what it has not answered waits."""
        parked = {id_: send for id_, send in self._sent.items() if send.peer == peer}
        for access_id in parked:
            del self._sent[access_id]
            self._state.timers.clear(Timer.CLOSE_RETRY, access_id.hex())
        self._parked[peer] = parked

    def peer_back(self, peer: str) -> None:
        """It shook hands again: it may still have what was opened before."""
        for send in self._parked.pop(peer, {}).values():
            self._send(send)

    def peer_gone(self, peer: str) -> None:
        """It is forgotten."""
        self._parked.pop(peer, None)

    def clear(self) -> None:
        """The incarnation ends; what was sent was sent."""
        self._sent.clear()
        self._unsent.clear()
        self._parked.clear()

    def _send(self, send: SendClose) -> None:
        self._sent[send.closing.access_id] = send
        self._state.emit(send)
