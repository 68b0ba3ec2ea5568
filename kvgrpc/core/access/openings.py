"""OpenAccess at the issuer: everything is verified before any block id is told.

A row waits, for a bounded time, while something is missing: its lease is not announced, its step is not over, or its
peer is suspect. Waiting rows are indexed by what they miss, so that an event looks only at rows that it may help.
"""

from kvgrpc.core.actions import Openings
from kvgrpc.core.events import OpenAccess, Opened
from kvgrpc.core.receive.reservations import Reservations
from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.waiting_rows import OpenCall
from kvgrpc.core.tables.accesses import Access, AccessOpening, AccessState
from kvgrpc.core.tables.leases import Lease, ended_error
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.block_ids import ARRAY_BYTES, Ids
from kvgrpc.core.values.content import check
from kvgrpc.core.values.grants import AccessKind, check_consumer, read_claims, verify
from kvgrpc.core.values.groups import check_prefix
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.owners import PEER
from kvgrpc.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    full,
    invalid,
    too_many,
)

OPENING_BYTES = 800
"""Ledger weight of a call whose accesses wait, in bytes; each of its rows adds OPENING_ROW_BYTES."""
OPENING_ROW_BYTES = 200
STEP = "step"
COPY = "copy"
LEASE = "lease"
LIVENESS = "liveness"
POSTINGS = "postings"


class AccessOpenings:
    """Accesses from the request until they are open."""

    def __init__(self, state: NodeState, reservations: Reservations, firmness: Firmness) -> None:
        self._state = state
        self._reservations = reservations
        self._firmness = firmness

    def open(self, event: OpenAccess, peer: Peer) -> None:
        """Handles OpenAccess. Rows succeed or fail one by one; the call is answered after its last row."""
        count = len(event.openings)
        nbytes, payer = OPENING_BYTES + OPENING_ROW_BYTES * count, PEER + peer.key
        self._state.ledger.check(payer, nbytes)
        call = OpenCall(event.call.id, [None] * count, count)
        if not count:
            self._state.reply(call.id, Openings(()))
        for row, opening in enumerate(event.openings):
            self._open_row(call, row, peer, opening, event.call.principal)
        if call.left:
            self._state.ledger.keep(RowKind.OPENING, call.id, payer, nbytes)

    def retry(self, missing: str, whose: str = "") -> None:
        """Retries the accesses that miss this."""
        for access_id in list(self._state.access.openings.missing.get((missing, whose), ())):
            self._try(self._state.access.rows[access_id])

    def wait_due(self, name: str) -> None:
        """Refuses an opening that waited too long."""
        access = self._state.access.rows[bytes.fromhex(name)]
        self._refuse(access, _wait_error(access))

    def dismiss(self, access: Access, error: KVGrpcError) -> None:
        """Answers an access's waiting rows with an error and withdraws its claim on the lease."""
        self._stop_waiting(access)
        self._answer(access, error)
        lease = self._state.send.leases.find(access.lease_id)
        if lease is not None and access.id in lease.waiting:
            lease.waiting.remove(access.id)
            self._firmness.unclaimed(lease)

    def refuse_all(self, error: KVGrpcError) -> None:
        for access_id in list(self._state.access.openings.rows):
            self._refuse(self._state.access.rows[access_id], error)

    def lease_missed(self, lease: Lease) -> None:
        """Retries the openings that wait on a lease that ended, which refuses them."""
        for access_id in sorted(lease.waiting):  # a set of bytes has another order in each process
            self._try(self._state.access.rows[access_id])

    def end_all(self, error: KVGrpcError) -> None:
        """Answers all waiting rows with an error: the incarnation ends."""
        for access_id in list(self._state.access.openings.rows):
            self.dismiss(self._state.access.rows[access_id], error)

    def _open_row(self, call: OpenCall, row: int, peer: Peer, opening: AccessOpening, caller: str) -> None:
        try:
            self._check_room(call, opening)
            access = self._state.access.rows.get(opening.access_id)
            if access is None:
                access = self._new(peer, opening, caller)
            else:
                _check_same(access, peer, opening)
                access.waits_for_blocks &= opening.waits_for_blocks
        except KVGrpcError as error:
            self._answer_row(call, row, error)
            return
        self._state.access.openings.rows.setdefault(access.id, []).append((call, row))
        self._try(access)

    def _check_room(self, call: OpenCall, opening: AccessOpening) -> None:
        """Raises OutOfRange for a row whose blocks might not fit into the answer beside those of earlier rows."""
        most, blocks = self._state.limits.blocks_per_request, read_claims(opening.token).block_count
        if call.blocks and call.blocks + blocks > most:
            raise too_many(f"the openings of one call have at most {most} blocks: ask again", most)
        call.blocks += blocks

    def _new(self, peer: Peer, opening: AccessOpening, caller: str) -> Access:
        state = self._state
        if len(opening.access_id) != ACCESS_ID_BYTES:
            raise invalid("openings.access_id", f"has {ACCESS_ID_BYTES} random bytes")
        if opening.access_id in self._state.access.closed_ids:
            raise PreconditionFailed(Reason.ACCESS_CLOSED, "this access was closed long ago; open a new one")
        kind = AccessKind.READ if opening.push_content is None else AccessKind.WRITE
        engine = state.life.engine
        claims = verify(opening.token, state.life.grant_key, engine.engine_id, state.life.incarnation, kind)
        check_consumer(caller, claims)
        if kind is AccessKind.READ and opening.claim is None:
            raise InvalidRequest(Reason.CONTENT_REQUIRED, "opening a READ grant takes a content claim")
        if len(state.access.rows) >= (most := state.limits.accesses):
            raise full(f"{most} accesses are known", most)
        if len(peer.accesses) >= (most := state.limits.accesses_per_peer):
            raise full(f"{most} accesses of this peer are known", most)
        access = Access(opening, peer.description.engine_id, peer.key, claims.lease_id, state.now, kind=kind)
        pinned = 8 * claims.block_count + ARRAY_BYTES * len(engine.pool.groups)
        state.ledger.check(PEER + peer.key, access.kept_bytes + pinned)
        state.access.add(peer, access)
        return access

    def _try(self, access: Access) -> None:
        """Opens a WAITING access if nothing is missing, and answers the rows that ask for it."""
        waited = bool(access.waiting_for)
        if waited:
            self._unlist(access)
        try:
            answer = self._fill(access) if access.kind is AccessKind.WRITE else self._read(access)
        except KVGrpcError as error:
            self._refuse(access, error)
            return
        if answer is None:
            self._wait(access)
        else:
            if waited:
                self._state.timers.clear(Timer.OPEN_WAIT, access.id.hex())
            self._answer(access, answer)

    def _fill(self, access: Access) -> Opened | None:
        """Returns what a source may fill, or None while something is missing. Raises the error that refuses the
        opening.
        """
        state = self._state
        access.waiting_for = ""
        if access.state is AccessState.WAITING:
            parts = self._reservations.check(access)
            if self._reservations.misses_step(access):
                access.waiting_for = STEP
            elif self._reservations.misses_postings(access):
                access.waiting_for = POSTINGS
            elif state.peers.lives[access.peer].state is PeerState.SUSPECT:
                access.waiting_for = LIVENESS
            else:
                self._reservations.open(access, parts)
        return None if access.waiting_for else self._reservations.opened(access)

    def _read(self, access: Access) -> Opened | None:
        """Returns what a reader may read, or None while something is missing. Raises the error that refuses the
        opening.
        """
        lease = self._lease_of(access)
        if lease is None:
            return None
        if access.state is AccessState.WAITING:
            self._check_content(access, lease)
            opened = self._opened(access, lease)
            self._admit(access, lease, opened)
            return opened
        return self._opened(access, lease)

    def _lease_of(self, access: Access) -> Lease | None:
        """Returns the access's lease, or None while something is missing. Raises the error that refuses the opening."""
        state = self._state
        access.waiting_for = ""
        if access.stale is not None:
            raise PreconditionFailed(access.stale, "the lease ended under this access")
        if access.lease_id in state.tombstones.leases:
            raise PreconditionFailed(Reason.LEASE_REFUSED, "the hand-over of this lease was refused at its engine")
        lease = state.send.leases.find(access.lease_id)
        if lease is None:
            access.waiting_for = LEASE
            return None
        if lease.pushed:
            raise PreconditionFailed(
                Reason.WAITS_FOR_MISMATCH, "these blocks are pushed: their source opens the access"
            )
        if not lease.live:
            self._state.send.soft_leases.missed(lease)
            raise ended_error(lease)
        if access.state is AccessState.OPEN:
            return lease
        if lease.after_step > state.pool.steps.done():
            access.waiting_for = STEP
        elif lease.uncopied:
            access.waiting_for = COPY
        elif state.peers.lives[access.peer].state is PeerState.SUSPECT:
            access.waiting_for = LIVENESS
        return None if access.waiting_for else lease

    def _check_content(self, access: Access, lease: Lease) -> None:
        claim = access.opening.claim
        assert claim is not None
        access.tokens = check(lease.content, claim)
        check_prefix(self._state.life.engine.pool.groups, lease.content.tokens, access.tokens)

    def _admit(self, access: Access, lease: Lease, opened: Opened) -> None:
        state = self._state
        access.move(AccessState.OPEN)
        lease.waiting.discard(access.id)
        lease.opened(access.id, access.consumer)
        self._firmness.claimed(lease)
        state.pool.pins.add(access.owner, PinKind.ACCESS, tuple([ids for _, ids in opened.blocks]), state.now)
        state.access.weigh(access)
        state.expect(access, open_=True)
        if not lease.transfer_id:
            return
        transfer = state.transfers.get(lease.transfer_id)
        peer = state.peers.lives[access.peer].description
        state.change(
            transfer.id,
            state=State.ACTIVE,
            waiting_for="",
            phases=transfer.phases or transfer.phases_at(state.now, "readers"),
            peer_engine_id=peer.engine_id,
            peer_incarnation=peer.incarnation,
            peer_address=peer.address,
            peer_transfer_id=access.opening.transfer_id,
        )

    def _opened(self, access: Access, lease: Lease) -> Opened:
        state = self._state
        engine = state.life.engine
        rows = enumerate(zip(lease.blocks, engine.pool.groups, strict=True))
        return Opened(
            blocks=tuple([(i, _first(ids, group.blocks_of(access.tokens))) for i, (ids, group) in rows]),
            token_count=access.tokens,
            offer_tokens=lease.content.tokens,
            remaining_s=lease.deadline - state.now,
            ttl_s=lease.ttl_s,
            memory_generation=engine.memory_generation,
            transfer_id=lease.transfer_id,
            lease_id=lease.id,
        )

    def _refuse(self, access: Access, error: KVGrpcError) -> None:
        """Refuses an opening. An access that never opened is forgotten."""
        self.dismiss(access, error)
        if access.state is AccessState.WAITING:
            self._state.access.forget(access)

    def _wait(self, access: Access) -> None:
        self._state.access.openings.missing.setdefault(_missing(access), {})[access.id] = None
        lease = self._state.send.leases.find(access.lease_id) if access.kind is AccessKind.READ else None
        if lease is not None:
            lease.waiting.add(access.id)
            self._firmness.claimed(lease)
        name = access.id.hex()
        if self._state.timers.when(Timer.OPEN_WAIT, name) is None:
            self._state.timers.set(Timer.OPEN_WAIT, name, self._state.now + self._state.limits.open_wait_s)

    def _stop_waiting(self, access: Access) -> None:
        self._unlist(access)
        self._state.timers.clear(Timer.OPEN_WAIT, access.id.hex())

    def _unlist(self, access: Access) -> None:
        waiting = self._state.access.openings.missing.get(_missing(access))
        if waiting is not None:
            waiting.pop(access.id, None)
            if not waiting:
                del self._state.access.openings.missing[_missing(access)]

    def _answer(self, access: Access, answer: Opened | KVGrpcError) -> None:
        for call, row in self._state.access.openings.rows.pop(access.id, []):
            self._answer_row(call, row, answer)

    def _answer_row(self, call: OpenCall, row: int, answer: Opened | KVGrpcError) -> None:
        call.rows[row] = answer.untraced() if isinstance(answer, KVGrpcError) else answer
        call.left -= 1
        if not call.left:
            self._state.ledger.drop(RowKind.OPENING, call.id)
            self._state.reply(call.id, Openings(tuple([row for row in call.rows if row is not None])))


def _first(ids: Ids, count: int) -> Ids:
    """Returns the first `count` ids. All ids are returned without a view, because a view is copied when it is kept."""
    return ids if len(ids) == count else ids[:count]


def _missing(access: Access) -> tuple[str, str]:
    """Returns what an access waits for, and the lease or peer that this belongs to."""
    whose = {LEASE: access.lease_id, COPY: access.lease_id, LIVENESS: access.peer}
    return access.waiting_for, whose.get(access.waiting_for, "")


def _check_same(access: Access, peer: Peer, opening: AccessOpening) -> None:
    """Raises unless this opening repeats the one known under its access id."""
    known = access.opening
    same = access.peer == peer.key and known.token == opening.token
    if same and access.state is AccessState.CLOSED:  # before the claim: a closing that came first has none
        raise PreconditionFailed(Reason.ACCESS_CLOSED, "this access is closed; open a new one")
    if not same or _asked(known) != _asked(opening):
        raise PermissionDenied(Reason.ACCESS_REUSED, "this access id belongs to another consumer, grant or claim")


def _asked(opening: AccessOpening) -> tuple[object, ...]:
    """Returns what an opening asks for under its grant, and how it will be used."""
    return opening.claim, opening.reverse_access_id, opening.part_epoch, opening.push_content


def _wait_error(access: Access) -> KVGrpcError:
    if access.waiting_for == LEASE:
        return PreconditionFailed(Reason.LEASE_NOT_FOUND, f"lease {access.lease_id} was never announced by its engine")
    return DeadlineExceeded(
        Reason.DEADLINE,
        f"opening the access waited too long for: {access.waiting_for}",
        retry_delay_s=1.0,
        metadata={"phase": f"open/{access.waiting_for}"},
    )
