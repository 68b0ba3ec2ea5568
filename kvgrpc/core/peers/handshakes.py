"""Handshakes with other leads, begun here or there.

One handshake makes two lives known to each other, both ways. `liveness` decides what becomes of the lives.
"""

from kvgrpc.core.actions import Dial, Introduced, MakeOffer, PeerConnected
from kvgrpc.core.events import (
    CallAbandoned,
    ConnectPeer,
    DialFailed,
    EndpointOffered,
    HandshakeReceived,
    MeetingBegan,
    PeerAnswered,
    PeerMapped,
    ProofRefused,
)
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.peers.proofs import NEXT_LIFE_DELAY_S, living_at
from kvgrpc.core.peers.refusals import RETRY_DELAY_S, check_engine, no_data_path
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.handshake import Handshake, IncomingHandshake, OutgoingHandshake
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.compatibility import check_compatible, protocol
from kvgrpc.core.values.ids import peer_key
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, PreconditionFailed, Reason, Unavailable, full, invalid

GONE = DeadlineExceeded(
    Reason.DEADLINE, "the caller does not wait for this handshake any more", metadata={"phase": "handshake"}
)
ADMISSIONS_OF_A_LIFE = 4
"""Maximum number of unanswered handshakes of one life that wait for our ranks."""
MEETING_S = 30.0
"""Extra time for a handshake whose ranks meet, in seconds: either rank may load a library first, which takes many
seconds on a busy machine.
"""
NOT_ITS_TO_SAY = frozenset({Reason.CANCELLED, Reason.PEER_LOST})
"""Reasons that a peer cannot give for refusing a handshake: a refusal neither gives up a move nor proves a death."""


class Handshakes:
    """All handshakes of this engine."""

    def __init__(self, state: NodeState, liveness: PeerLiveness) -> None:
        self._state, self._peers = state, state.peers
        self._liveness = liveness
        self._shaken = 0

    def check_room(self, address: str, engine_id: str, incarnation: int, connection: str) -> None:
        """Checks a caller before `want`. Raises Exhausted if `want` would begin a handshake, and the caller has caused
        too many of late.
        """
        if address and address not in self._peers.dials and self._usable(address, engine_id, incarnation) is None:
            self._peers.dial_budget.check(connection, self._state.limits, self._state.now)

    def want(self, address: str, engine_id: str, incarnation: int, trace: str, connection: str = "") -> Peer | None:
        """Returns the peer if it is connected. Else returns None, and `peer_ready` or `peer_failed` follows for
        `address`. `connection` names the caller that causes the handshake.

        Raises Unavailable (PEER_UNREACHABLE) for a peer that is not connected and has no address.
        """
        peer = self._usable(address, engine_id, incarnation)
        if peer is not None:
            return peer
        if not address:
            raise Unavailable(
                Reason.PEER_UNREACHABLE, f"engine {engine_id} cannot be dialled: its grant names no address"
            )
        self._dial(address, engine_id, trace, connection)
        return None

    def connect(self, event: ConnectPeer) -> None:
        """Handles ConnectPeer: shakes hands now, for later moves."""
        if not event.address:
            raise invalid("peer.address", "is required")
        _ = self._state.life.engine
        peer = self._at(event.address)
        if peer is not None:
            check_engine(event.engine_id, peer)
            self._state.reply(event.call.id, PeerConnected(peer.key))
            return
        self.check_room(event.address, event.engine_id, 0, event.call.connection)
        if event.validate_only:
            self._state.reply(event.call.id, PeerConnected(""))
            return
        dial = self._dial(event.address, event.engine_id, event.call.trace, event.call.connection)
        dial.calls[event.call.id] = event.engine_id

    def abandoned(self, event: CallAbandoned) -> None:
        """Refuses a ConnectPeer whose caller no longer waits. The handshake goes on, for others."""
        for dial in self._peers.dials.values():
            if dial.calls.pop(event.call_id, None) is not None:
                self._state.refuse(event.call_id, GONE)
                return

    def received(self, event: HandshakeReceived) -> None:
        """Admits a peer that introduces itself, and answers once our ranks have made their endpoints."""
        state = self._state
        here = state.life.engine
        if event.expected_engine_id and event.expected_engine_id != here.engine_id:
            raise PreconditionFailed(
                Reason.WRONG_ENGINE,
                f"this is engine {here.engine_id}, not {event.expected_engine_id}",
                metadata={"engine": here.engine_id},
            )
        check_compatible(here, event.peer)
        peer = self._liveness.admit_caller(event)
        self._make_room(peer)
        spoken, key = protocol(here, event.peer) or 0, self._new_key()
        shake = IncomingHandshake(key, peer.key, call_id=event.call.id, peer=peer, protocol=spoken, proof=peer.asks[0])
        self._peers.handshakes[shake.key] = shake
        state.timers.set(Timer.ADMIT, shake.key, state.now + state.limits.connect_timeout_s)
        self._liveness.map(peer)
        self._offer(shake)

    def answered(self, event: PeerAnswered) -> None:
        """Admits the lead that we dialled, or hangs up: it hears us from now on."""
        dial = self._peers.dials.get(event.address)
        if dial is None:
            self._liveness.answered_late(event)
            return
        life = peer_key(event.peer.engine_id, event.peer.incarnation)
        if dial.proving not in ("", life):
            self._liveness.also_told(event.peer, dial.to, event.shows)
            self._other_life(dial, life, event.shows)
            return
        try:
            check_compatible(self._state.life.engine, event.peer)
            peer = self._liveness.admit(event, dial.to)
        except KVGrpcError as error:
            self._liveness.hang_up_stranger(event.peer)
            self._give_up(dial, error)
            return
        peer.dialled = dial.to
        dial.peer = peer.key
        peer.told = dial.told
        self._liveness.alive(peer)
        self._liveness.map(peer)
        if peer.meets and peer.mapping:
            self._wait_longer(dial)
        self._finish(dial, peer)

    def dial_failed(self, event: DialFailed) -> None:
        """Retries or gives up a handshake that failed, here or there."""
        dial = self._peers.dials.get(event.address)
        if dial is None:
            return
        error = event.error
        if error.reason is Reason.NOT_PROVED and self._try_again(dial, error):
            return
        if error.reason in NOT_ITS_TO_SAY:
            error = PreconditionFailed(Reason.PEER_FAILED, error.sentence)
        self._give_up(dial, error)

    def endpoint_offered(self, event: EndpointOffered) -> None:
        """Takes a rank's endpoint; after the last one the handshake goes on."""
        self._peers.on_device |= event.endpoint.on_device
        shake = self._peers.handshakes.get(event.key)
        if shake is None:
            return
        shake.offers[event.rank] = event.endpoint
        if len(shake.offers) < self._state.life.engine.world_size:
            return
        del self._peers.handshakes[shake.key]
        generation = self._state.life.engine.memory_generation
        if isinstance(shake, OutgoingHandshake):
            shake.told = generation
            self._call(shake)
        else:
            assert isinstance(shake, IncomingHandshake)
            self._state.timers.clear(Timer.ADMIT, shake.key)
            shake.peer.told = generation
            engine = self._state.life.engine
            told = self._peers.networks.usable(shake.endpoints(), shake.peer.address, engine.address)
            answer = Introduced(engine, shake.peer.description, told, shake.protocol, shake.proof)
            self._state.reply(shake.call_id, answer)

    def meeting_began(self, event: MeetingBegan) -> None:
        """Extends the deadlines of handshakes whose ranks meet: loading a library takes long."""
        peer = self._liveness.meets(event)
        if peer is None:
            return
        for dial in [dial for dial in self._peers.dials.values() if dial.peer == peer.key]:
            self._wait_longer(dial)

    def mapped(self, event: PeerMapped) -> None:
        """Takes a rank's result of mapping a peer; after the last one the handshake ends."""
        peer = self._liveness.mapped(event)
        if peer is None:
            return
        for dial in [dial for dial in self._peers.dials.values() if dial.peer == peer.key]:
            self._finish(dial, peer)

    def dial_again(self, address: str) -> None:
        """Dials again: the stream of this engine's last life may have ended there by now."""
        self._call(self._peers.dials[address])

    def proof_refused(self, event: ProofRefused) -> None:
        """Shakes hands again with a peer that refuses our proof, to settle which proof it takes."""
        if self._peers.live_on(event.peer):
            peer = self._peers.lives[event.peer]
            peer.forgotten = True
            if peer.address:
                self._dial(peer.address, peer.description.engine_id, "")

    def connect_due(self, address: str) -> None:
        """Gives up a handshake of ours that took too long."""
        dial = self._peers.dials[address]
        if dial.peer:
            self._liveness.unmap(self._peers.lives[dial.peer])  # our own ranks did not answer: they are asked again
        late = f"the handshake with {address} did not finish in time"
        self._give_up(dial, Unavailable(Reason.PEER_UNREACHABLE, late, retry_delay_s=RETRY_DELAY_S))

    def admit_due(self, key: str) -> None:
        """Refuses a peer for which our ranks made no endpoint in time."""
        shake = self._peers.handshakes.pop(key)
        assert isinstance(shake, IncomingHandshake)
        error = Unavailable(
            Reason.DEADLINE,
            "this engine's ranks made no endpoint in time",
            retry_delay_s=RETRY_DELAY_S,
            metadata={"phase": "handshake"},
        )
        self._state.refuse(shake.call_id, error)

    def end_all(self, error: KVGrpcError) -> None:
        """Ends every handshake: the incarnation ends."""
        for dial in list(self._peers.dials.values()):
            self._give_up(dial, error)
        for shake in list(self._peers.handshakes.values()):
            assert isinstance(shake, IncomingHandshake)
            self._turn_away(shake, error)

    def rekey_ends(self) -> None:
        """Ends handshakes under way: memory was registered again, and their endpoints are void."""
        again = "this engine registered its memory again"
        self.end_all(Unavailable(Reason.MEMORY_CHANGED, again, retry_delay_s=RETRY_DELAY_S))

    def peer_dead(self, peer: Peer) -> None:
        """Fails the handshakes with a life that ended."""
        engine_id = peer.description.engine_id
        lost = Unavailable(
            Reason.PEER_UNREACHABLE,
            f"engine {engine_id} died during the handshake",
            retry_delay_s=RETRY_DELAY_S,
            metadata={"engine": engine_id},
        )
        for dial in [dial for dial in self._peers.dials.values() if dial.peer == peer.key]:
            self._give_up(dial, lost)
        for shake in self._admissions(peer):
            self._turn_away(shake, lost)

    def _admissions(self, peer: Peer) -> list[IncomingHandshake]:
        """Returns the unanswered handshakes of one life, oldest first."""
        return [
            shake
            for shake in self._peers.handshakes.values()
            if isinstance(shake, IncomingHandshake) and shake.peer is peer
        ]

    def _make_room(self, peer: Peer) -> None:
        """Refuses a life's oldest unanswered handshake if it has too many."""
        under_way = self._admissions(peer)
        if len(under_way) >= ADMISSIONS_OF_A_LIFE:
            self._turn_away(under_way[0], full("this life has repeated its handshake since", ADMISSIONS_OF_A_LIFE))

    def _turn_away(self, shake: IncomingHandshake, error: KVGrpcError) -> None:
        del self._peers.handshakes[shake.key]
        self._state.timers.clear(Timer.ADMIT, shake.key)
        self._state.refuse(shake.call_id, error)

    def _at(self, address: str, engine_id: str = "", incarnation: int = 0) -> Peer | None:
        """Returns the usable peer reached under an address, for callers that do not know its incarnation."""
        found = (peer for peer in self._peers.lives.values() if peer.dialled == address and peer.usable)
        peer = None if incarnation else next(found, None)
        return peer if peer is None or engine_id in ("", peer.description.engine_id) else None

    def _usable(self, address: str, engine_id: str, incarnation: int) -> Peer | None:
        peer = self._peers.lives.get(peer_key(engine_id, incarnation)) or self._at(address, engine_id, incarnation)
        return peer if peer and peer.usable else None

    def _dial(self, address: str, engine_id: str, trace: str, connection: str = "") -> OutgoingHandshake:
        dial = self._peers.dials.get(address)
        if dial is None:
            self._peers.dial_budget.begin(connection, self._state.now)
            dial = OutgoingHandshake(
                self._new_key(), f"dial {address}", address=address, to=address, expected_engine_id=engine_id,
                proving=living_at(self._peers.lives.values(), address, engine_id), trace=trace,
            )  # fmt: skip
            self._peers.dials[address] = self._peers.handshakes[dial.key] = dial
            self._state.timers.set(Timer.CONNECT, address, self._state.now + self._state.limits.connect_timeout_s)
            self._offer(dial)
        return dial

    def _other_life(self, dial: OutgoingHandshake, life: str, shows: bytes) -> None:
        """Calls once more after another life answered than the intended one. The first call showed it the intended
        life's secrets, which admit nobody; the second shows what this life told us.
        """
        if dial.again:
            self._give_up(dial, PreconditionFailed(Reason.PEER_FAILED, f"several engines answer at {dial.address}"))
            return
        known = self._peers.lives.get(life)
        dial.again, dial.shows = True, (shows,)
        dial.proving = life if known is not None and known.met and known.lives_at(dial.to) else ""
        self._call(dial)

    def _call(self, dial: OutgoingHandshake) -> None:
        """Shakes hands at the address of a dial."""
        known = self._peers.lives.get(dial.proving)
        proofs, asks = (known.shows, known.asks[0]) if known is not None else (dial.shows, b"")
        to = "" if dial.to == dial.address else dial.to
        told = self._peers.networks.usable(dial.endpoints(), dial.to, self._state.life.engine.address)
        self._state.emit(Dial(dial.address, dial.expected_engine_id, told, dial.trace, to, proofs, asks))

    def _try_again(self, dial: OutgoingHandshake, error: KVGrpcError) -> bool:
        """Tries again after NOT_PROVED. While an earlier life of ours is connected there: later. If this life is known
        there: once more, with the proofs that the peer gave us. Proofs go only to an address of the peer's life.
        """
        if isinstance(error, Unavailable):
            self._state.timers.set(Timer.DIAL_AGAIN, dial.address, self._state.now + NEXT_LIFE_DELAY_S)
            return True
        peers = self._peers.lives
        here = peers.get(living_at(peers.values(), dial.address, dial.expected_engine_id))
        known = peers.get(peer_key(error.engine_id, error.incarnation), here)
        if known is None or dial.again or not known.address:
            return False
        dial.again, dial.proving = True, known.key
        if not known.lives_at(dial.address):
            dial.to = known.address
        self._call(dial)
        return True

    def _wait_longer(self, dial: OutgoingHandshake) -> None:
        """Extends the deadline of a dial, only once: a peer that states other endpoints makes our ranks meet anew."""
        if dial.longer:
            return
        dial.longer = True
        due = self._state.now + self._state.limits.connect_timeout_s + MEETING_S
        self._state.timers.set(Timer.CONNECT, dial.address, due)

    def _new_key(self) -> str:
        self._shaken += 1
        return f"h{self._shaken}"

    def _offer(self, shake: Handshake) -> None:
        for rank in range(self._state.life.engine.world_size):
            self._state.emit(MakeOffer(rank, shake.key, shake.with_whom))

    def _finish(self, dial: OutgoingHandshake, peer: Peer) -> None:
        """Tells waiting callers and moves, once every rank has tried, whether the peer can be used."""
        if peer.mapping:
            return
        if not peer.reachable:
            self._give_up(dial, no_data_path(peer))
            return
        self._end_dial(dial)
        for call, expected in dial.calls.items():
            try:
                check_engine(expected, peer)
            except KVGrpcError as error:
                self._state.refuse(call, error)
            else:
                self._state.reply(call, PeerConnected(peer.key))
        self._state.react.peer_ready(dial.address, peer)

    def _give_up(self, dial: OutgoingHandshake, error: KVGrpcError) -> None:
        """Fails waiting callers and moves. A wrong engine fails only those that expected it; the others dial again."""
        self._end_dial(dial)
        lead = self._peers.lives.get(dial.peer)
        lead = lead if lead is not None and lead.state is not PeerState.DEAD else None
        expected = dial.expected_engine_id if error.reason is Reason.WRONG_ENGINE else None
        again = {call: engine_id for call, engine_id in dial.calls.items() if expected not in (None, engine_id)}
        for call in [call for call in dial.calls if call not in again]:
            self._state.refuse(call, error)
        self._state.react.peer_failed(dial.address, error, expected, lead)
        for call, engine_id in again.items():
            self._dial(dial.address, engine_id, dial.trace).calls[call] = engine_id

    def _end_dial(self, dial: OutgoingHandshake) -> None:
        del self._peers.dials[dial.address]
        self._peers.handshakes.pop(dial.key, None)
        self._state.timers.clear(Timer.CONNECT, dial.address)
        self._state.timers.clear(Timer.DIAL_AGAIN, dial.address)
