"""The lives of other engines: admitted, mapped, silent, dead.

A life is dead when a newer one introduced itself, or when it was silent for the grace; it never comes back, only a new
handshake makes a new object. What a death means for other rooms is in the table of reactions (`node`).
"""

from dataclasses import replace

from kvgrpc.core.actions import AwaitEnd, HangUp, MapPeer, UnmapPeer, WeightsUnknown
from kvgrpc.core.events import HandshakeReceived, MeetingBegan, PeerAlive, PeerAnswered, PeerMapped, PeerSilent
from kvgrpc.core.peers.proofs import check_next_life, introduced, reached
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import RankPath
from kvgrpc.core.values.bridge import bridges
from kvgrpc.core.values.compatibility import EngineDescription, side_of, weights_unknown
from kvgrpc.core.values.ids import peer_key
from kvgrpc.errors import Aborted, Exhausted, InvalidRequest, Reason

DEAD_KEPT = 64
"""Dead lives that ListPeers still shows; those that only introduced themselves are forgotten first."""


class PeerLiveness:
    """One object per life of a peer."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._attempts = 0
        """Mappings that were ever begun, of all peers."""

    def admit(self, event: HandshakeReceived | PeerAnswered, at: str = "") -> Peer:
        """The object of this life: a new one, or the known one with what is new. Older lives are dead from now on.
        `at`: where it has answered; empty for one that called.

        Which of two lives is older is not to be seen in their numbers: the one that introduces itself last is taken
        for the newer one, unless the other one is connected. A message of the older that was long under way is refused
        while the newer one streams. Raises InvalidRequest, PreconditionFailed (NOT_PROVED, PEER_FAILED), Unavailable
        (NOT_PROVED), Aborted (INCARNATION_CHANGED) or Exhausted (LIMIT_EXCEEDED), and then nothing changed.
        """
        state, description, endpoints = self._state, event.peer, event.endpoints
        key = peer_key(description.engine_id, description.incarnation)
        known = state.peers.get(key)
        others = [p for p in state.peers.values() if p.description.engine_id == description.engine_id and p.key != key]
        if sorted(endpoint.rank for endpoint in endpoints) != list(range(description.world_size)):
            raise InvalidRequest(Reason.INVALID_FIELD, "a handshake takes one endpoint for each rank")
        if known is not None and self._streams(known.replaced_by):
            raise Aborted(
                Reason.INCARNATION_CHANGED, f"a newer life of engine {description.engine_id} has introduced itself"
            )
        if known is not None and _lasting(known.description) != _lasting(description):
            raise InvalidRequest(Reason.INVALID_FIELD, "what an engine is does not change within one incarnation")
        told = reached(known, event, at) if isinstance(event, PeerAnswered) else introduced(known, event)
        check_next_life([other for other in others if other.met and self._streams(other.key)], at)
        if known is None or known.state is PeerState.DEAD or told.anew:
            self._make_room(others if known is None else [*others, known], caller=not at)
            if known is not None:
                self._mark_dead(known)
            state.peers.pop(key, None)  # so that the newest is last
            both = bridges(side_of(state.pool), side_of(description))
            known = state.peers[key] = Peer(description, endpoints, both, state.now)
            if weights_unknown(state.pool, description):
                state.emit(WeightsUnknown(key))
            state.react.peer_back(known)
        elif known.description.memory_generation != description.memory_generation:
            # Registered anew: what is read at the old addresses now is nothing.
            state.react.memory_changed(known)
            self.unmap(known)
        known.description, known.endpoints, known.forgotten = description, endpoints, False
        known.asks, known.shows, known.elder = told.asks, told.shows, told.elder
        known.met |= bool(at)
        for other in others:
            other.replaced_by = key
            self._mark_dead(other)
        return known

    def admit_caller(self, event: HandshakeReceived) -> Peer:
        """Does what `admit` does, for a peer that dialled this lead: from now on it has the grace to bring up its
        liveness stream.
        """
        peer = self.admit(event)
        streaming = self._streams(peer.key)
        self.alive(peer)
        if not streaming:
            self._begin_grace(peer.key)
        return peer

    def alive(self, peer: Peer) -> None:
        """It was heard."""
        peer.heard = self._state.now
        peer.move(PeerState.CONNECTED)
        self._state.timers.clear(Timer.PEER_GRACE, peer.key)
        self._state.react.peer_heard(peer)

    def streaming(self, event: PeerAlive) -> None:
        """The liveness stream stands, with that life at its other end."""
        peer = self._state.peers.get(event.peer)
        if peer is not None and peer.state is not PeerState.DEAD and peer.proves(event.proof):
            peer.met = True
            self.alive(peer)

    def silent(self, event: PeerSilent) -> None:
        """The liveness stream is gone: the grace begins."""
        key = event.peer
        peer = self._state.peers.get(key)
        if peer is None or peer.state in (PeerState.DEAD, PeerState.SUSPECT):
            return
        peer.move(PeerState.SUSPECT)
        self._begin_grace(key)
        self.watch(key)

    def grace_over(self, key: str) -> None:
        """A peer was silent for the grace."""
        self._mark_dead(self._state.peers[key])

    def exited(self, key: str) -> None:
        """Its processes are gone."""
        self._mark_dead(self._state.peers[key])

    def watch(self, key: str) -> None:
        """Looks for the end of its processes, where they can be seen."""
        for rank in range(self._state.pool.world_size):
            self._state.emit(AwaitEnd(rank, key))

    def rekey_ends(self) -> None:
        """What peers know of this engine's memory is void: the next use of each shakes hands again."""
        for peer in self._state.peers.values():
            if peer.state is not PeerState.DEAD:
                peer.forgotten = True
                self.unmap(peer)

    def forget(self, key: str) -> None:
        """A peer no longer knows us: the next use of it dials again."""
        self._state.peers[key].forgotten = True

    def map(self, peer: Peer) -> None:
        """Lets our ranks reach for its memory, unless they do or are about to."""
        if peer.reachable or peer.mapping:
            return
        if peer.paths:
            self.unmap(peer)  # a rank that reaches it refuses to reach for it again
        self._attempts += 1
        peer.meets = False
        peer.attempt, peer.tried = self._attempts, peer.endpoints
        peer.mapping.update(peer.bridges.pairs)
        endpoints = {endpoint.rank: endpoint for endpoint in peer.endpoints}
        for rank, peer_rank in peer.bridges.pairs:
            self._state.emit(MapPeer(rank, peer.key, endpoints[peer_rank], peer.attempt))

    def meets(self, event: MeetingBegan) -> Peer | None:
        """A rank of ours and one of a peer, which is returned, meet. None: that is known, or not asked for any more."""
        peer = self._reached_for(event)
        if peer is None or peer.meets:
            return None
        peer.meets = True
        return peer

    def mapped(self, event: PeerMapped) -> Peer | None:
        """A rank tried to reach one of a peer, which is returned. None: it was not asked to, or not any more."""
        peer = self._reached_for(event)
        if peer is None:
            return None
        pair = event.rank, event.peer_rank
        peer.mapping.discard(pair)
        peer.paths[pair] = RankPath(*pair, event.data_path, event.why, event.rejected)
        if not peer.mapping and not peer.reachable and peer.tried is not peer.endpoints:
            self.map(peer)
        return peer

    def _reached_for(self, event: PeerMapped | MeetingBegan) -> Peer | None:
        peer = self._state.peers.get(event.peer)
        if peer is None or (event.rank, event.peer_rank) not in peer.mapping:
            return None
        return peer if event.attempt in (0, peer.attempt) else None

    def map_anew(self, key: str) -> None:
        """A posting failed: some transports are of no use after that, so the next use handshakes and maps again.

        Not when that is under way: the posting was one of the mapping before.
        """
        peer = self._state.peers[key]
        if not peer.mapping and peer.paths:
            peer.forgotten = True
            self.unmap(peer)

    def unmap(self, peer: Peer) -> None:
        """Its memory is of no use as it is mapped now, or is being mapped."""
        peer.paths.clear()
        self._let_go(peer)

    def hang_up_stranger(self, description: EngineDescription) -> None:
        """A life that we dialled is not admitted: it is to hear no more of us, unless it lives here anyway."""
        key = peer_key(description.engine_id, description.incarnation)
        known = self._state.peers.get(key)
        if known is None or known.state is PeerState.DEAD:
            self._state.emit(HangUp(key))

    def end_all(self) -> None:
        """The incarnation ends: no peer knows the next one yet."""
        for peer in self._state.peers.values():
            if peer.state is not PeerState.DEAD:
                self.hang_up(peer)
        self._state.peers.clear()

    def _streams(self, key: str) -> bool:
        """Whether the liveness stream of a life stands."""
        peer = self._state.peers.get(key)
        connected = peer is not None and peer.state is PeerState.CONNECTED
        return connected and self._state.timers.when(Timer.PEER_GRACE, key) is None

    def _begin_grace(self, key: str) -> None:
        self._state.timers.set(Timer.PEER_GRACE, key, self._state.now + self._state.limits.peer_grace_s)

    def _make_room(self, others: list[Peer], caller: bool) -> None:
        """For one more life in the place of the others. Callers that only introduced themselves make room, the first
        of them first: however many come, none takes the place of a peer that is known. Raises Exhausted.
        """
        limits = self._state.limits
        living = [p for p in self._state.peers.values() if p.state is not PeerState.DEAD and p not in others]
        new = [peer for peer in living if not peer.met]
        full = len(living) >= limits.peers
        if full and not new:
            raise Exhausted(
                Reason.LIMIT_EXCEEDED,
                f"{len(living)} peers are connected",
                retry_delay_s=1.0,
                metadata={"limit": str(limits.peers)},
            )
        if full or (caller and len(new) >= limits.new_peers):
            self._mark_dead(new[0])

    def _mark_dead(self, peer: Peer) -> None:
        if peer.state is PeerState.DEAD:
            return
        state = self._state
        peer.move(PeerState.DEAD)
        state.timers.clear(Timer.PEER_GRACE, peer.key)
        state.react.peer_dead(peer)
        peer.endpoints = peer.tried = ()  # no rank reaches for them any more, and they may be long
        writers = state.writing_lives()  # the ends of whose processes are still to come
        dead = [p for p in state.peers.values() if p.state is PeerState.DEAD and p.key not in writers]
        for key in [p.key for p in sorted(dead, key=lambda p: p.met)][:-DEAD_KEPT]:
            del state.peers[key]
            state.react.peer_forgotten(key)

    def hang_up(self, peer: Peer) -> None:
        """Our ranks let its memory go, and the shell its channel."""
        self._let_go(peer, gone=True)
        self._state.emit(HangUp(peer.key))

    def _let_go(self, peer: Peer, *, gone: bool = False) -> None:
        peer.mapping.clear()
        writes = peer.key in self._state.writing_lives()
        if writes:
            self.watch(peer.key)
        for rank in range(self._state.pool.world_size):
            self._state.emit(UnmapPeer(rank, peer.key, watch=writes, gone=gone))


def _lasting(description: EngineDescription) -> EngineDescription:
    """What stays the same for a whole incarnation."""
    return replace(description, memory_generation=0, address="", features=(), required_features=())
