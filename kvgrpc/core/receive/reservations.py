"""Pushes at their destination: ReserveBlocks, the accesses that sources open on the blocks, and their later calls.

A source that moves the bytes itself settles here. Otherwise this side reads, and settles at the source, with the steps
of a pull. Either way success needs every part, and the blocks come back when nothing can access them any more.
"""

from dataclasses import replace

from kvgrpc.core.actions import BlocksReserved, Operation, Widened
from kvgrpc.core.events import (
    AccessClosing,
    AccessSettling,
    CloseOutcome,
    Destination,
    Opened,
    PartsReady,
    PushSource,
    ReserveBlocks,
)
from kvgrpc.core.moves.course import RE_PACKED_ON_DEVICE
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.receive.key_renewals import KeyRenewals
from kvgrpc.core.receive.pull_course import check_destination
from kvgrpc.core.receive.reservation_course import ReservationCourse, add_writer, drop_writer
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import MOVE_BYTES, MoveStage
from kvgrpc.core.state.reservation import Refusal, ReservationMove, claims_of, unknown_source
from kvgrpc.core.tables.accesses import Access, AccessState, Verdict, parts_bytes
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import TRANSFER_BYTES, Direction, Phase, State
from kvgrpc.core.values import content as contents
from kvgrpc.core.values.block_ids import blocks_bytes
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import AccessKind, Claims, mint
from kvgrpc.core.values.groups import check_prefix
from kvgrpc.core.values.ids import ACCESS_ID_BYTES, check_transfer_key, mint_lease_id
from kvgrpc.core.values.limits import granted_timeout
from kvgrpc.core.values.owners import PEER, tenant_of
from kvgrpc.core.values.parts import Parts
from kvgrpc.errors import (
    AlreadyExists,
    InvalidRequest,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unimplemented,
    invalid,
)


class Reservations:
    """Blocks that this engine reserves for pushes, and the accesses of sources to them."""

    def __init__(self, state: NodeState, handshakes: Handshakes, course: ReservationCourse) -> None:
        self._state = state
        self._handshakes = handshakes
        self.keys = KeyRenewals(state, handshakes)
        self._course = course
        self._ends = course.ends
        self._reserved = 0

    # -- calls

    def reserve(self, event: ReserveBlocks) -> None:
        """Handles ReserveBlocks: makes a RECEIVE transfer and a WRITE grant."""
        state = self._state
        state.pool.check_open()
        check_transfer_key(event.key)
        state.tombstones.check_key(event.key, tenant=tenant_of(event.call.principal))
        if event.content is None:
            raise InvalidRequest(Reason.CONTENT_REQUIRED, "a reservation states the content that it wants")
        claim = contents.claim(event.content, event.content.tokens, event.use_tokens, prefix=event.allow_prefix)
        where = Destination(event.blocks, event.have_tokens, event.allocation_id)
        blocks = check_destination(state, where, claim.tokens, event.call.principal, prefix="")
        limits = state.limits
        timeout_s = granted_timeout(event.registration_timeout_s, limits.registration_timeout_s, limits)
        if any(t.direction is Direction.RECEIVE and not t.over for t in state.transfers.with_key(event.key)):
            raise AlreadyExists(Reason.TRANSFER_EXISTS, "blocks are received under this transfer key already")
        state.transfers.check_room(event.call.payer)
        kept = 2 * blocks_bytes(blocks) + len(claim.prefix)
        state.ledger.check(event.call.payer, MOVE_BYTES + TRANSFER_BYTES + kept)
        me = state.life.engine
        target_id = mint_lease_id(state.life.secret, state.life.incarnation, "target", self._reserved + 1)
        count = sum(len(ids) for ids in blocks)
        if not count and event.have_tokens < claim.tokens:
            wrong = f"{claim.tokens} tokens, {event.have_tokens} of them held, take blocks; none is listed"
            raise InvalidRequest(Reason.BLOCK_COUNT_MISMATCH, wrong)
        claims = Claims(
            AccessKind.WRITE, me.engine_id, state.life.incarnation, me.address, target_id, event.key, timeout_s, count,
            claim.tokens, tenant=tenant_of(event.call.principal),
        )  # fmt: skip
        token = mint(claims, state.life.grant_key)
        if event.source is not None:
            self._handshakes.check_room(event.source.address, event.source.engine_id, 0, event.call.connection)
        if event.validate_only:
            state.reply(event.call.id, BlocksReserved(None, b""))
            return
        self._reserved, source = self._reserved + 1, event.source or PushSource("")
        nbytes = state.pool.bytes_of([len(ids) for ids in blocks])
        transfer = state.create(
            event.call,
            direction=Direction.RECEIVE,
            key=event.key,
            request_id=event.request_id,
            peer_engine_id=source.engine_id,
            peer_address=source.address,
            use_tokens=claim.tokens,
            blocks=count,
            nbytes=nbytes,
            waiting_for="source",
            phases=(Phase("rendezvous", state.now),),
            priority=event.priority,
        )
        reservation = ReservationMove(
            transfer.id, token, unknown_source(source, event.key), b"", event.call.trace, claim,
            stage=MoveStage.RENDEZVOUS,
            target_id=target_id,
            registration_timeout_s=timeout_s,
            expected=nbytes,
            cap=state.now + limits.lease_cap_s,
            payer=event.call.payer,
        )  # fmt: skip
        self._course.take(reservation, blocks, event.after_step, event.have_tokens)
        state.moves.add(reservation)
        state.receive.transfers[transfer.id] = state.receive.targets[target_id] = reservation
        self._course.await_part(reservation)
        state.reply(event.call.id, BlocksReserved(transfer, token))
        if source.address:
            self._course.connect(reservation, event.call.connection)

    def parts_ready(self, event: PartsReady, peer: Peer) -> None:
        """Handles PartsReady: the source widens what this side may read."""
        access = self._state.access.rows.get(event.access_id)
        if access is None or access.peer != peer.key or access.kind is not AccessKind.WRITE:
            raise PreconditionFailed(Reason.ACCESS_NOT_FOUND, "no such access is open here")
        if access.state is not AccessState.OPEN:
            self._state.tombstones.check_grant(access.opening.token)
            raise PreconditionFailed(Reason.ACCESS_CLOSED, "this push has ended at its destination")
        reservation = self._state.receive.targets[access.lease_id]
        if reservation.parts is None:
            raise PermissionDenied(Reason.ACCESS_REUSED, "this access is one under which its opener writes")
        fresh = [row for row in event.parts if row.number >= len(reservation.parts)]
        self._state.ledger.check(PEER + peer.key, parts_bytes(fresh))
        reservation.parts.extend(fresh)
        self._state.ledger.weigh(RowKind.PARTS, reservation.name, reservation.parts.kept_bytes)
        if fresh:
            self._course.await_part(reservation)
        self._state.reply(event.call.id, Widened())
        self._course.try_post(reservation)

    # -- accesses of sources

    def misses_step(self, access: Access) -> bool:
        """Returns whether an opening must wait for the engine's step: the source would write too early."""
        reservation = self._reservation_of(access)
        return not access.opening.reverse_access_id and reservation.after_step > self._state.pool.steps.done()

    def misses_postings(self, access: Access) -> bool:
        """Returns whether an opening must wait for our own postings, of parts that it replaces."""
        return bool(self._reservation_of(access).postings)

    def check(self, access: Access) -> Parts | None:
        """Raises the error that refuses the opening of a WAITING access. Returns its parts if this side moves them."""
        state = self._state
        reservation = self._reservation_of(access)
        opening = access.opening
        assert opening.push_content is not None, "an opening without content is one of a READ grant"
        self._compare(access, opening.push_content, reservation)
        if state.peers.on_device and state.peers.lives[access.peer].bridges.incoming.repacked:
            reservation.refused = Refusal(access.peer, Reason.INCOMPATIBLE_POOLS)
            raise PreconditionFailed(Reason.INCOMPATIBLE_POOLS, RE_PACKED_ON_DEVICE)
        if reservation.write_access and (
            access.peer != reservation.peer or opening.part_epoch == reservation.part_epoch
        ):
            raise PermissionDenied(Reason.ACCESS_REUSED, "the push is delivered under another access already")
        if reservation.write_access and opening.part_epoch < reservation.part_epoch:
            raise PreconditionFailed(Reason.PREEMPTED, "parts of a higher epoch are delivered already")
        if opening.access_id in state.receive.open_writes or self._reads(opening.access_id):
            raise PermissionDenied(Reason.ACCESS_REUSED, "this access id belongs to an access of this engine")
        reverse = opening.reverse_access_id
        if reverse and (len(reverse) != ACCESS_ID_BYTES or state.moves.of_access(reverse) is not None):
            raise invalid("openings.reverse_access_id", f"has {ACCESS_ID_BYTES} new random bytes")
        if not reverse:
            if state.moves.checksums or state.life.mirrored or not state.life.sets_aside:
                raise Unimplemented(
                    Reason.FEATURE_UNAVAILABLE, "this engine moves by itself what is pushed to it: let it read"
                )
            return None
        source = state.peers.lives[access.peer].description
        parts = Parts(source.pool, opening.push_content.tokens, state.limits.blocks_per_request)
        parts.extend(opening.parts)
        return parts

    def _compare(self, access: Access, offered: ContentId, reservation: ReservationMove) -> None:
        """Sets the number of tokens that may be filled: all wanted tokens, or a prefix if that is enough. Raises
        otherwise.
        """
        wanted, have = reservation.claim, reservation.have_tokens
        try:
            access.tokens = contents.check(offered, wanted)
            if access.tokens < wanted.tokens and access.tokens <= have:
                what = f"only {access.tokens} tokens are the same, and {have} are held"
                raise PreconditionFailed(Reason.CONTENT_MISMATCH, what)
            for tokens in (offered.tokens, wanted.tokens):
                check_prefix(self._state.life.engine.pool.groups, tokens, access.tokens)
            # The source's lists start at its first block for all tokens that it offers.
            check_prefix(self._state.peers.lives[access.peer].description.pool.groups, offered.tokens, access.tokens)
        except KVGrpcError as error:
            reservation.refused = Refusal(access.peer, error.reason)
            raise

    def open(self, access: Access, parts: Parts | None) -> None:
        """Opens a WAITING access that was checked. It replaces what came under an earlier one."""
        state = self._state
        reservation = self._reservation_of(access)
        opening = access.opening
        reverse = opening.reverse_access_id
        if reservation.write_access:
            self._replace(reservation)
        peer = state.peers.lives[access.peer]
        access.move(AccessState.OPEN)
        state.expect(access, open_=True)
        reservation.write_access = access.id
        reservation.part_epoch = opening.part_epoch
        state.moves.bind(reservation, peer.key)
        reservation.claims = claims_of(peer.description, reservation.claims.transfer_key)
        access.opening = replace(opening, parts=())
        state.access.weigh(access)
        if access.tokens < reservation.claim.tokens:
            reservation.narrow(state.life.engine.pool.groups, access.tokens)
            reservation.expected = state.pool.bytes_of([len(ids) for ids in reservation.filled])
            state.change(reservation.transfer_id, nbytes=reservation.expected, use_tokens=access.tokens)
            state.moves.weigh(reservation)
        if parts is not None:
            reservation.begin(peer.description.pool, parts)
            state.ledger.keep(RowKind.PARTS, reservation.name, PEER + peer.key, parts.kept_bytes)
            state.moves.index_access(reservation, reverse)
        else:
            add_writer(state, reservation, access.id, peer)
            reservation.access_id = access.id
        reservation.move(MoveStage.OPEN)
        state.timers.clear(Timer.OPEN_RETRY, reservation.name)
        transfer = state.transfers.get(reservation.transfer_id)
        state.change(
            reservation.transfer_id,
            state=transfer.state if reverse else State.ACTIVE,
            phases=transfer.phases if reservation.rounds else transfer.phases_at(state.now, "queue"),
            waiting_for="parts",
            peer_engine_id=peer.description.engine_id,
            peer_incarnation=peer.description.incarnation,
            peer_address=peer.description.address,
            peer_transfer_id=opening.transfer_id,
        )
        self._course.await_part(reservation)
        self._course.try_post(reservation)

    def opened(self, access: Access) -> Opened:
        """Returns what the opener of an open access may fill."""
        state = self._state
        reservation, peer = self._reservation_of(access), state.peers.lives[access.peer]
        return Opened(
            blocks=tuple(enumerate(reservation.filled)),
            token_count=reservation.claim.tokens,
            offer_tokens=reservation.claim.tokens,
            remaining_s=max((state.timers.when(Timer.REGISTRATION, reservation.name) or state.now) - state.now, 0.0),
            ttl_s=reservation.registration_timeout_s,
            memory_generation=state.life.engine.memory_generation,
            transfer_id=reservation.transfer_id,
            lease_id=reservation.target_id,
            data_paths=tuple(sorted(peer.data_paths)) if access.opening.reverse_access_id and peer.reachable else (),
        )

    def settle(self, access: Access, row: AccessSettling) -> Verdict:
        """Returns the verdict on parts that a writing source has moved. A repeated settle gets the same verdict."""
        if access.verdict is None and (access.state is not AccessState.OPEN or access.opening.reverse_access_id):
            reason = access.stale or Reason.ACCESS_CLOSED
            access.verdict = Verdict(False, reason, "the push ended at its destination before it settled")
        if access.verdict is not None:
            if row.last and access.state is AccessState.STALE:
                self._ends.close_access(access)
            return access.verdict
        if row.part < access.settled and not row.last:
            return Verdict(True)
        reservation = self._state.receive.targets[access.lease_id]
        access.settled = row.part + 1
        target = reservation.destination
        assert target is not None
        # A peer's count is only shown, and never more than there is.
        most = self._state.pool.bytes_of([len(ids) for ids in target])
        moved = min(row.nbytes, most - reservation.nbytes)
        reservation.nbytes += moved
        self._state.moves.bytes_received += moved
        if row.last:
            access.verdict = Verdict(True)
            drop_writer(self._state, access.id)
            reservation.move(MoveStage.SETTLING)
            self._state.change(reservation.transfer_id, nbytes=reservation.nbytes, nbytes_done=reservation.nbytes)
            self._ends.succeed(reservation)
        else:
            self._state.change(reservation.transfer_id, nbytes_done=reservation.nbytes)
            self._course.parts_arrived(reservation, self._within(row.layers_done))
        return Verdict(True)

    def closed(self, access: Access, *, reason: Reason, message: str, quiesced: bool) -> None:
        """Ends the access of an opener that closed it, or died; a push under way fails."""
        live = access.state is AccessState.OPEN
        self._ends.close_access(access)
        if quiesced:
            drop_writer(self._state, access.id)
        if live:
            reservation = self._state.receive.targets[access.lease_id]
            # A peer declared dead may still write until it is told to stop.
            knows = reservation.parts is None and reason is not Reason.PEER_LOST
            self._ends.fail_with(reservation, reason, message, closed=knows)

    def refused(self, peer: Peer, target_id: str, row: AccessClosing) -> None:
        """Fails a push whose source cannot deliver: it has opened nothing yet, or has not opened again."""
        reservation = self._state.receive.targets.get(target_id)
        if reservation is None:
            return
        if row.quiesced:
            for access_id, writer in list(reservation.writers.items()):
                if writer.life == peer.key and peer.was_told(writer.told):
                    drop_writer(self._state, access_id)
        mine = not reservation.write_access or reservation.peer == peer.key
        if reservation.stage is not MoveStage.ENDED and mine:
            message = row.message or f"engine {peer.description.engine_id} cannot deliver"
            known = reservation.refused if reservation.refused and reservation.refused.peer == peer.key else None
            reason = known.reason if known else Reason.SOURCE_FAILED
            if row.outcome is CloseOutcome.CANCELLED:
                reason = Reason.CANCELLED
            self._ends.fail_with(reservation, reason, message)
        elif reservation.stage is MoveStage.ENDED and not reservation.busy:
            self._ends.at_rest(reservation)

    # -- proofs

    def quiesced(self, peer: Peer, access_id: bytes) -> None:
        """Takes a source's word that its movers are at rest, even if either side declared the other dead. The caller
        that opened the access is believed; one that took its name since is not.
        """
        reservation = self._state.receive.open_writes.get(access_id)
        if reservation is None or reservation.stage is not MoveStage.ENDED:
            return
        writer = reservation.writers[access_id]
        if writer.life == peer.key and peer.was_told(writer.told):
            self._ends.proved(access_id, reservation)

    def peer_at_rest(self, peer: str) -> None:
        """Takes a proof that a life of a peer writes nothing here any more."""
        writes = [
            (id_, reservation)
            for id_, reservation in self._state.receive.open_writes.items()
            if reservation.writers[id_].life == peer
        ]
        for access_id, reservation in writes:
            assert reservation.stage is MoveStage.ENDED, "what gives the proof has ended the moves"
            self._ends.proved(access_id, reservation)

    def _replace(self, reservation: ReservationMove) -> None:
        """Ends the last access when the prefill of a push starts over: its source has nothing under way under it."""
        self._state.access.rows[reservation.write_access].stale = Reason.PREEMPTED
        self._ends.close_access(self._state.access.rows[reservation.write_access])
        drop_writer(self._state, reservation.write_access)
        self._course.start_over(reservation)

    def _reservation_of(self, access: Access) -> ReservationMove:
        reservation = self._state.receive.targets.get(access.lease_id)
        if reservation is None or reservation.stage is MoveStage.ENDED:
            self._state.tombstones.check_grant(access.opening.token)
            raise PreconditionFailed(Reason.TRANSFER_ENDED, "the push has ended at its destination")
        return reservation

    def _within(self, layers_done: tuple[LayerRange, ...]) -> tuple[LayerRange, ...]:
        """Returns the layer ranges that a source states if there are such layers; else none."""
        most = max(group.layers for group in self._state.life.engine.pool.groups)
        sound = all(first >= 0 and count > 0 and first + count <= most for first, count in layers_done)
        return layers_done if sound else ()

    def _reads(self, access_id: bytes) -> bool:
        """Returns whether this engine reads at a peer under that access."""
        move = self._state.moves.of_access(access_id)
        return move is not None and move.operation is Operation.READ
