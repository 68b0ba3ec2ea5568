"""Peering: reaching other leads, admitting them, and noticing that they are gone.

One handshake makes two lives known to each other, both ways. A life of a peer is dead when a newer one introduced
itself, or when it was silent for the grace; it never comes back, only a new handshake makes a new object. What a
death means for pulls and accesses is theirs to say (`Pulls.peer_dead`, `Serving.peer_dead`).
"""

from dataclasses import dataclass, field
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
from kvgrpc.core.ids import peer_key
from kvgrpc.core.peers import Peer, PeerState
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import RankPath
from kvgrpc.errors import InvalidRequest, KVGrpcError, PreconditionFailed, Reason, Unavailable

DEAD_KEPT = 64
"""Dead lives that ListPeers still shows."""


class Source(Protocol):
    """Who waits for peers: the pulls of this engine."""

    def peer_ready(self, address: str, peer: Peer) -> None: ...

    def peer_failed(self, address: str, error: KVGrpcError) -> None: ...

    def peer_dead(self, peer: Peer) -> None: ...


class Issuer(Protocol):
    """Who serves peers: the accesses at this engine."""

    def peer_alive(self, peer: Peer) -> None: ...

    def peer_dead(self, peer: Peer) -> None: ...


@dataclass(eq=False)
class _Dialling:
    """A handshake that we started."""

    address: str
    expected_engine_id: str
    trace: str
    calls: list[int] = field(default_factory=list)
    offers: dict[int, RankEndpoint] = field(default_factory=dict)
    peer: str = ""


@dataclass(eq=False)
class _Admission:
    """A handshake that a peer started."""

    call_id: int
    protocol: int
    offers: dict[int, RankEndpoint] = field(default_factory=dict)


class Peering:
    """All peers of this engine."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._dialling: dict[str, _Dialling] = {}
        self._admissions: dict[str, _Admission] = {}
        self._admitted = 0

    def attach(self, source: Source, issuer: Issuer) -> None:
        """Names who is told about peers; once, when the node is built."""
        self._source = source
        self._issuer = issuer

    def want(self, address: str, engine_id: str, incarnation: int, trace: str) -> Peer | None:
        """The peer if it is connected; else None: `peer_ready` or `peer_failed` follows for `address`."""
        peer = self._state.peers.get(peer_key(engine_id, incarnation))
        if peer and peer.state is PeerState.CONNECTED and peer.reachable and not peer.forgotten:
            return peer
        self._dial(address, engine_id, trace)
        return None

    def connect(self, event: ConnectPeer) -> None:
        """ConnectPeer: the handshake now, for whoever comes later."""
        if not event.address:
            raise InvalidRequest(Reason.INVALID_FIELD, "peer.address is required")
        _ = self._state.pool
        for peer in self._state.peers.values():
            if peer.dialled == event.address and peer.state is PeerState.CONNECTED and peer.reachable:
                self._check_engine(event.engine_id, peer.description)
                self._state.reply(event.call.id, PeerConnected(peer.view(self._state.now)))
                return
        self._dial(event.address, event.engine_id, event.call.trace).calls.append(event.call.id)

    def received(self, event: HandshakeReceived) -> None:
        """A peer introduces itself: verdict first, then both know each other."""
        state = self._state
        here = state.pool
        if event.expected_engine_id and event.expected_engine_id != here.engine_id:
            raise PreconditionFailed(
                Reason.WRONG_ENGINE, f"this is engine {here.engine_id}, not {event.expected_engine_id}"
            )
        check_compatible(here, event.peer)
        version = protocol(here, event.peer)
        assert version is not None
        peer = self._admit(event.peer, event.endpoints)
        self._alive(peer)
        self._admitted += 1
        name = f"in-{self._admitted}"
        self._admissions[name] = _Admission(event.call.id, version)
        self._map(peer)
        self._offer(name)

    def answered(self, event: PeerAnswered) -> None:
        """The lead that we dialled introduced itself."""
        dial = self._dialling.get(event.address)
        if dial is None:
            return
        try:
            self._check_engine(dial.expected_engine_id, event.peer)
            check_compatible(self._state.pool, event.peer)
        except KVGrpcError as error:
            self._give_up(dial, error)
            return
        peer = self._admit(event.peer, event.endpoints)
        peer.dialled = event.address
        dial.peer = peer.key
        self._map(peer)
        self._finish(dial, peer)

    def dial_failed(self, event: DialFailed) -> None:
        """The handshake failed, here or there."""
        dial = self._dialling.get(event.address)
        if dial is not None:
            self._give_up(dial, event.error)

    def endpoint_offered(self, event: EndpointOffered) -> None:
        """A rank made its endpoint; with the last one the handshake goes on."""
        world = self._state.pool.world_size
        dial = self._dialling.get(event.key)
        if dial is not None:
            dial.offers[event.rank] = event.endpoint
            if len(dial.offers) == world:
                endpoints = tuple(dial.offers[rank] for rank in range(world))
                self._state.emit(Dial(dial.address, dial.expected_engine_id, endpoints, dial.trace))
            return
        admission = self._admissions.get(event.key)
        if admission is not None:
            admission.offers[event.rank] = event.endpoint
            if len(admission.offers) == world:
                del self._admissions[event.key]
                endpoints = tuple(admission.offers[rank] for rank in range(world))
                self._state.reply(admission.call_id, Introduced(endpoints, admission.protocol))

    def mapped(self, event: PeerMapped) -> None:
        """A rank tried to reach its peer."""
        peer = self._state.peers.get(event.peer)
        if peer is None or peer.state is PeerState.DEAD:
            return
        peer.paths[event.rank] = RankPath(event.rank, event.rank, event.data_path, event.why, event.rejected)
        for dial in list(self._dialling.values()):
            if dial.peer == peer.key:
                self._finish(dial, peer)

    def alive(self, key: str) -> None:
        """The liveness stream stands."""
        peer = self._state.peers.get(key)
        if peer is not None and peer.state is not PeerState.DEAD:
            self._alive(peer)
            self._issuer.peer_alive(peer)

    def silent(self, key: str) -> None:
        """The liveness stream is gone: the grace begins."""
        peer = self._state.peers.get(key)
        if peer is None or peer.state in (PeerState.DEAD, PeerState.SUSPECT):
            return
        peer.move(PeerState.SUSPECT)
        self._state.timers.set(Timer.PEER_GRACE, key, self._state.now + self._state.limits.peer_grace_s)

    def due(self, timer: Timer, name: str) -> None:
        """The grace of a peer, or the time for a handshake, is over."""
        if timer is Timer.PEER_GRACE:
            self._bury(self._state.peers[name])
            return
        error = Unavailable(Reason.PEER_UNREACHABLE, f"{name} did not finish the handshake in time")
        self._give_up(self._dialling[name], error)

    def forget(self, key: str) -> None:
        """A peer no longer knows us: the next use of it dials again."""
        self._state.peers[key].forgotten = True

    def end_all(self, error: KVGrpcError) -> None:
        """The incarnation ends: nobody knows the next one yet."""
        state = self._state
        for dial in list(self._dialling.values()):
            self._give_up(dial, error)
        for admission in self._admissions.values():
            state.refuse(admission.call_id, error)
        self._admissions.clear()
        for peer in state.peers.values():
            state.timers.clear(Timer.PEER_GRACE, peer.key)
            if peer.state is not PeerState.DEAD:
                self._hang_up(peer)
        state.peers.clear()

    def _dial(self, address: str, engine_id: str, trace: str) -> _Dialling:
        dial = self._dialling.get(address)
        if dial is None:
            dial = self._dialling[address] = _Dialling(address, engine_id, trace)
            self._state.timers.set(Timer.CONNECT, address, self._state.now + self._state.limits.connect_timeout_s)
            self._offer(address)
        return dial

    def _offer(self, key: str) -> None:
        for rank in range(self._state.pool.world_size):
            self._state.emit(MakeOffer(rank, key))

    def _check_engine(self, expected: str, found: EngineDescription) -> None:
        if expected and found.engine_id != expected:
            raise PreconditionFailed(
                Reason.WRONG_ENGINE, f"engine {found.engine_id} answers there, {expected} was expected"
            )

    def _admit(self, description: EngineDescription, endpoints: tuple[RankEndpoint, ...]) -> Peer:
        """The object of this life: a new one, or the known one with what is new. Older lives are dead."""
        state = self._state
        for other in list(state.peers.values()):
            same_engine = other.description.engine_id == description.engine_id
            if same_engine and other.description.incarnation != description.incarnation:
                self._bury(other)
        key = peer_key(description.engine_id, description.incarnation)
        known = state.peers.get(key)
        if known is None or known.state is PeerState.DEAD:
            known = state.peers[key] = Peer(description, endpoints, state.now)
        known.description, known.endpoints, known.forgotten = description, endpoints, False
        return known

    def _alive(self, peer: Peer) -> None:
        peer.heard = self._state.now
        peer.move(PeerState.CONNECTED)
        self._state.timers.clear(Timer.PEER_GRACE, peer.key)

    def _map(self, peer: Peer) -> None:
        if peer.reachable:
            return
        peer.paths.clear()
        for endpoint in peer.endpoints[: self._state.pool.world_size]:
            self._state.emit(MapPeer(endpoint.rank, peer.key, endpoint))

    def _finish(self, dial: _Dialling, peer: Peer) -> None:
        """Once every rank has tried, whoever waits learns whether the peer can be used."""
        if not peer.mapped:
            return
        if not peer.reachable:
            self._give_up(dial, _no_data_path(peer))
            return
        self._alive(peer)
        del self._dialling[dial.address]
        self._state.timers.clear(Timer.CONNECT, dial.address)
        for call in dial.calls:
            self._state.reply(call, PeerConnected(peer.view(self._state.now)))
        self._source.peer_ready(dial.address, peer)

    def _give_up(self, dial: _Dialling, error: KVGrpcError) -> None:
        del self._dialling[dial.address]
        self._state.timers.clear(Timer.CONNECT, dial.address)
        for call in dial.calls:
            self._state.refuse(call, error)
        self._source.peer_failed(dial.address, error)

    def _bury(self, peer: Peer) -> None:
        if peer.state is PeerState.DEAD:
            return
        state = self._state
        peer.move(PeerState.DEAD)
        state.timers.clear(Timer.PEER_GRACE, peer.key)
        self._issuer.peer_dead(peer)
        self._source.peer_dead(peer)
        self._hang_up(peer)
        dead = [p.key for p in state.peers.values() if p.state is PeerState.DEAD]
        for key in dead[:-DEAD_KEPT]:
            del state.peers[key]

    def _hang_up(self, peer: Peer) -> None:
        for rank in range(peer.description.world_size):
            self._state.emit(UnmapPeer(rank, peer.key))
        self._state.emit(HangUp(peer.key))


def _no_data_path(peer: Peer) -> KVGrpcError:
    path = next(path for path in peer.paths.values() if not path.data_path)
    reasons = "; ".join(f"{name}: {why}" for name, why in path.rejected) or "none is enabled on both sides"
    return PreconditionFailed(
        Reason.NO_DATA_PATH,
        f"no data path reaches rank {path.rank} of engine {peer.description.engine_id} ({reasons})",
    )
