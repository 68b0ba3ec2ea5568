"""Accesses of peers to this engine's blocks: opening, settling, closing.

The issuer verifies everything before it says a single block id, and again after the last byte. A row that cannot be
answered yet (its lease is not announced, its step is not over, its peer is suspect) waits, for a bounded time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvgrpc.core.accesses import Access, AccessState, Opening, Verdict
from kvgrpc.core.actions import Closings, Expect, Openings, Verdicts
from kvgrpc.core.content import check
from kvgrpc.core.events import CloseAccess, Closing, OpenAccess, Opened, SettleAccess, Settling
from kvgrpc.core.grants import Access as AccessKind
from kvgrpc.core.grants import OnAbort, verify
from kvgrpc.core.handover import HandOver
from kvgrpc.core.ids import ACCESS_ID_BYTES, peer_key
from kvgrpc.core.leases import Lease, ended_error
from kvgrpc.core.peers import Peer, PeerState
from kvgrpc.core.pins import PinKind
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import State
from kvgrpc.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
)

MISSING_STEP = "step"
MISSING_LEASE = "lease"
MISSING_LIVENESS = "liveness"


@dataclass(eq=False)
class _OpenCall:
    """An OpenAccess call that is answered when its last row is."""

    call_id: int
    rows: list[Opened | KVGrpcError | None]

    @property
    def complete(self) -> bool:
        return all(row is not None for row in self.rows)


class Serving:
    """The issuer's side of every access."""

    def __init__(self, state: NodeState, handover: HandOver) -> None:
        self._state = state
        self._handover = handover
        self._waiting: dict[bytes, list[tuple[_OpenCall, int]]] = {}
        """Rows that wait, by access id."""

    def open(self, event: OpenAccess) -> None:
        """OpenAccess: every row is answered on its own."""
        peer = self._caller(event.engine_id, event.incarnation)
        call = _OpenCall(event.call.id, [None] * len(event.openings))
        for row, opening in enumerate(event.openings):
            self._open_row(call, row, peer, opening)
        self._answer(call)

    def settle(self, event: SettleAccess) -> None:
        """SettleAccess: the verdict on every access, given once and kept."""
        peer = self._caller(event.engine_id, event.incarnation)
        rows = tuple(self._settle_row(peer, row) for row in event.settlings)
        self._state.reply(event.call.id, Verdicts(rows))

    def close(self, event: CloseAccess) -> None:
        """CloseAccess: ends accesses that will not be settled; unknown ids become tombstones."""
        peer = self._caller(event.engine_id, event.incarnation)
        rows = tuple(self._close_row(peer, row) for row in event.closings)
        self._state.reply(event.call.id, Closings(rows))

    def lease_announced(self, lease: Lease) -> None:
        """Openings that came before their lease can be answered."""
        self._retry(MISSING_LEASE, lambda access: access.lease_id == lease.id)

    def lease_refused(self, lease_id: str) -> None:
        """The hand-over of a lease was refused: whoever waits for it fails at once."""
        self._retry(MISSING_LEASE, lambda access: access.lease_id == lease_id)

    def step_done(self) -> None:
        """Openings that waited for the engine's step can be answered."""
        self._retry(MISSING_STEP, lambda _: True)

    def peer_alive(self, peer: Peer) -> None:
        """Openings of a peer that is heard again can be answered."""
        self._retry(MISSING_LIVENESS, lambda access: access.peer == peer.key)

    def peer_dead(self, peer: Peer) -> None:
        """Its accesses are closed; whether it counts as a consumer is the grant's to say."""
        for access_id in list(peer.accesses):
            access = self._state.accesses[access_id]
            self._close(access, dropped=True)

    def wait_due(self, name: str) -> None:
        """An opening waited long enough."""
        access = self._state.accesses[bytes.fromhex(name)]
        self._refuse(access, _wait_error(access))

    def forget(self, name: str) -> None:
        """The verdict of a closed access was kept long enough."""
        access = self._state.accesses.pop(bytes.fromhex(name))
        self._detach(access)

    def end_all(self, error: KVGrpcError) -> None:
        """The incarnation ends: openings that wait are refused."""
        for access_id in list(self._waiting):
            self._answer_rows(self._state.accesses[access_id], error)

    def _caller(self, engine_id: str, incarnation: int) -> Peer:
        peer = self._state.peers.get(peer_key(engine_id, incarnation))
        if peer is None or peer.state is PeerState.DEAD:
            raise PreconditionFailed(
                Reason.NO_HANDSHAKE, f"engine {engine_id} has no handshake with this incarnation; Handshake first"
            )
        return peer

    def _open_row(self, call: _OpenCall, row: int, peer: Peer, opening: Opening) -> None:
        state = self._state
        known = state.accesses.get(opening.access_id)
        try:
            if len(opening.access_id) != ACCESS_ID_BYTES:
                raise InvalidRequest(Reason.INVALID_FIELD, f"an access id has {ACCESS_ID_BYTES} random bytes")
            if known is None:
                claims = verify(
                    opening.token, state.grant_key, state.pool.engine_id, state.incarnation, AccessKind.READ
                )
                known = Access(opening, peer.description.engine_id, peer.key, claims.lease_id, state.now)
                state.accesses[known.id] = known
                peer.accesses[known.id] = None
                deadline = state.now + state.limits.open_wait_s
                state.timers.set(Timer.OPEN_WAIT, known.id.hex(), deadline)
            elif known.peer != peer.key or known.opening.token != opening.token:
                raise PermissionDenied(Reason.ACCESS_REUSED, "this access id belongs to another consumer or grant")
            elif known.state is AccessState.CLOSED:
                raise PreconditionFailed(Reason.ACCESS_CLOSED, "this access is closed; open a new one")
        except KVGrpcError as error:
            call.rows[row] = error
            return
        self._waiting.setdefault(known.id, []).append((call, row))
        self._try_open(known)

    def _try_open(self, access: Access) -> None:
        """Opens a WAITING access if nothing is missing, and answers the rows that ask for it."""
        state = self._state
        try:
            lease = self._lease_of(access)
            if lease is None:
                return
            if access.state is AccessState.WAITING:
                if access.opening.claim is None:
                    raise InvalidRequest(Reason.CONTENT_REQUIRED, "opening a READ grant takes a content claim")
                check(lease.content, access.opening.claim)
                self._admit(access, lease)
        except KVGrpcError as error:
            self._refuse(access, error)
            return
        answer = self._opened(access, lease)
        self._answer_rows(access, answer)
        state.timers.clear(Timer.OPEN_WAIT, access.id.hex())

    def _lease_of(self, access: Access) -> Lease | None:
        """The access's lease, or None while something is missing. Raises what refuses it."""
        state = self._state
        lease = state.leases.find(access.lease_id)
        if access.lease_id in state.refused_leases:
            raise PreconditionFailed(Reason.LEASE_REFUSED, "the hand-over of this lease was refused at its engine")
        if lease is None:
            access.waiting_for = MISSING_LEASE
        elif not lease.live:
            raise ended_error(lease.state, lease.id)
        elif lease.after_step > state.step_done():
            access.waiting_for = MISSING_STEP
        elif state.peers[access.peer].state is PeerState.SUSPECT:
            access.waiting_for = MISSING_LIVENESS
        else:
            access.waiting_for = ""
            return lease
        return None

    def _admit(self, access: Access, lease: Lease) -> None:
        state = self._state
        answer = self._opened(access, lease)
        access.move(AccessState.OPEN)
        lease.accesses[access.id] = None
        state.pins.add(access.owner, PinKind.ACCESS, state.resolve(answer.blocks, "lease"), state.now)
        state.emit(Expect(access.owner, open=True))
        if lease.transfer_id:
            transfer = state.transfers.get(lease.transfer_id)
            peer = state.peers[access.peer]
            state.change(
                transfer.id,
                state=State.ACTIVE,
                waiting_for="",
                phases=transfer.phase_started("readers", state.now) if not transfer.phases else transfer.phases,
                peer_engine_id=peer.description.engine_id,
                peer_incarnation=peer.description.incarnation,
                peer_address=peer.description.address,
                peer_transfer_id=access.opening.transfer_id,
            )

    def _opened(self, access: Access, lease: Lease) -> Opened:
        state = self._state
        assert access.opening.claim is not None
        tokens = access.opening.claim.tokens
        groups = state.pool.pool.groups
        blocks = tuple((i, ids[: -(-tokens // groups[i].block_tokens)]) for i, ids in enumerate(lease.blocks))
        return Opened(
            blocks=blocks,
            token_count=tokens,
            offer_tokens=lease.content.tokens,
            remaining_s=lease.deadline - state.now,
            ttl_s=lease.ttl_s,
            memory_generation=state.pool.memory_generation,
            transfer_id=lease.transfer_id,
            lease_id=lease.id,
        )

    def _refuse(self, access: Access, error: KVGrpcError) -> None:
        """Refuses an opening. A WAITING access that never opened leaves nothing behind."""
        self._state.timers.clear(Timer.OPEN_WAIT, access.id.hex())
        self._answer_rows(access, error)
        if access.state is AccessState.WAITING:
            del self._state.accesses[access.id]
            self._detach(access)

    def _answer_rows(self, access: Access, answer: Opened | KVGrpcError) -> None:
        for call, row in self._waiting.pop(access.id, []):
            call.rows[row] = answer
            self._answer(call)

    def _answer(self, call: _OpenCall) -> None:
        if call.complete and call.call_id:
            self._state.reply(call.call_id, Openings(tuple(row for row in call.rows if row is not None)))
            call.call_id = 0

    def _retry(self, missing: str, wanted: Callable[[Access], bool]) -> None:
        ready = [
            self._state.accesses[id_]
            for id_ in self._waiting
            if self._state.accesses[id_].waiting_for == missing and wanted(self._state.accesses[id_])
        ]
        for access in ready:
            self._try_open(access)

    def _settle_row(self, peer: Peer, row: Settling) -> Verdict:
        access = self._state.accesses.get(row.access_id)
        if access is None or access.peer != peer.key or access.state is AccessState.WAITING:
            return Verdict(False, Reason.ACCESS_NOT_FOUND, "no such access is open here")
        if access.verdict is not None:
            return access.verdict
        verdict = _verdict(access)
        if row.last or not verdict.valid:
            access.verdict = verdict
        if row.last:
            self._close(access, dropped=False, received=verdict.valid)
        return verdict

    def _close_row(self, peer: Peer, row: Closing) -> bool:
        access = self._state.accesses.get(row.access_id)
        if access is not None and access.peer != peer.key:
            return False
        if access is None:
            self._tombstone(peer, row)
            return False
        was_open = access.state is not AccessState.CLOSED
        if access.state is AccessState.WAITING:
            self._answer_rows(access, PreconditionFailed(Reason.ACCESS_CLOSED, "the opener closed this access"))
            self._state.timers.clear(Timer.OPEN_WAIT, access.id.hex())
        self._close(access, dropped=row.dropped)
        return was_open

    def _tombstone(self, peer: Peer, row: Closing) -> None:
        """A closing may overtake its opening: the opening is then refused. A drop still reaches its lease."""
        state = self._state
        try:
            claims = verify(row.token, state.grant_key, state.pool.engine_id, state.incarnation, AccessKind.READ)
        except KVGrpcError:
            return
        opening = Opening(row.access_id, row.token, None)
        access = Access(opening, peer.description.engine_id, peer.key, claims.lease_id, state.now)
        state.accesses[access.id] = access
        peer.accesses[access.id] = None
        self._close(access, dropped=row.dropped)

    def _close(self, access: Access, *, dropped: bool, received: bool = False) -> None:
        """Closes an access and counts its consumer if it got the KV, or gave up under a grant that says so."""
        state = self._state
        if access.state is AccessState.CLOSED:
            return
        if access.held:
            state.pins.drop(access.owner, PinKind.ACCESS)
            state.emit(Expect(access.owner, open=False))
        access.move(AccessState.CLOSED)
        forget = state.now + max(state.limits.settle_timeout_s, state.limits.open_wait_s)
        state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), forget)
        lease = state.leases.find(access.lease_id)
        if lease is None:
            return
        lease.accesses.pop(access.id, None)
        others = any(state.accesses[id_].consumer == access.consumer for id_ in lease.accesses)
        counts = received or (dropped and lease.on_abort is OnAbort.RELEASE)
        if counts and not others:
            self._handover.consumer_done(lease, access.consumer, received=received)

    def _detach(self, access: Access) -> None:
        peer = self._state.peers.get(access.peer)
        if peer is not None:
            peer.accesses.pop(access.id, None)


def _verdict(access: Access) -> Verdict:
    if access.state is AccessState.OPEN:
        return Verdict(True)
    if access.state is AccessState.STALE:
        assert access.stale is not None
        return Verdict(False, access.stale, "the lease ended before the last byte was settled")
    return Verdict(False, Reason.ACCESS_CLOSED, "the access was closed before it was settled")


def _wait_error(access: Access) -> KVGrpcError:
    if access.waiting_for == MISSING_LEASE:
        return PreconditionFailed(Reason.LEASE_NOT_FOUND, f"lease {access.lease_id} was never announced by its engine")
    return DeadlineExceeded(
        Reason.DEADLINE,
        f"opening the access waited too long for: {access.waiting_for}",
        metadata={"phase": f"open/{access.waiting_for}"},
    )
