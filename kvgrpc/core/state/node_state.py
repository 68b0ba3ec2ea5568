"""All mutable state of a node, in tables grouped by the rooms that change them, and operations for every room.

The rooms above hold the rules. They share this one object and act on each other's decisions through `react`. `begin`
makes new tables for an incarnation: they contain nothing of the old one, unless a defect ended that.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from kvgrpc.core.actions import Action, Answer, EngineNews, Expect, Refuse, Reply, TellEngine, TransferChanged
from kvgrpc.core.events import LifeBegan, SendWanted
from kvgrpc.core.idempotency import IdempotencyKeys, lives
from kvgrpc.core.state.caller_budget import KEYS_A_RENEWAL, CallerBudget
from kvgrpc.core.state.handshake import Handshake, OutgoingHandshake
from kvgrpc.core.state.life import NO_LIFE, EngineLife, PoolTables
from kvgrpc.core.state.move import MOVE_TIMERS, Move, PullMove
from kvgrpc.core.state.move_table import MoveTable, PushTable
from kvgrpc.core.state.reactions import Reactions
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.state.waiting_rows import ChecksumAsks, Mirrors, Prefetch, WaitingOpenings
from kvgrpc.core.tables.accesses import Access, AccessState
from kvgrpc.core.tables.lacking_requests import LackingRequests
from kvgrpc.core.tables.leases import LeaseTable
from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.offer_index import OfferIndex
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.tables.remembered import ClosedAccessIds, Tombstones
from kvgrpc.core.tables.soft_leases import SoftLeases
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.tables.transfers import ENDED, Changes, Transfer, TransferTerms
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.networks import EVERYWHERE, PrivateNetworks
from kvgrpc.core.values.owners import ENGINE, PEER
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason


class PeerTables:
    """Tables of the other leads that a lead knows."""

    def __init__(self, networks: PrivateNetworks) -> None:
        self.networks = networks
        self.lives: dict[str, Peer] = {}
        """Peers by life. The lead ends them all before an incarnation begins."""
        self.dial_budget = CallerBudget("handshakes with other engines")
        self.begin()

    def begin(self) -> None:
        """Makes empty tables for a new incarnation."""
        self.dials: dict[str, OutgoingHandshake] = {}
        """Handshakes that this lead started, by address."""
        self.handshakes: dict[str, Handshake] = {}
        """All handshakes under way, by key."""
        self.meetings: dict[str, list[SendWanted]] = {}
        """Requests of our ranks to meet ranks of a peer, by its life. The peer has only introduced itself so far."""
        self.on_device = False
        """True when some rank has offered device memory."""

    def caller(self, engine_id: str, incarnation: int, proof: bytes) -> Peer:
        """Returns the calling life of a peer. Raises PreconditionFailed (NOT_PROVED) for a caller without that life's
        proof, and (NO_HANDSHAKE) for a life that is unknown or dead. A dead life gets NO_HANDSHAKE only with its proof.
        """
        peer = self.lives.get(peer_key(engine_id, incarnation))
        if peer is not None and not peer.proves(proof):
            why = f"the caller does not show what engine {engine_id} was told: shake hands again"
            raise PreconditionFailed(Reason.NOT_PROVED, why)
        if peer is None or peer.state is PeerState.DEAD:
            why = f"engine {engine_id} has no handshake with this incarnation; Handshake first"
            raise PreconditionFailed(Reason.NO_HANDSHAKE, why)
        return peer

    def live_on(self, life: str) -> bool:
        """Returns whether a peer's life is known and not declared dead."""
        peer = self.lives.get(life)
        return peer is not None and peer.state is not PeerState.DEAD


class AccessTables:
    """The accesses of peers in one life."""

    def __init__(self, peers: PeerTables, pins: PinTable, ledger: Ledger) -> None:
        self._peers, self._pins, self._ledger = peers, pins, ledger
        self.rows: dict[bytes, Access] = {}
        """Accesses by id. Only `add` and `forget` change the table."""
        self.openings = WaitingOpenings()
        self.closed_ids = ClosedAccessIds(ledger.limits.accesses)
        self.checksum_asks = ChecksumAsks()
        self.sends: dict[str, tuple[int, str]] = {}
        """Calls of peers that wait until a rank begins to send: name -> call id and pair of ranks."""

    def add(self, peer: Peer, access: Access) -> None:
        """Adds a new access of a peer's life, which pays for it."""
        self.rows[access.id] = access
        peer.accesses[access.id] = None
        self._ledger.keep(RowKind.ACCESS, access.id, PEER + peer.key, access.kept_bytes)

    def weigh(self, access: Access) -> None:
        """Updates an access's weight after it pins other blocks or holds other things."""
        access.pinned_bytes = self._pins.kept_bytes(access.owner, PinKind.ACCESS)
        self._ledger.weigh(RowKind.ACCESS, access.id, access.kept_bytes)

    def forget(self, access: Access) -> None:
        """Removes an access from all tables."""
        del self.rows[access.id]
        self._ledger.drop(RowKind.ACCESS, access.id)
        peer = self._peers.lives.get(access.peer)
        if peer is not None:
            peer.accesses.pop(access.id, None)


class ReceiveTables:
    """Pulls and reservations that are not forgotten."""

    def __init__(self, renewal_budget: CallerBudget) -> None:
        self.renewal_budget = renewal_budget
        self.transfers: dict[str, PullMove] = {}
        """Pulls and reservations by transfer."""
        self.targets: dict[str, ReservationMove] = {}
        """Reservations by the target in their grant."""
        self.open_writes: dict[bytes, ReservationMove] = {}
        """Reservations by access. Sources may write into them until the contrary is proved."""

    def writing_lives(self) -> dict[str, None]:
        """Returns the lives of sources that may write here. The order of arrival is the same in every process."""
        return dict.fromkeys(reservation.writers[id_].life for id_, reservation in self.open_writes.items())


class SendTables:
    """Everything handed over in one life. The leases may be older, when a defect ended the last life."""

    def __init__(self, leases: LeaseTable, ledger: Ledger) -> None:
        self.leases = leases
        self.offers = OfferIndex(ledger.limits)
        self.soft_leases = SoftLeases()
        self.pushes = PushTable(ledger)
        self.prefetch = Prefetch()
        self.mirrors = Mirrors()
        self.lacking = LackingRequests()


class NodeState:
    """All that a node knows. `now` is the time of the event being handled."""

    def __init__(
        self, limits: Limits, writers: frozenset[str], *, checksums: bool, networks: PrivateNetworks = EVERYWHERE
    ) -> None:
        self.limits = limits
        self.now = 0.0
        self.actions: list[Action] = []
        """Actions of the event being handled. `Node.handle` takes them."""
        self.emit: Callable[[Action], None] = self.actions.append
        """Adds an action."""
        self.react: Reactions
        self.timers = Timers()
        self.life = EngineLife()
        self.peers = PeerTables(networks)
        self.moves = MoveTable(Ledger(limits), writers, checksums=checksums)
        self.send: SendTables
        self.receive = ReceiveTables(CallerBudget(f"renewals of {KEYS_A_RENEWAL} keys at other engines"))
        self.begin(NO_LIFE)

    def begin(self, event: LifeBegan) -> None:
        """Makes empty tables for a new incarnation. The caller has ended everything of the old one. Transfers and
        leases of a life that a defect ended stay known until the next life ends.
        """
        life, limits = self.life, self.limits
        ledger = self.ledger = Ledger(limits)
        """Bytes kept by each caller. The rooms enter schedulers' requests and tensors themselves."""
        leases = self.send.leases if life.defect else LeaseTable(limits.ended_leases, ledger)
        if not life.defect:
            self.transfers = TransferTable(event.incarnation, limits.transfer_history, ledger)
        leases.enter(ledger)
        self.transfers.enter(ledger)
        self.transfers.incarnation, self.transfers.secret = event.incarnation, event.secret
        life.begin(event, self.now)
        self.keys = IdempotencyKeys(limits.idempotency_keys, ledger)
        self.tombstones = Tombstones(ledger, self.timers)
        self.peers.begin()
        self.send = SendTables(leases, ledger)
        self.pool = PoolTables(life, ledger)
        self.access = AccessTables(self.peers, self.pool.pins, ledger)
        self.drop_moves()

    def drop_moves(self) -> None:
        """Makes empty tables of moves. Nothing more is told or proved about moves of an old incarnation."""
        self.moves = MoveTable(self.ledger, self.moves.writers, checksums=self.moves.checksums)
        self.receive = ReceiveTables(self.receive.renewal_budget)
        self.send.pushes = PushTable(self.ledger)

    def expect(self, access: Access, *, open_: bool) -> None:
        """Tells the ranks whether the opener of an access may access our memory."""
        self.emit(Expect(access.owner, open=open_, paths=access.opening.data_paths))

    def read_by(self, access: Access, data_paths: tuple[str, ...]) -> None:
        """Tells the ranks by which data paths the opener of an access reads, if it is open; empty: not known."""
        if access.state is AccessState.OPEN and access.opening.data_paths != data_paths:
            self.expect(access, open_=False)
            access.opening = replace(access.opening, data_paths=data_paths)
            self.expect(access, open_=True)

    def reply(self, call_id: int, answer: Answer) -> None:
        """Answers a call and all calls that joined it."""
        reply = Reply(call_id, answer, self.transfers.seq)
        if call_id not in self.keys.running:
            self.emit(reply)
            return
        calls, name = self.keys.finish(call_id, reply)
        self.timers.set(Timer.IDEMPOTENCY, name, self.now + self.limits.idempotency_s)
        for call in calls:
            self.emit(Reply(call, answer, reply.event_seq))

    def refuse(self, call_id: int, error: KVGrpcError) -> None:
        """Refuses a call and all calls that joined it."""
        calls, _ = self.keys.finish(call_id, None)
        for call in calls:
            self.emit(Refuse(call, error.untraced()))

    def key_due(self, name: str) -> None:
        """Forgets an idempotency key unless what it created still lives."""
        if lives(self.keys.reply(name).answer, self.send.leases, self.transfers, self.pool.allocator):
            self.timers.set(Timer.IDEMPOTENCY, name, self.now + self.limits.idempotency_s)
        else:
            self.keys.forget(name)

    def create(self, call: Call, **fields: Unpack[TransferTerms]) -> Transfer:
        """Creates a transfer for the caller and tells watchers."""
        transfer = self.transfers.create(self.now, call.payer, owner=call.principal, trace=call.trace, **fields)
        self.emit(TransferChanged(transfer))
        return transfer

    def change(self, transfer_id: str, **changes: Unpack[Changes]) -> Transfer:
        """Changes a transfer and tells watchers. An end also ends the running phase."""
        old = self.transfers.current[transfer_id]
        if not old.over and changes.get("state") in ENDED:
            changes["phases"] = old.phases_at(self.now)
            changes["ended"] = self.now
            changes["waiting_for"] = ""
        transfer = self.transfers.change(transfer_id, **changes)
        self.emit(TransferChanged(transfer))
        if transfer.settled and transfer.owner != ENGINE:
            self.transfers.archive(transfer_id)
        return transfer

    def stop(self, move: Move) -> None:
        """Clears a move's turn and deadlines: it waits for nothing any more."""
        self.moves.turns.leave(move.name)
        move.left = None
        self.timers.clear_some(MOVE_TIMERS, move.name)

    def tell(self, owner: str, news: EngineNews) -> None:
        """Tells the attached engine about its own transfers."""
        if owner == ENGINE and self.life.attached:
            self.emit(TellEngine(news))
