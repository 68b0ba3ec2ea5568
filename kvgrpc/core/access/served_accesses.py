"""Accesses of peers to this engine's blocks: settling, closing, and counting consumers.

A verdict is given once. When an access closes, its consumer's identity decides what that means for the lease.
"""

from kvgrpc.core.access.openings import COPY, LEASE, LIVENESS, POSTINGS, STEP, AccessOpenings
from kvgrpc.core.actions import Closings, Verdicts
from kvgrpc.core.events import (
    AccessClosing,
    AccessSettling,
    CloseAccess,
    CloseOutcome,
    OpenAccess,
    PartsReady,
    PostingEnded,
    SettleAccess,
)
from kvgrpc.core.receive.pulls import Pulls
from kvgrpc.core.receive.reservations import Reservations
from kvgrpc.core.send.leases import Leases
from kvgrpc.core.send.pushes import Pushes
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.tables.accesses import Access, AccessOpening, AccessState, Verdict
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.grants import AccessKind, OnAbort, check_consumer, read_claims, verify
from kvgrpc.core.values.ids import ACCESS_ID_BYTES, peer_key
from kvgrpc.errors import Exhausted, KVGrpcError, PreconditionFailed, Reason


class ServedAccesses:
    """The issuer's side of every access."""

    def __init__(
        self, state: NodeState, leases: Leases, pulls: Pulls, reservations: Reservations, pushes: Pushes,
        openings: AccessOpenings,
    ) -> None:  # fmt: skip
        self._state = state
        self._leases = leases
        self._pulls = pulls
        self._reservations = reservations
        self._pushes = pushes
        self._openings = openings

    def open(self, event: OpenAccess) -> None:
        """Handles OpenAccess. Raises PreconditionFailed (NO_HANDSHAKE) if memory was registered again since the peer's
        handshake.
        """
        peer = self._state.peers.caller(event.engine_id, event.incarnation, event.call.proof)
        self._state.pool.check_steady()
        if peer.told != self._state.life.engine.memory_generation:
            raise PreconditionFailed(
                Reason.NO_HANDSHAKE, "this engine's memory was registered again since the handshake: shake hands again"
            )
        self._openings.open(event, peer)

    def settle(self, event: SettleAccess) -> None:
        """Answers SettleAccess with a verdict on every access; a final verdict is kept. After the last settle of a
        write the source is at rest, whatever the verdict.
        """
        self._take_proofs(event, [row.access_id for row in event.settlings if row.last])
        peer = self._state.peers.caller(event.engine_id, event.incarnation, event.call.proof)
        rows = tuple([self._settle_row(peer, row) for row in event.settlings])
        self._state.reply(event.call.id, Verdicts(rows))

    def close(self, event: CloseAccess) -> None:
        """Answers CloseAccess: ends accesses that will not be settled. Unknown ids become tombstones."""
        self._take_proofs(event, [row.access_id for row in event.closings if row.quiesced])
        peer = self._state.peers.caller(event.engine_id, event.incarnation, event.call.proof)
        rows = tuple(self._close_row(event.call, peer, row) for row in event.closings)
        self._state.reply(event.call.id, Closings(rows))

    def parts_ready(self, event: PartsReady) -> None:
        """Handles PartsReady: see `Reservations.parts_ready`."""
        self._reservations.parts_ready(
            event, self._state.peers.caller(event.engine_id, event.incarnation, event.call.proof)
        )

    def lease_announced(self, lease: Lease) -> None:
        """Counts consumers that gave up before the lease was announced, and retries openings that came before it."""
        for access_id in self._state.access.openings.early.pop(lease.id, {}):
            self._count(self._state.access.rows[access_id], lease, received=False)
        if self._state.access.openings.missing:
            self._openings.retry(LEASE, lease.id)

    def lease_refused(self, lease_id: str) -> None:
        """Retries openings that wait for a lease: they fail, because its hand-over was refused."""
        self._openings.retry(LEASE, lease_id)

    def lease_copied(self, lease: Lease) -> None:
        """Retries openings that waited for the mirrors."""
        self._openings.retry(COPY, lease.id)

    def retry_step(self) -> None:
        """Retries openings that waited for the engine's step."""
        self._openings.retry(STEP)

    def posting_ended(self, _: PostingEnded) -> None:
        """Retries openings that waited for our own postings."""
        if self._state.access.openings.missing:
            self._openings.retry(POSTINGS)

    def peer_heard(self, peer: Peer) -> None:
        """Retries openings of a peer that is heard again."""
        self._openings.retry(LIVENESS, peer.key)

    def peer_again(self, peer: Peer) -> None:
        """Tells the ranks that a peer may read by any data path from now on, whatever it said before."""
        for access_id in peer.accesses:
            access = self._state.access.rows[access_id]
            if access.kind is AccessKind.READ:
                self._state.read_by(access, ())

    def peer_dead(self, peer: Peer) -> None:
        """Closes the accesses of a dead peer. The grant decides whether the peer counts as a done consumer."""
        lost = f"engine {peer.description.engine_id} was declared dead"
        for access_id in list(peer.accesses):
            access = self._state.access.rows.get(access_id)
            if access is None:  # an earlier one ended the lease on which it waited
                continue
            if access.kind is AccessKind.WRITE and access.held:
                self._reservations.closed(access, reason=Reason.PEER_LOST, message=lost, quiesced=False)
            else:
                self._close(access, CloseOutcome.DROPPED, message=lost)

    def stop_reads(self) -> None:
        """Makes open READ accesses stale and refuses waiting openings: the memory is about to be registered again."""
        state = self._state
        for access in list(state.access.rows.values()):
            if access.kind is AccessKind.READ and access.state is AccessState.OPEN:
                self._leases.outdate(access, Reason.MEMORY_CHANGED)
        busy = "this engine's memory is being registered again"
        self._openings.refuse_all(Exhausted(Reason.QUARANTINED, busy, retry_delay_s=1.0))

    def forget(self, name: str) -> None:
        """Forgets a closed access when its verdict was kept long enough. Closes a stale access that its reader never
        closed.
        """
        access = self._state.access.rows[bytes.fromhex(name)]
        if access.held:
            self._close(access)
            return
        self._state.access.forget(access)
        if self._state.access.closed_ids.add(access.id):
            self._await_turn()
        early = self._state.access.openings.early.get(access.lease_id)
        if early is not None:
            early.pop(access.id, None)
            if not early:
                del self._state.access.openings.early[access.lease_id]
        peer = self._state.peers.lives.get(access.peer)
        if peer is not None:
            peer.closed_early.discard(access.id)

    def closed_ids_due(self, _: str) -> None:
        """Forgets the older generation of ids of closed accesses, whose time is over."""
        if self._state.access.closed_ids.turn():
            self._await_turn()

    def end_all(self) -> None:
        """Expects no more access by peers: the incarnation ends."""
        for access in self._state.access.rows.values():
            if access.held:
                self._state.expect(access, open_=False)

    def _take_proofs(self, event: SettleAccess | CloseAccess, at_rest: list[bytes]) -> None:
        """Takes a life's word that it writes nothing more under these accesses. A life declared dead may give it too,
        if it shows its proof.
        """
        if not self._state.receive.open_writes:
            return
        peer = self._state.peers.lives.get(peer_key(event.engine_id, event.incarnation))
        if peer is not None and peer.proves(event.call.proof):
            for access_id in at_rest:
                self._reservations.quiesced(peer, access_id)

    def _await_turn(self) -> None:
        self._state.timers.set(Timer.CLOSED_IDS, "", self._state.now + self._state.limits.registration_timeout_s)

    def _settle_row(self, peer: Peer, row: AccessSettling) -> Verdict:
        access = self._state.access.rows.get(row.access_id)
        if access is None or access.peer != peer.key or access.state is AccessState.WAITING:
            return Verdict(False, Reason.ACCESS_NOT_FOUND, "no such access is open here")
        if access.kind is AccessKind.WRITE:
            return self._reservations.settle(access, row)
        if row.part < access.settled and not row.last:
            return Verdict(True)
        verdict = access.verdict or _verdict(access)
        if verdict.valid and not access.verdict:
            reader = self._state.send.pushes.of_reader(access.id)
            ready = not row.part if reader is None else reader.was_told(row)  # a pull has no parts
            if not ready:
                verdict = Verdict(False, Reason.INVALID_FIELD, f"part {row.part} was never ready")
        if verdict.valid and access.held:
            access.settled = row.part + 1
            self._account(access, row.nbytes)
        if row.last or not verdict.valid:
            access.verdict = verdict
        if row.last and access.held:
            self._close(access, received=verdict.valid)
        return verdict

    def _close_row(self, call: Call, peer: Peer, row: AccessClosing) -> bool:
        access = self._state.access.rows.get(row.access_id)
        if access is None:
            ours = self._pulls.cancelled(peer.key, row) or self._pushes.refused(call, peer.key, row)
            if not ours:
                self._tombstone(call.principal, peer, row)
            return False
        if access.peer != peer.key:
            return False
        was_open = access.held
        if access.kind is AccessKind.WRITE and was_open:
            message = row.message or "the source gave up"
            reason = Reason.CANCELLED if row.outcome is CloseOutcome.CANCELLED else Reason.SOURCE_FAILED
            self._reservations.closed(access, reason=reason, message=message, quiesced=row.quiesced)
        else:
            waiting = access.state is AccessState.WAITING
            self._close(access, row.outcome, message=row.message)
            if access.kind is AccessKind.WRITE and waiting:
                self._reservations.refused(peer, access.lease_id, row)
        return was_open

    def _tombstone(self, caller: str, peer: Peer, row: AccessClosing) -> None:
        """Keeps a closed access for a closing that overtook its opening, so that the opening is refused. A drop still
        reaches its lease. A grant that the caller may not use leaves nothing.
        """
        state = self._state
        if len(row.access_id) != ACCESS_ID_BYTES or len(state.access.rows) >= state.limits.accesses:
            return
        if row.access_id in state.access.closed_ids or len(peer.closed_early) >= state.limits.closed_early_per_peer:
            return
        try:
            kind = read_claims(row.token).access
            claims = verify(row.token, state.life.grant_key, state.life.engine.engine_id, state.life.incarnation, kind)
            check_consumer(caller, claims)
        except KVGrpcError:
            return
        if kind is AccessKind.WRITE:
            self._reservations.refused(peer, claims.lease_id, row)
        access = Access(
            AccessOpening(row.access_id, row.token, None), peer.description.engine_id, peer.key, claims.lease_id,
            state.now, kind=kind,
        )  # fmt: skip
        state.access.add(peer, access)
        peer.closed_early.add(access.id)
        self._close(access, row.outcome, message=row.message)

    def _close(
        self, access: Access, outcome: CloseOutcome = CloseOutcome.FAILED, *, received: bool = False, message: str = ""
    ) -> None:
        """Closes an access. Its consumer is done if it got the KV, or gave up under a grant that counts that."""
        state = self._state
        if access.state is AccessState.CLOSED:
            return
        if access.held:
            state.pool.pins.drop(access.owner, PinKind.ACCESS)
            state.expect(access, open_=False)
            kept_s = max(state.limits.settle_timeout_s, state.limits.open_wait_s)
        else:
            self._openings.dismiss(access, PreconditionFailed(Reason.ACCESS_CLOSED, "its opener closed this access"))
            kept_s = state.limits.registration_timeout_s
        access.move(AccessState.CLOSED)
        access.outcome, access.why = outcome, message
        state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), state.now + kept_s)
        if access.kind is AccessKind.WRITE:
            return
        lease = state.send.leases.find(access.lease_id)
        if lease is not None:
            lease.closed(access.id)
            if message:
                lease.trouble = f"engine {access.consumer}: {message}"
            reader = state.send.pushes.of_reader(access.id)
            if reader is not None and reader.stage is not MoveStage.ENDED:
                self._pushes.reader_gone(reader, access, message, received=received)
            self._count(access, lease, received=received)
        else:
            self._state.access.openings.early.setdefault(access.lease_id, {})[access.id] = None

    def _count(self, access: Access, lease: Lease, *, received: bool) -> None:
        """Records at the lease what its closed access means for the consumer."""
        if received:
            lease.received.add(access.consumer)
        cancelled = access.outcome is CloseOutcome.CANCELLED
        if cancelled:
            lease.cancelled_by[access.consumer] = access.why or "cancelled"
        dropped = access.outcome is CloseOutcome.DROPPED and lease.on_abort is OnAbort.RELEASE
        if received or cancelled or dropped:
            lease.finished.add(access.consumer)
        self._leases.count(lease)

    def _account(self, access: Access, nbytes: int) -> None:
        """Counts bytes that a reader reports as moved, for display. One report counts at most the lease's bytes."""
        lease = self._state.send.leases.get(access.lease_id)
        moved = min(nbytes, self._state.pool.bytes_of(list(map(len, lease.blocks))))
        lease.nbytes_done += moved
        self._state.moves.bytes_sent += moved


def _verdict(access: Access) -> Verdict:
    if access.state is AccessState.OPEN:
        return Verdict(True)
    if access.stale is not None:
        return Verdict(False, access.stale, "the lease ended before the last byte was settled")
    return Verdict(False, Reason.ACCESS_CLOSED, "the access was closed before it was settled")
