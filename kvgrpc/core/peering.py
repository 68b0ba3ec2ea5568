"""Peering: reaching other leads, admitting them, and noticing that they are gone.

One handshake makes two lives known to each other, both ways. A life of a peer is dead when a newer one introduced
itself, or when it was silent for the grace; it never comes back, only a new handshake makes a new object. What a
death means for pulls and accesses is theirs to say (`Pulls.peer_dead`, `Serving.peer_dead`).
"""

from dataclasses import replace
from typing import Protocol

from kvgrpc.core.actions import Dial, HangUp, Introduced, MakeOffer, MapPeer, PeerConnected, UnmapPeer
from kvgrpc.core.compatibility import EngineDescription, check_compatible, protocol
from kvgrpc.core.endpoints import RankEndpoint
from kvgrpc.core.events import (
    ConnectPeer,
    DialFailed,
    EndpointOffered,
    HandshakeReceived,
    PeerAnswered,
    PeerMapped,
)
from kvgrpc.core.handshakes import Admission, Dialling, Shake
from kvgrpc.core.ids import peer_key
from kvgrpc.core.peers import Peer, PeerState
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import RankPath
from kvgrpc.errors import (
    Aborted,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    PreconditionFailed,
    Reason,
    Unavailable,
)

DEAD_KEPT = 64
"""Dead lives that ListPeers still shows."""


class Source(Protocol):
    """Who waits for peers: the pulls of this engine."""

    def peer_ready(self, address: str, peer: Peer) -> None: ...

    def peer_failed(self, address: str, error: KVGrpcError, expected: str | None) -> None: ...

    def peer_dead(self, peer: Peer) -> None: ...

    def peer_back(self, peer: Peer) -> None: ...

    def peer_gone(self, key: str) -> None: ...

    def memory_changed(self, peer: Peer) -> None: ...


class Issuer(Protocol):
    """Who serves peers: the accesses at this engine."""

    def peer_alive(self, peer: Peer) -> None: ...

    def peer_dead(self, peer: Peer) -> None: ...


class Peering:
    """All peers of this engine."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._dialling: dict[str, Dialling] = {}
        """By address."""
        self._shakes: dict[str, Shake] = {}
        """All under way, by key."""
        self._shaken = 0

    def attach(self, source: Source, issuer: Issuer) -> None:
        """Names who is told about peers; once, when the node is built."""
        self._source = source
        self._issuer = issuer

    def want(self, address: str, engine_id: str, incarnation: int, trace: str) -> Peer | None:
        """The peer if it is connected; else None: `peer_ready` or `peer_failed` follows for `address`.

        Raises Unavailable (PEER_UNREACHABLE) for a peer that is not connected and has no address.
        """
        peer = self._state.peers.get(peer_key(engine_id, incarnation))
        if peer and peer.usable:
            return peer
        if not address:
            raise Unavailable(
                Reason.PEER_UNREACHABLE, f"engine {engine_id} cannot be dialled: its grant names no address"
            )
        self._dial(address, engine_id, trace)
        return None

    def connect(self, event: ConnectPeer) -> None:
        """ConnectPeer: the handshake now, for whoever comes later."""
        if not event.address:
            raise InvalidRequest(Reason.INVALID_FIELD, "peer.address is required")
        _ = self._state.pool
        for peer in self._state.peers.values():
            if peer.dialled == event.address and peer.usable:
                _check_engine(event.engine_id, peer)
                self._state.reply(event.call.id, PeerConnected(peer.view(self._state.now)))
                return
        dial = self._dial(event.address, event.engine_id, event.call.trace)
        dial.calls.append((event.call.id, event.engine_id))

    def received(self, event: HandshakeReceived) -> None:
        """A peer introduces itself: verdict first, then both know each other."""
        state = self._state
        here = state.pool
        if event.expected_engine_id and event.expected_engine_id != here.engine_id:
            raise PreconditionFailed(
                Reason.WRONG_ENGINE, f"this is engine {here.engine_id}, not {event.expected_engine_id}"
            )
        check_compatible(here, event.peer)
        peer = self._admit(event.peer, event.endpoints)
        streaming = self._streams(peer.key)
        self._alive(peer)
        if not streaming:
            # The caller now has the grace to bring up its liveness stream.
            state.timers.set(Timer.PEER_GRACE, peer.key, state.now + state.limits.peer_grace_s)
        shake = Admission(self._new_key(), call_id=event.call.id, protocol=protocol(here, event.peer) or 0)
        self._shakes[shake.key] = shake
        state.timers.set(Timer.ADMIT, shake.key, state.now + state.limits.connect_timeout_s)
        self._map(peer)
        self._offer(shake)

    def answered(self, event: PeerAnswered) -> None:
        """The lead that we dialled introduced itself."""
        dial = self._dialling.get(event.address)
        if dial is None:
            return
        try:
            check_compatible(self._state.pool, event.peer)
            peer = self._admit(event.peer, event.endpoints)
        except KVGrpcError as error:
            self._give_up(dial, error)
            return
        peer.dialled = event.address
        dial.peer = peer.key
        self._alive(peer)
        self._map(peer)
        self._finish(dial, peer)

    def dial_failed(self, event: DialFailed) -> None:
        """The handshake failed, here or there."""
        dial = self._dialling.get(event.address)
        if dial is not None:
            self._give_up(dial, event.error)

    def endpoint_offered(self, event: EndpointOffered) -> None:
        """A rank made its endpoint; with the last one the handshake goes on."""
        shake = self._shakes.get(event.key)
        if shake is None:
            return
        shake.offers[event.rank] = event.endpoint
        if len(shake.offers) < self._state.pool.world_size:
            return
        del self._shakes[shake.key]
        if isinstance(shake, Dialling):
            self._state.emit(Dial(shake.address, shake.expected_engine_id, shake.endpoints(), shake.trace))
        else:
            assert isinstance(shake, Admission)
            self._state.timers.clear(Timer.ADMIT, shake.key)
            self._state.reply(shake.call_id, Introduced(shake.endpoints(), shake.protocol))

    def mapped(self, event: PeerMapped) -> None:
        """A rank tried to reach its peer."""
        peer = self._state.peers.get(event.peer)
        if peer is None or event.rank not in peer.mapping:
            return
        peer.mapping.discard(event.rank)
        peer.paths[event.rank] = RankPath(event.rank, event.rank, event.data_path, event.why, event.rejected)
        if not peer.mapping and not peer.reachable and peer.tried is not peer.endpoints:
            self._map(peer)
        for dial in [dial for dial in self._dialling.values() if dial.peer == peer.key]:
            self._finish(dial, peer)

    def alive(self, key: str) -> None:
        """The liveness stream stands."""
        peer = self._state.peers.get(key)
        if peer is not None and peer.state is not PeerState.DEAD:
            self._alive(peer)

    def silent(self, key: str) -> None:
        """The liveness stream is gone: the grace begins."""
        peer = self._state.peers.get(key)
        if peer is None or peer.state in (PeerState.DEAD, PeerState.SUSPECT):
            return
        peer.move(PeerState.SUSPECT)
        self._state.timers.set(Timer.PEER_GRACE, key, self._state.now + self._state.limits.peer_grace_s)

    def grace_over(self, key: str) -> None:
        """A peer was silent for the grace."""
        self._bury(self._state.peers[key])

    def connect_due(self, address: str) -> None:
        """A handshake that we started took too long."""
        dial = self._dialling[address]
        if dial.peer:
            # Our own ranks did not answer: the next handshake asks them again.
            peer = self._state.peers[dial.peer]
            peer.mapping.clear()
            peer.paths.clear()
        self._give_up(
            dial, Unavailable(Reason.PEER_UNREACHABLE, f"the handshake with {address} did not finish in time")
        )

    def admit_due(self, key: str) -> None:
        """Our ranks made no endpoint for a peer in time."""
        shake = self._shakes.pop(key)
        assert isinstance(shake, Admission)
        error = Unavailable(Reason.DEADLINE, "this engine's ranks made no endpoint in time", retry_delay_s=1.0)
        self._state.refuse(shake.call_id, error)

    def forget(self, key: str) -> None:
        """A peer no longer knows us: the next use of it dials again."""
        self._state.peers[key].forgotten = True

    def map_anew(self, key: str) -> None:
        """A posting failed: some transports are of no use after that, so the next use handshakes and maps again.

        Not when that is under way: the posting was one of the mapping before.
        """
        peer = self._state.peers[key]
        if peer.mapping or not peer.paths:
            return
        peer.forgotten = True
        peer.paths.clear()
        for rank in range(peer.description.world_size):
            self._state.emit(UnmapPeer(rank, peer.key))

    def end_all(self, error: KVGrpcError) -> None:
        """The incarnation ends: nobody knows the next one yet."""
        state = self._state
        for dial in list(self._dialling.values()):
            self._give_up(dial, error)
        for shake in self._shakes.values():
            assert isinstance(shake, Admission)
            state.refuse(shake.call_id, error)
        self._shakes.clear()
        for peer in state.peers.values():
            if peer.state is not PeerState.DEAD:
                self._hang_up(peer)
        state.peers.clear()

    def _dial(self, address: str, engine_id: str, trace: str) -> Dialling:
        dial = self._dialling.get(address)
        if dial is None:
            dial = Dialling(self._new_key(), address=address, expected_engine_id=engine_id, trace=trace)
            self._dialling[address] = self._shakes[dial.key] = dial
            self._state.timers.set(Timer.CONNECT, address, self._state.now + self._state.limits.connect_timeout_s)
            self._offer(dial)
        return dial

    def _new_key(self) -> str:
        self._shaken += 1
        return f"h{self._shaken}"

    def _offer(self, shake: Shake) -> None:
        for rank in range(self._state.pool.world_size):
            self._state.emit(MakeOffer(rank, shake.key))

    def _admit(self, description: EngineDescription, endpoints: tuple[RankEndpoint, ...]) -> Peer:
        """The object of this life: a new one, or the known one with what is new. Older lives are dead from now on.

        Which of two lives is older is not to be seen in their numbers: the one that introduces itself last is taken
        for the newer one. A message of the older that was long under way is refused while the newer one streams.
        Raises InvalidRequest, Aborted (INCARNATION_CHANGED) or Exhausted (LIMIT_EXCEEDED), and then nothing changed.
        """
        state = self._state
        key = peer_key(description.engine_id, description.incarnation)
        known = state.peers.get(key)
        others = [p for p in state.peers.values() if p.description.engine_id == description.engine_id and p.key != key]
        if sorted(endpoint.rank for endpoint in endpoints) != list(range(description.world_size)):
            raise InvalidRequest(Reason.INVALID_FIELD, "a handshake takes one endpoint for each rank")
        if known is not None and self._streams(known.replaced_by):
            raise Aborted(
                Reason.INCARNATION_CHANGED, f"a newer life of engine {description.engine_id} has introduced itself"
            )
        if known is None or known.state is PeerState.DEAD:
            living = sum(peer.state is not PeerState.DEAD and peer not in others for peer in state.peers.values())
            if living >= state.limits.peers:
                raise Exhausted(Reason.LIMIT_EXCEEDED, f"{living} peers are connected", retry_delay_s=1.0)
            state.peers.pop(key, None)  # so that the newest is last
            known = state.peers[key] = Peer(description, endpoints, state.now)
            self._source.peer_back(known)
        elif _lasting(known.description) != _lasting(description):
            raise InvalidRequest(Reason.INVALID_FIELD, "what an engine is does not change within one incarnation")
        elif known.description.memory_generation != description.memory_generation:
            self._unmap(known)
        known.description, known.endpoints, known.forgotten = description, endpoints, False
        for other in others:
            other.replaced_by = key
            self._bury(other)
        return known

    def _streams(self, key: str) -> bool:
        """Whether the liveness stream of a life stands."""
        peer = self._state.peers.get(key)
        connected = peer is not None and peer.state is PeerState.CONNECTED
        return connected and self._state.timers.when(Timer.PEER_GRACE, key) is None

    def _alive(self, peer: Peer) -> None:
        peer.heard = self._state.now
        peer.move(PeerState.CONNECTED)
        self._state.timers.clear(Timer.PEER_GRACE, peer.key)
        self._issuer.peer_alive(peer)

    def _map(self, peer: Peer) -> None:
        if peer.reachable or peer.mapping:
            return
        peer.paths.clear()
        peer.tried = peer.endpoints
        peer.mapping.update(range(self._state.pool.world_size))
        for endpoint in peer.endpoints:
            self._state.emit(MapPeer(endpoint.rank, peer.key, endpoint))

    def _unmap(self, peer: Peer) -> None:
        """Its memory was registered anew: what was known of it is void, and what is read there now is nothing."""
        self._source.memory_changed(peer)
        peer.paths.clear()
        peer.mapping.clear()
        for rank in range(peer.description.world_size):
            self._state.emit(UnmapPeer(rank, peer.key))

    def _finish(self, dial: Dialling, peer: Peer) -> None:
        """Once every rank has tried, whoever waits learns whether the peer can be used."""
        if peer.mapping:
            return
        if not peer.reachable:
            self._give_up(dial, _no_data_path(peer))
            return
        self._end_dial(dial)
        for call, expected in dial.calls:
            try:
                _check_engine(expected, peer)
            except KVGrpcError as error:
                self._state.refuse(call, error)
            else:
                self._state.reply(call, PeerConnected(peer.view(self._state.now)))
        self._source.peer_ready(dial.address, peer)

    def _give_up(self, dial: Dialling, error: KVGrpcError) -> None:
        """Fails whoever waits. A wrong engine fails only those who expected it; the others dial again."""
        self._end_dial(dial)
        expected = dial.expected_engine_id if error.reason is Reason.WRONG_ENGINE else None
        again = [call for call in dial.calls if expected not in (None, call[1])]
        for call, _ in [call for call in dial.calls if call not in again]:
            self._state.refuse(call, error)
        self._source.peer_failed(dial.address, error, expected)
        for call, engine_id in again:
            self._dial(dial.address, engine_id, dial.trace).calls.append((call, engine_id))

    def _end_dial(self, dial: Dialling) -> None:
        del self._dialling[dial.address]
        self._shakes.pop(dial.key, None)
        self._state.timers.clear(Timer.CONNECT, dial.address)

    def _bury(self, peer: Peer) -> None:
        if peer.state is PeerState.DEAD:
            return
        state = self._state
        peer.move(PeerState.DEAD)
        peer.mapping.clear()
        state.timers.clear(Timer.PEER_GRACE, peer.key)
        self._issuer.peer_dead(peer)
        self._source.peer_dead(peer)
        self._hang_up(peer)
        lost = Unavailable(Reason.PEER_UNREACHABLE, f"engine {peer.description.engine_id} died during the handshake")
        for dial in [dial for dial in self._dialling.values() if dial.peer == peer.key]:
            self._give_up(dial, lost)
        dead = [p.key for p in state.peers.values() if p.state is PeerState.DEAD]
        for key in dead[:-DEAD_KEPT]:
            del state.peers[key]
            self._source.peer_gone(key)

    def _hang_up(self, peer: Peer) -> None:
        for rank in range(peer.description.world_size):
            self._state.emit(UnmapPeer(rank, peer.key))
        self._state.emit(HangUp(peer.key))


def _lasting(description: EngineDescription) -> EngineDescription:
    """What stays the same for a whole incarnation."""
    return replace(description, memory_generation=0, address="", features=())


def _check_engine(expected: str, peer: Peer) -> None:
    found = peer.description.engine_id
    if expected and found != expected:
        raise PreconditionFailed(Reason.WRONG_ENGINE, f"engine {found} answers there, {expected} was expected")


def _no_data_path(peer: Peer) -> KVGrpcError:
    path = next(path for path in peer.paths.values() if not path.data_path)
    reasons = "; ".join(f"{name}: {why}" for name, why in path.rejected) or "none is enabled on both sides"
    return PreconditionFailed(
        Reason.NO_DATA_PATH,
        f"no data path reaches rank {path.rank} of engine {peer.description.engine_id} ({reasons})",
    )
