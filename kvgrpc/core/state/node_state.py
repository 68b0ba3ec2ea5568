"""All mutable state of a node, and the few operations that every room needs.

The rooms above hold the rules. They share this one object and act on each other's decisions through `react`. `begin`
makes new tables for an incarnation: they contain nothing of the old one, unless a defect ended that.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, Unpack

import numpy as np

from kvgrpc.core.actions import Action, Answer, EngineNews, Expect, Refuse, Reply, TellEngine, TransferChanged
from kvgrpc.core.events import SendWanted
from kvgrpc.core.idempotency import IdempotencyKeys, lives
from kvgrpc.core.state.caller_budget import KEYS_A_RENEWAL, CallerBudget
from kvgrpc.core.state.handshake import Handshake, OutgoingHandshake
from kvgrpc.core.state.move_table import MoveTable
from kvgrpc.core.state.pull import PullMove
from kvgrpc.core.state.push_table import PushTable
from kvgrpc.core.state.reactions import Reactions
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.state.waiting_rows import ChecksumAsks, Closes, Mirrors, Prefetch, Proofs, WaitingOpenings
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.allocator import Allocator
from kvgrpc.core.tables.closed_ids import ClosedAccessIds
from kvgrpc.core.tables.lacking_requests import LackingRequests
from kvgrpc.core.tables.leases import LeaseTable
from kvgrpc.core.tables.ledger import Ledger
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.pins import PinTable
from kvgrpc.core.tables.soft_leases import SoftLeases
from kvgrpc.core.tables.steps import RankSteps
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tables.tombstones import Tombstone, Tombstones, digest_of, too_late
from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.tables.transfers import ENDED, Changes, Transfer, TransferTerms
from kvgrpc.core.tables.turns import Turns
from kvgrpc.core.values.block_ids import Blocks, check_ids, check_spaces
from kvgrpc.core.values.call import BlockLists, Call
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.grants import signing_key
from kvgrpc.core.values.ids import check_transfer_key, peer_key
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE, EVERYONE, Thing, ThingKind, Verb, may
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
    """All that a node knows. `now` is the time of the event being handled."""

    def __init__(self, limits: Limits, writers: frozenset[str], *, checksums: bool = False) -> None:
        self.limits = limits
        self.writers = writers
        self.checksums = checksums
        self.now = 0.0
        self.actions: list[Action] = []
        self.react: Reactions
        self.peers: dict[str, Peer] = {}
        """Peers by life. The lead ends them all before an incarnation begins."""
        self.timers = Timers()
        self.dial_budget = CallerBudget("handshakes with other engines")
        self.renewal_budget = CallerBudget(f"renewals of {KEYS_A_RENEWAL} keys at other engines")
        self.incarnation = 0
        self.attached = False
        self.description: EngineDescription | None = None
        self.draining = False
        self.stopping = False
        """True when the server was told to end. It then drains for good."""
        self.rekeying = ""
        """Reason why the ranks' data paths are about to begin again. Empty otherwise."""
        self.defect = ""
        """Reason why there is no engine, from a life's defect until the next life begins. Empty otherwise."""
        self.begin(0, b"", None, attached=False)

    def begin(
        self, incarnation: int, secret: bytes, description: EngineDescription | None, *, attached: bool,
        sets_aside: bool = True, mirrored: bool = False,
    ) -> None:  # fmt: skip
        """Makes empty tables for a new incarnation. The caller has ended everything of the old one. Transfers and
        leases of a life that a defect ended stay known until the next life ends.
        """
        self.rekeying = ""
        self.sets_aside, self.expects_pushes, self.mirrored = sets_aside, False, mirrored
        self.incarnation, self.secret = incarnation, secret
        self.grant_key = signing_key(secret)
        self.description = description
        self.attached = attached
        self.began = self.now
        self.ledger = Ledger(self.limits)
        """Bytes kept by each caller. The rooms enter schedulers' requests and tensors themselves."""
        if not self.defect:
            self.leases = LeaseTable(self.limits.ended_leases, self.ledger)
            self.transfers = TransferTable(incarnation, self.limits.transfer_history, self.ledger)
        self.leases.enter(self.ledger)
        self.transfers.enter(self.ledger)
        self.transfers.incarnation, self.transfers.secret = incarnation, secret
        self.defect = "" if description else self.defect
        self.dials: dict[str, OutgoingHandshake] = {}
        """Handshakes that this lead started, by address."""
        self.handshakes: dict[str, Handshake] = {}
        """All handshakes under way, by key."""
        self.drop_moves()
        self.accesses: dict[bytes, Access] = {}
        self.openings = WaitingOpenings()
        self.closed_ids = ClosedAccessIds(self.limits.accesses)
        self.checksum_asks = ChecksumAsks()
        self.sends: dict[str, tuple[int, str]] = {}
        """Calls of peers that wait until a rank begins to send: name -> call id and pair of ranks."""
        self.meetings: dict[str, list[SendWanted]] = {}
        """Requests of our ranks to meet ranks of a peer, by its life. The peer has only introduced itself so far."""
        self.on_device = False
        """True when some rank has offered device memory."""
        self.prefetch = Prefetch()
        self.mirrors = Mirrors()
        self.proofs = Proofs()
        self.keys = IdempotencyKeys(self.limits.idempotency_keys, self.ledger)
        self.tombstones = Tombstones[bytes, Tombstone]("key", self.ledger)
        """Transfer keys under which something may still come too late."""
        self.ended_grants = Tombstones[bytes, KVGrpcError]("grant", self.ledger)
        """Digests of WRITE grants whose push is over -> error for calls that use them."""
        self.refused_leases = Tombstones[str, None]("lease", self.ledger)
        """Ids of leases whose hand-over was refused."""
        self.turns = Turns(self.limits.in_flight_bytes)
        self.steps = RankSteps(description)
        self.lacking = LackingRequests()
        self.soft_leases = SoftLeases()
        self.bytes_received = self.bytes_sent = 0
        sizes = tuple(g.blocks for g in description.pool.groups) if description else ()
        self.pins = PinTable(sizes, description.pool.spaces if description else ())
        self.allocator = Allocator(sizes, self.pins, self.ledger)

    def drop_moves(self) -> None:
        """Makes empty tables of moves. Nothing more is told or proved about moves of an old incarnation."""
        self.moves = MoveTable(self.ledger)
        self.receives: dict[str, PullMove] = {}
        """Pulls and reservations that are not forgotten, by transfer."""
        self.targets: dict[str, ReservationMove] = {}
        """Reservations that are not forgotten, by the target in their grant."""
        self.open_writes: dict[bytes, ReservationMove] = {}
        """Reservations by access. Sources may write into them until the contrary is proved."""
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
        """Tells the ranks whether the opener of an access may access our memory."""
        self.emit(Expect(access.owner, open=open_, paths=access.opening.data_paths))

    def reply(self, call_id: int, answer: Answer) -> None:
        """Answers a call and all calls that joined it."""
        reply = Reply(call_id, answer, self.transfers.seq)
        calls, name = self.keys.finish(call_id, reply)
        if name:
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
        if lives(self.keys.reply(name).answer, self.leases, self.transfers, self.allocator):
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
        """Returns block ids checked against the pool: one array for each group, empty where none is listed. `rows` is
        the field's name for the lists.

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
        """Returns the bytes of these block counts by group, over all ranks."""
        assert self.description is not None, "only a pool has blocks"
        return self.description.stage_ranks * self.description.pool.bytes_of(counts)

    def check_life(self, incarnation: int) -> None:
        """Raises Aborted (INCARNATION_CHANGED) when block ids are of another life. Incarnation 0 is not checked."""
        if incarnation not in (0, self.incarnation):
            raise Aborted(
                Reason.INCARNATION_CHANGED,
                "the block ids are of another life of this engine and name other blocks now: allocate again",
            )

    @property
    def pool_owner(self) -> str:
        """Owner of the pool's blocks and scheduling. A pool whose blocks the server gives out belongs to everyone."""
        return ENGINE if self.attached and self.pool.pool_kind is PoolKind.ENGINE_MANAGED else EVERYONE

    def check_pool(self, caller: str, verb: Verb) -> None:
        """Raises PermissionDenied (NOT_OWNER) for a caller that does not speak for the engine that owns the pool."""
        if not may(caller, verb, Thing(ThingKind.POOL, self.pool_owner)):
            raise PermissionDenied(Reason.NOT_OWNER, NOT_THE_ENGINE)

    def check_owned(self, blocks: Blocks, allocation_id: str, caller: str) -> None:
        """Raises PreconditionFailed (BLOCK_NOT_ALLOCATED) in a server-managed pool for blocks that are not the caller's
        or not of the stated allocation. Raises in an engine-managed pool PermissionDenied (NOT_OWNER) for blocks that
        the engine does not name, and PreconditionFailed (POOL_KIND_MISMATCH) for a stated allocation.
        """
        if self.pool.pool_kind is PoolKind.SERVER_MANAGED:
            self.allocator.check_usable(blocks, allocation_id, caller)
            return
        if any(len(ids) for ids in blocks) and not may(caller, Verb.USE, Thing(ThingKind.BLOCKS, self.pool_owner)):
            raise PermissionDenied(Reason.NOT_OWNER, NOT_THE_ENGINE)
        if allocation_id:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, "the engine's own block manager gives out these blocks: state no allocation"
            )

    def check_key(self, key: bytes, *, begins: bool = True) -> None:
        """Raises PreconditionFailed for a refused transfer key: CANCELLED, SOURCE_FAILED when the source gave up, or
        TRANSFER_ENDED or LEASE_RECLAIMED when the push is over. `begins` means that the call cannot be a late part of
        an ended push.
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
        """Refuses calls under that key for a while. Beyond the table's limit the oldest key is forgotten. `parts_only`
        refuses only parts of a push, until a destination registers for one.
        """
        check_transfer_key(key)
        tombstone = Tombstone(too_late(reason, message), parts_only)
        self._bury(self.tombstones, key, tombstone, Timer.TOMBSTONE, message)

    def end_grant(self, token: bytes, message: str, reason: Reason) -> None:
        """Refuses that WRITE grant for a while. Beyond the table's limit the oldest one is forgotten."""
        self._bury(self.ended_grants, digest_of(token), too_late(reason, message), Timer.ENDED_GRANT, message)

    def lift_tombstone(self, key: bytes) -> None:
        """Accepts the key again, because its request is begun again."""
        if key in self.tombstones:
            del self.tombstones[key]
            self.timers.clear(Timer.TOMBSTONE, key.hex())

    def let_retry(self, key: bytes) -> None:
        """Lets an ended request be tried again under its key, unless it was cancelled."""
        known = self.tombstones.get(key)
        if known is not None and known.error.reason is not Reason.CANCELLED:
            self.lift_tombstone(key)

    def check_open(self) -> None:
        """Raises PreconditionFailed (DRAINING) or Exhausted (QUARANTINED) while no new work is accepted."""
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
        """Returns the calling life of a peer. Raises PreconditionFailed (NOT_PROVED) for a caller without that life's
        proof, and (NO_HANDSHAKE) for a life that is unknown or dead. A dead life gets NO_HANDSHAKE only with its proof.
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
        """Returns whether a peer's life is known and not declared dead."""
        peer = self.peers.get(life)
        return peer is not None and peer.state is not PeerState.DEAD

    def writing_lives(self) -> dict[str, None]:
        """Returns the lives of sources that may write here. The order of arrival is the same in every process."""
        return dict.fromkeys(reservation.writers[id_].life for id_, reservation in self.open_writes.items())

    def raise_generation(self) -> None:
        """Raises the generation after the memory was registered again."""
        self.description = replace(self.pool, memory_generation=self.pool.memory_generation + 1)

    def quarantine_full(self) -> str:
        """Returns text that names a group with too many blocks in quarantine, or ""."""
        for group, count in enumerate(self.pins.quarantined[space] for space in self.pins.spaces):
            if count and count > self.limits.quarantine_share * (blocks := self.pool.pool.groups[group].blocks):
                return (
                    f"{count} of {blocks} blocks of group {group} are in quarantine: ListPins says what would prove "
                    "them at rest; ReleaseQuarantine, if that does not come"
                )
        return ""

    def check_room(self) -> None:
        """Raises Exhausted (QUEUE_FULL) when there are as many transfers as allowed."""
        most = self.limits.transfers
        if self.transfers.live >= most:
            raise Exhausted(
                Reason.QUEUE_FULL, f"{most} transfers wait or run", retry_delay_s=1.0, metadata={"limit": str(most)}
            )

    def _bury(self, table: Tombstones[bytes, T], name: bytes, row: T, timer: Timer, message: str) -> None:
        for oldest in table.bury(name, row, len(message)):
            self.timers.clear(timer, oldest.hex())
        self.timers.set(timer, name.hex(), self.now + self.limits.registration_timeout_s)
