"""All mutable state of a node, and the few operations that every room needs.

The rooms above hold the rules; they share this one object, and act on each other's decisions through `react`. `begin`
makes the tables of a new incarnation: nothing of the old one is left in them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, Unpack

import numpy as np

from kvgrpc.core.actions import Action, Answer, EngineNews, Expect, Refuse, Reply, TellEngine, TransferChanged
from kvgrpc.core.events import SendWanted
from kvgrpc.core.idempotency import IdempotencyKeys, lives
from kvgrpc.core.state.caller_budget import KEYS_A_RENEWAL, CallerBudget
from kvgrpc.core.state.handshake import Dialling, Shake
from kvgrpc.core.state.move_table import MoveTable
from kvgrpc.core.state.pull import Pull
from kvgrpc.core.state.push_table import PushTable
from kvgrpc.core.state.reactions import Reactions
from kvgrpc.core.state.reservation import Reservation
from kvgrpc.core.state.waiting import ChecksumAsks, Closes, Mirrors, Prefetch, Proofs, WaitingOpenings
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.allocator import Allocator
from kvgrpc.core.tables.closed_ids import ClosedAccessIds
from kvgrpc.core.tables.lacking import LackingRequests
from kvgrpc.core.tables.leases import LeaseTable
from kvgrpc.core.tables.ledger import Ledger
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.pins import PinTable
from kvgrpc.core.tables.soft_leases import SoftLeases
from kvgrpc.core.tables.steps import RankSteps
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tables.tombstones import Tombstone, Tombstones, digest_of, too_late
from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.tables.transfers import ENDED, Changes, Transfer, Wanted
from kvgrpc.core.tables.turns import Turns
from kvgrpc.core.values.calls import BlockLists, Call
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.descriptors import Blocks, check_ids, check_spaces
from kvgrpc.core.values.grants import signing_key
from kvgrpc.core.values.ids import check_transfer_key, peer_key
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE, EVERYONE, Kind, Thing, Verb, may
from kvgrpc.errors import (
    Aborted,
    Exhausted,
    FieldViolation,
    InvalidRequest,
    KVGrpcError,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)

T = TypeVar("T")

NOT_THE_ENGINE = (
    "the pool belongs to the engine that is attached: it names its blocks by its session, or by a call that shows its "
    "ticket"
)


class NodeState:
    """What a node knows. `now` is the time of the event being handled."""

    def __init__(self, limits: Limits, writers: frozenset[str], *, checksums: bool = False) -> None:
        self.limits = limits
        self.writers = writers
        self.checksums = checksums
        self.now = 0.0
        self.actions: list[Action] = []
        self.react: Reactions
        self.peers: dict[str, Peer] = {}
        """Peers by life; the lead ends them all before an incarnation begins."""
        self.timers = Timers()
        self.dial_budget = CallerBudget("handshakes with other engines")
        self.renewal_budget = CallerBudget(f"renewals of {KEYS_A_RENEWAL} keys at other engines")
        self.incarnation = 0
        self.attached = False
        self.description: EngineDescription | None = None
        self.draining = False
        self.stopping = False
        """The server was told to end: it drains for good."""
        self.rekeying = ""
        """Why the ranks' data paths are about to begin anew; empty while they are not."""
        self.defect = ""
        """Why there is no engine, after a life that a defect ended and until the next one; empty otherwise."""
        self.begin(0, b"", None, attached=False)

    def begin(
        self, incarnation: int, secret: bytes, description: EngineDescription | None, *, attached: bool,
        sets_aside: bool = True, mirrored: bool = False,
    ) -> None:  # fmt: skip
        """Empty tables for a new incarnation. The caller ended everything of the old one. Only of a life that a defect
        ended it is told, to the end of the next one, what became of its transfers and leases.
        """
        self.rekeying = ""
        self.sets_aside, self.expects_pushes, self.mirrored = sets_aside, False, mirrored
        self.incarnation, self.secret = incarnation, secret
        self.grant_key = signing_key(secret)
        self.description = description
        self.attached = attached
        self.began = self.now
        self.ledger = Ledger(self.limits)
        """What all that is kept weighs; scheduler's requests and tensors are entered by the rooms that know them."""
        if not self.defect:
            self.leases = LeaseTable(self.limits.ended_leases, self.ledger)
            self.transfers = TransferTable(incarnation, self.limits.transfer_history, self.ledger)
        self.leases.enter(self.ledger)
        self.transfers.enter(self.ledger)
        self.transfers.incarnation, self.transfers.secret = incarnation, secret
        self.defect = "" if description else self.defect
        self.dials: dict[str, Dialling] = {}
        """Handshakes that this lead started, by address."""
        self.handshakes: dict[str, Shake] = {}
        """All that are under way, by key."""
        self.drop_moves()
        self.accesses: dict[bytes, Access] = {}
        self.openings = WaitingOpenings()
        self.closed_ids = ClosedAccessIds(self.limits.accesses)
        self.checksum_asks = ChecksumAsks()
        self.sends: dict[str, tuple[int, str]] = {}
        """Calls of peers that wait for a rank to begin to send, by name: each with its pair of ranks."""
        self.meetings: dict[str, list[SendWanted]] = {}
        """Ranks that want to meet ranks of a peer, by its life: it has only introduced itself."""
        self.on_device = False
        """Some of the memory of its ranks is a device's, as far as they have offered it."""
        self.prefetch = Prefetch()
        self.mirrors = Mirrors()
        self.proofs = Proofs()
        self.keys = IdempotencyKeys(self.limits.idempotency_keys, self.ledger)
        self.tombstones = Tombstones[bytes, Tombstone]("key", self.ledger)
        """Transfer keys under which something may still come that is too late."""
        self.ended_grants = Tombstones[bytes, KVGrpcError]("grant", self.ledger)
        """WRITE grants, by digest, whose push is over, and what is said to those that come with one."""
        self.refused_leases = Tombstones[str, None]("lease", self.ledger)
        """Leases whose hand-over was refused."""
        self.turns = Turns(self.limits.in_flight_bytes)
        self.steps = RankSteps(description)
        self.lacking = LackingRequests()
        self.soft_leases = SoftLeases()
        self.bytes_received = self.bytes_sent = 0
        sizes = tuple(g.blocks for g in description.pool.groups) if description else ()
        self.pins = PinTable(sizes, description.pool.spaces if description else ())
        self.allocator = Allocator(sizes, self.pins, self.ledger)

    def drop_moves(self) -> None:
        """Empty tables of what moves: of an incarnation that is over, nothing more is said or proved."""
        self.moves = MoveTable(self.ledger)
        self.receives: dict[str, Pull] = {}
        """Pulls and reservations that are not forgotten, by transfer."""
        self.targets: dict[str, Reservation] = {}
        """Reservations that are not forgotten, by the target in their grant."""
        self.open_writes: dict[bytes, Reservation] = {}
        """Reservations by access: sources may write into them until that is proved to be over."""
        self.pushes = PushTable(self.ledger)
        self.closes = Closes()

    @property
    def pool(self) -> EngineDescription:
        """This engine's description. Raises Unavailable (NO_POOL, INTERNAL_DEFECT) while there is none."""
        if self.description is None and self.defect:
            raise Unavailable(Reason.INTERNAL_DEFECT, self.defect, retry_delay_s=1.0)
        if self.description is None:
            raise Unavailable(
                Reason.NO_POOL, "no engine is attached to this server and it has no pool of its own",
                retry_delay_s=1.0,
            )  # fmt: skip
        return self.description

    def emit(self, action: Action) -> None:
        self.actions.append(action)

    def expect(self, access: Access, *, open_: bool) -> None:
        """The opener of an access may access our memory from now on, or no longer."""
        self.emit(Expect(access.owner, open=open_, paths=access.opening.data_paths))

    def reply(self, call_id: int, answer: Answer) -> None:
        """Answers a call, and all that joined it."""
        reply = Reply(call_id, answer, self.transfers.seq)
        calls, name = self.keys.finish(call_id, reply)
        if name:
            self.timers.set(Timer.IDEMPOTENCY, name, self.now + self.limits.idempotency_s)
        for call in calls:
            self.emit(Reply(call, answer, reply.event_seq))

    def refuse(self, call_id: int, error: KVGrpcError) -> None:
        """Refuses a call, and all that joined it."""
        calls, _ = self.keys.finish(call_id, None)
        for call in calls:
            self.emit(Refuse(call, error.untraced()))

    def key_due(self, name: str) -> None:
        """Forgets an idempotency key unless what it created still lives."""
        if lives(self.keys.reply(name).answer, self.leases, self.transfers, self.allocator):
            self.timers.set(Timer.IDEMPOTENCY, name, self.now + self.limits.idempotency_s)
        else:
            self.keys.forget(name)

    def create(self, call: Call, **fields: Unpack[Wanted]) -> Transfer:
        """A new transfer of the caller's; watchers learn of it."""
        transfer = self.transfers.create(self.now, call.payer, owner=call.principal, trace=call.trace, **fields)
        self.emit(TransferChanged(transfer))
        return transfer

    def change(self, transfer_id: str, **changes: Unpack[Changes]) -> Transfer:
        """Changes a transfer; watchers learn of it. An end ends the running phase too."""
        old = self.transfers.get(transfer_id)
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
        if owner == ENGINE and self.attached:
            self.emit(TellEngine(news))

    def resolve(self, lists: BlockLists, field: str, rows: str = "groups") -> Blocks:
        """Rows of block ids, checked against the pool: one array for every group, empty where none is listed. `rows` is
        what the field calls them.

        Raises OutOfRange or InvalidRequest.
        """
        groups = self.pool.pool.groups
        blocks = [np.empty(0, dtype=np.int64) for _ in groups]
        seen = set()
        for row, (group, ids) in enumerate(lists):
            if not 0 <= group < len(groups) or group in seen:
                why = "is listed twice" if group in seen else f"does not exist; the pool has {len(groups)}"
                what = f"group {group} {why}"
                wrong = (FieldViolation(f"{field}.{rows}[{row}].group", what),)
                raise InvalidRequest(Reason.GROUP_MISMATCH, what, violations=wrong)
            seen.add(group)
            check_ids(ids, groups[group].blocks, f"{field}.{rows}[{row}]", group=group)
            blocks[group] = ids
        check_spaces(blocks, self.pool.pool, field)
        total = sum(len(ids) for ids in blocks)
        if total > self.limits.blocks_per_request:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED,
                f"{total} blocks in one request; the limit is {self.limits.blocks_per_request}",
                violations=(FieldViolation(field, f"at most {self.limits.blocks_per_request} blocks"),),
                metadata={"limit": str(self.limits.blocks_per_request)},
            )
        return tuple(blocks)

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Bytes of so many blocks of each group, over all ranks."""
        assert self.description is not None, "only a pool has blocks"
        return self.description.stage_ranks * self.description.pool.bytes_of(counts)

    def check_life(self, incarnation: int) -> None:
        """Raises Aborted (INCARNATION_CHANGED) when block ids are of another life than this one; 0 is not checked."""
        if incarnation not in (0, self.incarnation):
            raise Aborted(
                Reason.INCARNATION_CHANGED,
                "the block ids are of another life of this engine and name other blocks now: allocate again",
            )

    @property
    def pool_owner(self) -> str:
        """Who takes blocks of the pool, and schedules for it: of one whose blocks the server gives out, everyone."""
        return ENGINE if self.attached and self.pool.pool_kind is PoolKind.ENGINE_MANAGED else EVERYONE

    def check_pool(self, caller: str, verb: Verb) -> None:
        """Raises PermissionDenied (NOT_OWNER) for a caller that does not speak for the engine whose pool this is."""
        if not may(caller, verb, Thing(Kind.POOL, self.pool_owner)):
            raise PermissionDenied(Reason.NOT_OWNER, NOT_THE_ENGINE)

    def check_owned(self, blocks: Blocks, allocation_id: str, caller: str) -> None:
        """Raises PreconditionFailed: BLOCK_NOT_ALLOCATED for blocks of a pool that this server manages which are not
        the caller's, or not of the allocation that is stated; POOL_KIND_MISMATCH for an allocation of a pool that the
        engine manages. Raises PermissionDenied (NOT_OWNER) for blocks of such a pool unless the engine names them.
        """
        if self.pool.pool_kind is PoolKind.SERVER_MANAGED:
            self.allocator.check_usable(blocks, allocation_id, caller)
            return
        if any(len(ids) for ids in blocks) and not may(caller, Verb.USE, Thing(Kind.BLOCKS, self.pool_owner)):
            raise PermissionDenied(Reason.NOT_OWNER, NOT_THE_ENGINE)
        if allocation_id:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, "the engine's own block manager gives out these blocks: state no allocation"
            )

    def check_key(self, key: bytes, *, begins: bool = True) -> None:
        """Raises PreconditionFailed for a transfer key under which nothing may come for a while: CANCELLED,
        SOURCE_FAILED where the source gave up, TRANSFER_ENDED where the push has ended without it. `begins`: what comes
        can be no late part of what has ended.
        """
        known = self.tombstones.get(key)
        if known is not None and not (begins and known.parts_only):
            raise PreconditionFailed(known.error.reason, known.error.sentence)

    def check_grant(self, token: bytes) -> None:
        """Raises PreconditionFailed for a WRITE grant whose push is over, as `check_key` does."""
        known = self.ended_grants.get(digest_of(token))
        if known is not None:
            raise PreconditionFailed(known.reason, known.message)

    def tombstone_key(
        self, key: bytes, message: str, reason: Reason = Reason.CANCELLED, *, parts_only: bool = False
    ) -> None:
        """What comes under that key is refused for a while; past the bound the oldest key is forgotten. `parts_only`:
        only parts of a push, until a destination registers for one.
        """
        check_transfer_key(key)
        tombstone = Tombstone(too_late(reason, message), parts_only)
        self._bury(self.tombstones, key, tombstone, Timer.TOMBSTONE, message)

    def end_grant(self, token: bytes, message: str, reason: Reason) -> None:
        """That WRITE grant is refused for a while; past the bound the oldest one is forgotten."""
        self._bury(self.ended_grants, digest_of(token), too_late(reason, message), Timer.ENDED_GRANT, message)

    def lift_tombstone(self, key: bytes) -> None:
        """The request of that key is begun anew."""
        if key in self.tombstones:
            del self.tombstones[key]
            self.timers.clear(Timer.TOMBSTONE, key.hex())

    def let_retry(self, key: bytes) -> None:
        """What has ended under that key may be tried again; what was cancelled before it came may not."""
        known = self.tombstones.get(key)
        if known is not None and known.error.reason is not Reason.CANCELLED:
            self.lift_tombstone(key)

    def check_open(self) -> None:
        """Raises PreconditionFailed (DRAINING) or Exhausted (QUARANTINED) while no new leases, pulls and allocations
        are taken.
        """
        if self.draining:
            raise PreconditionFailed(Reason.DRAINING, "this server drains and takes no new work: choose another engine")
        self.check_steady()
        if full := self.quarantine_full():
            raise Exhausted(Reason.QUARANTINED, full, retry_delay_s=1.0)

    def check_steady(self) -> None:
        """Raises Exhausted (QUARANTINED) while the memory is being registered again."""
        if self.rekeying:
            busy = f"this engine's memory is being registered again: {self.rekeying}"
            raise Exhausted(Reason.QUARANTINED, busy, retry_delay_s=1.0)

    def caller(self, engine_id: str, incarnation: int, proof: bytes) -> Peer:
        """The life of a peer that calls. Raises PreconditionFailed: NO_HANDSHAKE for one that is unknown, or proved and
        dead; NOT_PROVED for who does not show that it speaks for it. A dead life that hears NO_HANDSHAKE was believed.
        """
        peer = self.peers.get(peer_key(engine_id, incarnation))
        if peer is not None and not peer.proves(proof):
            why = f"the caller does not show what engine {engine_id} was told: shake hands again"
            raise PreconditionFailed(Reason.NOT_PROVED, why)
        if peer is None or peer.state is PeerState.DEAD:
            why = f"engine {engine_id} has no handshake with this incarnation; Handshake first"
            raise PreconditionFailed(Reason.NO_HANDSHAKE, why)
        return peer

    def lives_on(self, life: str) -> bool:
        """Whether that life of a peer is known and not declared dead."""
        peer = self.peers.get(life)
        return peer is not None and peer.state is not PeerState.DEAD

    def writing_lives(self) -> dict[str, None]:
        """Lives of sources that may write here, in the order in which they came: the same in every process."""
        return dict.fromkeys(reservation.writers[id_].life for id_, reservation in self.open_writes.items())

    def raise_generation(self) -> None:
        """The memory was registered again."""
        self.description = replace(self.pool, memory_generation=self.pool.memory_generation + 1)

    def quarantine_full(self) -> str:
        """Which group has too many blocks in quarantine, as text; empty while no group has."""
        for group, count in enumerate(self.pins.quarantined[space] for space in self.pins.spaces):
            if count and count > self.limits.quarantine_share * (blocks := self.pool.pool.groups[group].blocks):
                return (
                    f"{count} of {blocks} blocks of group {group} are in quarantine: ListPins says what would prove "
                    "them at rest; ReleaseQuarantine, if that does not come"
                )
        return ""

    def check_room(self) -> None:
        """Raises Exhausted (QUEUE_FULL) when there are as many transfers as may be."""
        most = self.limits.transfers
        if self.transfers.live >= most:
            raise Exhausted(
                Reason.QUEUE_FULL, f"{most} transfers wait or run", retry_delay_s=1.0, metadata={"limit": str(most)}
            )

    def _bury(self, table: Tombstones[bytes, T], name: bytes, row: T, timer: Timer, message: str) -> None:
        for oldest in table.bury(name, row, len(message)):
            self.timers.clear(timer, oldest.hex())
        self.timers.set(timer, name.hex(), self.now + self.limits.registration_timeout_s)
