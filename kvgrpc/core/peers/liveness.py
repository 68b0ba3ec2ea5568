"""The lives of other engines: admitted, mapped, silent, dead.

A life is dead when a newer one introduced itself, when it was silent for the grace, or when its processes are gone. It
never comes back: only a new handshake makes a new object. The table of reactions (`node`) says what a death means
elsewhere.
"""

from dataclasses import replace

from kvgrpc.core.actions import AwaitEnd, HangUp, MapPeer, UnmapPeer, WeightsUnknown
from kvgrpc.core.events import HandshakeReceived, MeetingBegan, PeerAlive, PeerAnswered, PeerMapped, PeerSilent
from kvgrpc.core.peers.proofs import also_told, check_next_life, introduced, reached
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import RankPath
from kvgrpc.core.values.bridge import bridges
from kvgrpc.core.values.compatibility import EngineDescription, side_of, weights_unknown
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.networks import PLAIN_TEXT
from kvgrpc.errors import Aborted, InvalidRequest, Reason, full

DEAD_KEPT = 64
"""Maximum number of dead lives that ListPeers shows. They are no `remembered.Remembered`: lives that only introduced
themselves are forgotten first, and those that may still write here are not forgotten.
"""


class PeerLiveness:
    """Keeps one object per life of a peer."""

    def __init__(self, state: NodeState) -> None:
        self._state, self._peers = state, state.peers
        self._attempts = 0
        """Number of mappings ever begun, of all peers."""

    def admit(self, event: HandshakeReceived | PeerAnswered, at: str = "") -> Peer:
        """Returns the object of this life: a new one, or the updated known one. Older lives are dead from now on. `at`:
        the address where it answered; empty for a caller.

        Incarnations do not show which of two lives is older. The life that introduces itself last counts as newer,
        unless the other one is connected. A late message of the older life is refused while the newer one streams.
        Raises InvalidRequest, PreconditionFailed (NOT_PROVED, PEER_FAILED), Unavailable (NOT_PROVED), Aborted
        (INCARNATION_CHANGED) or Exhausted (LIMIT_EXCEEDED); an error changes nothing.
        """
        state, description, endpoints = self._state, event.peer, event.endpoints
        key = peer_key(description.engine_id, description.incarnation)
        known = self._peers.lives.get(key)
        others = [
            p for p in self._peers.lives.values() if p.description.engine_id == description.engine_id and p.key != key
        ]
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
            self._peers.lives.pop(key, None)  # so that the newest is last
            both = bridges(side_of(state.life.engine), side_of(description))
            known = self._peers.lives[key] = Peer(description, endpoints, both, state.now)
            if weights_unknown(state.life.engine, description):
                state.emit(WeightsUnknown(key))
            state.react.peer_back(known)
        else:
            if known.description.memory_generation != description.memory_generation:
                # The memory is registered anew: reads at the old addresses would get nothing of use.
                state.react.memory_changed(known)
                self.unmap(known)
            # It may map this engine's memory anew, and read by another data path than it said.
            known.reads_by = ()
            state.react.peer_again(known)
        known.description, known.endpoints, known.forgotten = description, endpoints, False
        known.asks, known.shows, known.elder = told.asks, told.shows, told.elder
        known.met |= bool(at)
        for other in others:
            other.replaced_by = key
            self._mark_dead(other)
        return known

    def admit_caller(self, event: HandshakeReceived) -> Peer:
        """Admits a peer that dialled this lead, like `admit`. The peer then has the grace to bring up its liveness
        stream.
        """
        peer = self.admit(event)
        streaming = self._streams(peer.key)
        self.alive(peer)
        if not streaming:
            self._begin_grace(peer.key)
        return peer

    def alive(self, peer: Peer) -> None:
        peer.heard = self._state.now
        peer.move(PeerState.CONNECTED)
        self._state.timers.clear(Timer.PEER_GRACE, peer.key)
        self._state.react.peer_heard(peer)

    def streaming(self, event: PeerAlive) -> None:
        """Notes that a life's liveness stream stands, if its other end shows the life's proof."""
        peer = self._peers.lives.get(event.peer)
        if peer is not None and peer.state is not PeerState.DEAD and peer.proves(event.proof):
            peer.met = True
            self.alive(peer)

    def silent(self, event: PeerSilent) -> None:
        """Begins the grace of a peer whose liveness stream is gone."""
        key = event.peer
        peer = self._peers.lives.get(key)
        if peer is None or peer.state in (PeerState.DEAD, PeerState.SUSPECT):
            return
        peer.move(PeerState.SUSPECT)
        self._begin_grace(key)
        self.watch(key)

    def grace_over(self, key: str) -> None:
        """Declares a peer dead that was silent for the grace."""
        self._mark_dead(self._peers.lives[key])

    def exited(self, key: str) -> None:
        """Declares a life dead whose processes are gone."""
        self._mark_dead(self._peers.lives[key])

    def watch(self, key: str) -> None:
        """Watches for the end of a life's processes, if they can be seen."""
        for rank in range(self._state.life.engine.world_size):
            self._state.emit(AwaitEnd(rank, key))

    def rekey_ends(self) -> None:
        """Unmaps all peers: their view of this engine's memory is void, so the next use of each shakes hands again."""
        for peer in self._peers.lives.values():
            if peer.state is not PeerState.DEAD:
                peer.forgotten = True
                self.unmap(peer)

    def forget(self, key: str) -> None:
        """Notes that a peer no longer knows us: the next use of it dials again."""
        self._peers.lives[key].forgotten = True

    def map(self, peer: Peer) -> None:
        """Lets our ranks map the peer's memory, unless they did or are about to."""
        if peer.reachable or peer.mapping:
            return
        if peer.paths:
            self.unmap(peer)  # a rank refuses to map again what it has mapped
        self._attempts += 1
        peer.meets.clear()
        peer.attempt, peer.tried = self._attempts, peer.endpoints
        peer.mapping.update(peer.bridges.pairs)
        usable = self._peers.networks.usable(peer.endpoints, peer.address, self._state.life.engine.address)
        endpoints = {endpoint.rank: endpoint for endpoint in usable}
        for rank, peer_rank in peer.bridges.pairs:
            self._state.emit(MapPeer(rank, peer.key, endpoints[peer_rank], peer.attempt))

    def meets(self, event: MeetingBegan) -> Peer | None:
        """Returns the peer whose rank began to meet one of ours; None if that is known, or not asked for any more."""
        peer = self._reached_for(event)
        if peer is None:
            return None
        known = bool(peer.meets)
        peer.meets.add((event.rank, event.peer_rank))
        return None if known else peer

    def mapped(self, event: PeerMapped) -> Peer | None:
        """Takes a rank's result of mapping a peer, and returns the peer; None if no such mapping is under way."""
        peer = self._reached_for(event)
        if peer is None:
            return None
        pair = event.rank, event.peer_rank
        peer.mapping.discard(pair)
        if event.permanent:
            peer.meets.discard(pair)
        peer.paths[pair] = self._path(peer, event)
        if not peer.mapping and not peer.reachable and peer.tried is not peer.endpoints:
            self.map(peer)
        return peer

    def _path(self, peer: Peer, event: PeerMapped) -> RankPath:
        """Returns the data path that a rank found. The rank does not know which paths the network ruled out."""
        why_not = self._peers.networks.why_not(peer.address, self._state.life.engine.address)
        ruled_out = PLAIN_TEXT if why_not else frozenset()
        rejected = tuple((name, why_not if name in ruled_out else why) for name, why in event.rejected)
        return RankPath(event.rank, event.peer_rank, event.data_path, event.why, rejected, ruled_out)

    def _reached_for(self, event: PeerMapped | MeetingBegan) -> Peer | None:
        peer = self._peers.lives.get(event.peer)
        if peer is None or (event.rank, event.peer_rank) not in peer.mapping:
            return None
        return peer if event.attempt in (0, peer.attempt) else None

    def map_anew(self, key: str) -> None:
        """Unmaps a peer after a posting failed: some transports are useless after that. The next use shakes hands and
        maps again.

        While a mapping is under way nothing is done: the posting belonged to an earlier one.
        """
        peer = self._peers.lives[key]
        if not peer.mapping and peer.paths:
            peer.forgotten = True
            self.unmap(peer)

    def unmap(self, peer: Peer) -> None:
        """Drops the peer's present mapping, done or under way."""
        peer.paths.clear()
        self._let_go(peer)

    def answered_late(self, event: PeerAnswered) -> None:
        """Takes an answer to a dial that is over: its proofs count, for a life that lives there."""
        self.also_told(event.peer, event.address, event.shows, event.asks)
        self.hang_up_stranger(event.peer)

    def also_told(self, life: EngineDescription, at: str, shows: bytes, asks: bytes = b"") -> None:
        """Keeps the proofs of a living life that answered where it lives, in a handshake that does not admit it."""
        known = self._peers.lives.get(peer_key(life.engine_id, life.incarnation))
        if known is not None and known.state is not PeerState.DEAD and known.lives_at(at):
            told = also_told(known, shows, asks)
            known.asks, known.shows = told.asks, told.shows

    def hang_up_stranger(self, description: EngineDescription) -> None:
        """Closes the channel to a dialled life that is not admitted, unless that life is known here and not dead."""
        key = peer_key(description.engine_id, description.incarnation)
        known = self._peers.lives.get(key)
        if known is None or known.state is PeerState.DEAD:
            self._state.emit(HangUp(key))

    def end_all(self) -> None:
        """Forgets all peers: the incarnation ends, and no peer knows the next one yet."""
        for peer in self._peers.lives.values():
            if peer.state is not PeerState.DEAD:
                self.hang_up(peer)
        self._peers.lives.clear()

    def _streams(self, key: str) -> bool:
        """Returns whether the liveness stream of a life stands."""
        peer = self._peers.lives.get(key)
        connected = peer is not None and peer.state is PeerState.CONNECTED
        return connected and self._state.timers.when(Timer.PEER_GRACE, key) is None

    def _begin_grace(self, key: str) -> None:
        self._state.timers.set(Timer.PEER_GRACE, key, self._state.now + self._state.limits.peer_grace_s)

    def _make_room(self, others: list[Peer], caller: bool) -> None:
        """Makes room for one more life in place of `others`. Lives that only introduced themselves are dropped, oldest
        first: new callers never displace a peer that met this lead. Raises Exhausted.
        """
        limits = self._state.limits
        living = [p for p in self._peers.lives.values() if p.state is not PeerState.DEAD and p not in others]
        new = [peer for peer in living if not peer.met]
        no_place = len(living) >= limits.peers
        if no_place and not new:
            raise full(f"{len(living)} peers are connected", limits.peers)
        if no_place or (caller and len(new) >= limits.new_peers):
            self._mark_dead(new[0])

    def _mark_dead(self, peer: Peer) -> None:
        if peer.state is PeerState.DEAD:
            return
        state = self._state
        peer.move(PeerState.DEAD)
        state.timers.clear(Timer.PEER_GRACE, peer.key)
        state.react.peer_dead(peer)
        peer.endpoints = peer.tried = ()  # no rank maps them any more, and they may be long
        writers = state.receive.writing_lives()  # the ends of their processes are still awaited
        dead = [p for p in self._peers.lives.values() if p.state is PeerState.DEAD and p.key not in writers]
        for key in [p.key for p in sorted(dead, key=lambda p: p.met)][:-DEAD_KEPT]:
            del self._peers.lives[key]
            state.react.peer_forgotten(key)

    def hang_up(self, peer: Peer) -> None:
        """Makes our ranks unmap a peer's memory, and the shell close its channel."""
        self._let_go(peer, gone=True)
        self._state.emit(HangUp(peer.key))

    def _let_go(self, peer: Peer, *, gone: bool = False) -> None:
        peer.mapping.clear()
        writes = peer.key in self._state.receive.writing_lives()
        if writes:
            self.watch(peer.key)
        for rank in range(self._state.life.engine.world_size):
            self._state.emit(UnmapPeer(rank, peer.key, watch=writes, gone=gone))


def _lasting(description: EngineDescription) -> EngineDescription:
    """Returns the parts of a description that stay the same for a whole incarnation."""
    return replace(description, memory_generation=0, address="", features=(), required_features=())
