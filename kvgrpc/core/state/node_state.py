"""All mutable state of a node, grouped by the rooms that change it, and the few operations that every room needs.

The rooms above hold the rules. They share this one object and act on each other's decisions through `react`. `begin`
makes new tables for an incarnation: they contain nothing of the old one, unless a defect ended that.
"""

from collections.abc import Callable
from typing import Unpack

from kvgrpc.core.actions import Action, Answer, EngineNews, Expect, Refuse, Reply, TellEngine, TransferChanged
from kvgrpc.core.events import LifeBegan
from kvgrpc.core.idempotency import IdempotencyKeys, lives
from kvgrpc.core.state.access_tables import AccessTables
from kvgrpc.core.state.caller_budget import KEYS_A_RENEWAL, CallerBudget
from kvgrpc.core.state.life import NO_LIFE, EngineLife
from kvgrpc.core.state.move_table import MoveTable
from kvgrpc.core.state.peer_tables import PeerTables
from kvgrpc.core.state.pool_tables import PoolTables
from kvgrpc.core.state.push_table import PushTable
from kvgrpc.core.state.reactions import Reactions
from kvgrpc.core.state.receive_tables import ReceiveTables
from kvgrpc.core.state.send_tables import SendTables
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.leases import LeaseTable
from kvgrpc.core.tables.ledger import Ledger
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tables.tombstones import Tombstones
from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.tables.transfers import ENDED, Changes, Transfer, TransferTerms
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.networks import EVERYWHERE, PrivateNetworks
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import KVGrpcError


class NodeState:
    """All that a node knows. `now` is the time of the event being handled."""

    def __init__(
        self, limits: Limits, writers: frozenset[str], *, checksums: bool = False,
        networks: PrivateNetworks = EVERYWHERE,
    ) -> None:  # fmt: skip
        self.limits = limits
        self.now = 0.0
        self.actions: list[Action] = []
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

    def take_actions(self) -> list[Action]:
        """Returns the actions of the event, and begins anew."""
        taken = self.actions.copy()
        self.actions.clear()
        return taken

    def expect(self, access: Access, *, open_: bool) -> None:
        """Tells the ranks whether the opener of an access may access our memory."""
        self.emit(Expect(access.owner, open=open_, paths=access.opening.data_paths))

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
            changes["phases"] = old.phases_ended(self.now)
            changes["ended"] = self.now
            changes["waiting_for"] = ""
        transfer = self.transfers.change(transfer_id, **changes)
        self.emit(TransferChanged(transfer))
        if transfer.settled and transfer.owner != ENGINE:
            self.transfers.archive(transfer_id)
        return transfer

    def tell(self, owner: str, news: EngineNews) -> None:
        """Tells the attached engine about its own transfers."""
        if owner == ENGINE and self.life.attached:
            self.emit(TellEngine(news))
