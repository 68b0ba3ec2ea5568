"""Pushing at the source, from the first part or the first registration to the end of the last posting.

A push begins with RegisterPush or with its first part, whichever comes first. The exact transfer key pairs them. A part
is checked completely before anything changes. `push_course` tells destinations which parts are ready.
"""

from kvgrpc.core.actions import GaveUp, HandedOver, Registered
from kvgrpc.core.events import AccessClosing, CloseOutcome, FinishedBlocks, RegisterPush
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.send import handed_over
from kvgrpc.core.send.expected_pushes import ExpectedPushes
from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.send.leases import Leases
from kvgrpc.core.send.mirror_copies import MirrorCopies
from kvgrpc.core.send.push_course import PushCourse
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import MOVE_BYTES, MoveStage
from kvgrpc.core.state.push import Registration, SourcePush
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Direction, Failure, Phase, Side, State
from kvgrpc.core.values.block_ids import Blocks, blocks_bytes
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import AccessKind, Claims, OnAbort, check_tenant, read_claims
from kvgrpc.core.values.ids import ACCESS_ID_BYTES, check_transfer_key, peer_key
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.core.values.owners import tenant_of
from kvgrpc.core.values.parts import PART_BYTES, Part, Parts
from kvgrpc.errors import (
    AlreadyExists,
    InvalidRequest,
    KVGrpcError,
    NextStep,
    PreconditionFailed,
    Reason,
    invalid,
    too_many,
)


class Pushes:
    """All pushes from this engine."""

    def __init__(
        self, state: NodeState, handshakes: Handshakes, course: PushCourse, leases: Leases, firmness: Firmness,
        mirror_copies: MirrorCopies,
    ) -> None:  # fmt: skip
        self._state = state
        self._mirror_copies = mirror_copies
        self._handshakes = handshakes
        self._course = course
        self._ends = course.ends
        self.expected_pushes = ExpectedPushes(state, course.ends)
        self._leases = leases
        self._firmness = firmness

    # -- calls

    def register(self, event: RegisterPush) -> None:
        """Handles RegisterPush, which tells the source where the blocks go."""
        state = self._state
        claims = handed_over.registering(event)
        push = handed_over.registered(state, claims.transfer_key, event.call.principal)
        known = push.registrations.get(event.token) if push is not None else None
        if push is not None and known is not None:
            self._check_again(push, known)
            state.reply(event.call.id, Registered(state.transfers.get(push.transfer_id)))
            return
        self._check_key(claims.transfer_key, claims.tenant or tenant_of(event.call.principal))
        state.tombstones.check_grant(event.token)
        state.ledger.check(event.call.payer, MOVE_BYTES)
        self._handshakes.check_room(claims.address, claims.engine_id, claims.incarnation, event.call.connection)
        lease = handed_over.find(state, claims.transfer_key, event.call.principal) if push is None else None
        if lease is None:
            self._check_new(claims.transfer_key, event.call.payer) if push is None else self._check_wanted(push)
        if event.validate_only:
            state.reply(event.call.id, Registered(None if push is None else state.transfers.get(push.transfer_id)))
            return
        if lease is not None:
            push = handed_over.pushed(state, self._leases, lease, claims.transfer_key)
        elif push is None:
            push = self._new(event.call, event.request_id, claims.transfer_key, "parts")
            self.expected_pushes.registered(push)
        move = self._add(push, event, claims)
        transfer = state.transfers.get(push.transfer_id)
        if move.leading:
            transfer = state.change(
                transfer.id,
                peer_engine_id=claims.engine_id,
                peer_incarnation=claims.incarnation,
                peer_address=claims.address,
            )
        state.reply(event.call.id, Registered(transfer))
        self._course.connect(move, event.call.connection)

    def finish(self, event: FinishedBlocks) -> None:
        """Handles FinishedBlocks for a registration: one part, or the statement that there will be none."""
        state = self._state
        check_transfer_key(event.key)
        if event.failure:
            self._give_up(event, handed_over.registered(state, event.key, event.call.principal))
            return
        push = self._state.send.pushes.with_key(event.key)
        first = push is None or push.parts is None or event.part_epoch > push.part_epoch
        blocks, parts, part, content = self._check(event, push, first=first)
        lease = self._lease(event, push, content, blocks, first=first)
        if event.validate_only:
            state.reply(event.call.id, self._leases.preview(lease))
            return
        if push is None:
            push = self._new(event.call, event.request_id, event.key, "registration")
        if first:
            self._begin_epoch(push, event, parts, content, lease)
        parts.add(part, blocks)
        state.send.pushes.weigh(push)
        if not first and any(span.new for span in part.spans):
            lease.blocks = parts.blocks
            state.pool.pins.extend(lease.id, PinKind.LEASE, parts.listed([part]), state.now)
            state.send.leases.weigh(lease)
        self._leases.extend(lease, state.limits.registration_timeout_s)
        counts = [len(ids) for ids in lease.blocks]
        transfer = state.change(
            push.transfer_id,
            owner=event.call.principal,
            priority=event.priority,
            lease_id=lease.id,
            blocks=sum(counts),
            nbytes=state.pool.bytes_of(counts),
        )
        shown = lease.snapshot()
        shown.blocks = ()  # otherwise the reply to every part would list all earlier blocks again
        state.reply(event.call.id, HandedOver(shown, self._leases.times(lease), transfer, b""))
        if state.life.mirrored:
            self._mirror_copies.part_came(lease, part, blocks)
        if first:
            self._admit(push, lease)
        for move in push.live:
            if move.stage is MoveStage.RENDEZVOUS:
                self._course.connect(move)
            else:
                self._course.try_post(move)

    def cancel(self, push: SourcePush, message: str, outcome: CloseOutcome) -> None:
        """Ends a push as cancelled. `outcome` is what that means for its destinations."""
        push.outcome = outcome
        failure = Failure(Reason.CANCELLED, message or "cancelled", push.phase, Side.SOURCE, next=NextStep.RECOMPUTE)
        self._ends.end(push, State.CANCELLED, failure)

    def end_all(self, failure: Failure) -> None:
        """Fails every push at the end of the incarnation, also those without a lease."""
        for push in self._state.send.pushes:
            if not push.over:
                self._ends.end(push, State.FAILED, failure)

    # -- ends

    def voided(self, lease_id: str) -> None:
        """Handles blocks that the engine took back: the push starts over, or ends if it was a hand-over to readers."""
        push = self._state.send.pushes.with_lease(lease_id)
        if push is not None and push.over:
            self._ends.taken_back(push)
        elif push is not None and push.handed_over:
            self._leases.end(self._state.send.leases.get(lease_id), LeaseState.VOIDED)
            self._ends.taken_back(push)
        elif push is not None:
            self._ends.start_over(push, LeaseState.VOIDED)

    def refused(self, call: Call, peer: str, row: AccessClosing) -> bool:
        """Handles a destination's close of an access that we opened there. Returns False if there is no such access."""
        move = self._state.send.pushes.of_access(row.access_id) or self._state.send.pushes.with_token(row.token)
        if move is None:
            return row.outcome is not CloseOutcome.FAILED and self._never_comes(call, peer, row)
        if peer not in (move.peer, peer_key(move.claims.engine_id, move.claims.incarnation)):
            return False
        message = row.message or "the destination ended the push"
        if move.stage is not MoveStage.ENDED:
            self._ends.give_up(move, _REASONS[row.outcome], message, row.outcome)
        elif row.outcome is not CloseOutcome.FAILED and move.push.lacks(move.claims.engine_id):
            self._ends.failed(move.push, move.claims.engine_id, message, row.outcome)
        return True

    def reader_gone(self, move: Registration, access: Access, message: str, *, received: bool) -> None:
        """Ends a registration in progress whose destination closed the access under which it read."""
        if received:
            self._ends.done(move)
        elif not move.replaced or access.outcome is CloseOutcome.CANCELLED:
            self._ends.give_up(move, _REASONS[access.outcome], message or "the destination gave up", access.outcome)

    def _new(self, call: Call, request_id: str, key: bytes, waiting_for: str) -> SourcePush:
        state = self._state
        transfer = state.create(
            call,
            direction=Direction.SEND,
            key=key,
            request_id=request_id,
            waiting_for=waiting_for,
            phases=(Phase("rendezvous", state.now),),
            consumers=1,
        )
        state.tombstones.lift_key(key)
        push = SourcePush(transfer.id, key, call.payer, state.now + state.limits.lease_cap_s)
        self._state.send.pushes.begin(push)
        self.expected_pushes.begun(push)
        return push

    def _never_comes(self, call: Call, peer: str, row: AccessClosing) -> bool:
        """Handles a destination that dropped or cancelled its reservation before it registered here. Returns False when
        the row names no such reservation, or one of another tenant than the caller's.
        """
        state = self._state
        try:
            claims = read_claims(row.token)
            if claims.access is not AccessKind.WRITE or peer != peer_key(claims.engine_id, claims.incarnation):
                return False
            check_tenant(call.principal, claims)
            tenant = claims.tenant or tenant_of(call.principal)
            state.tombstones.check_key(claims.transfer_key, tenant=tenant)
            push = handed_over.registered(state, claims.transfer_key, call.principal)
            if push is None:
                self._check_new(claims.transfer_key, call.payer)
        except KVGrpcError:
            return False
        message = row.message or "it gave up"
        if row.outcome is CloseOutcome.CANCELLED:
            state.tombstones.end_grant(row.token, message, state.now, Reason.CANCELLED)
            if push is None:
                state.tombstones.end_key(claims.transfer_key, message, state.now, parts_only=True, tenant=tenant)
                return True
        elif push is None:
            push = self._new(call, "", claims.transfer_key, "parts")
        self._ends.failed(push, claims.engine_id, message, row.outcome)
        return True

    def _add(self, push: SourcePush, event: RegisterPush, claims: Claims) -> Registration:
        assert len(event.access_id) == len(event.reverse_access_id) == ACCESS_ID_BYTES, "the event has random ids"
        number = len(push.registrations) + 1
        move = Registration(
            push.transfer_id, event.token, claims, event.access_id, event.call.trace,
            name=f"{push.transfer_id}#{number}",
            leading=number == 1,
            stage=MoveStage.RENDEZVOUS,
            push=push,
            reverse_id=event.reverse_access_id,
            payer=event.call.payer,
        )  # fmt: skip
        self._state.moves.add(move)
        self._state.send.pushes.add(move)
        lease = self._state.send.leases.find(push.lease_id)
        if lease is not None:
            self._firmness.claimed(lease)
        return move

    def _begin_epoch(
        self, push: SourcePush, event: FinishedBlocks, parts: Parts, content: ContentId, lease: Lease
    ) -> None:
        """Begins the parts of a push, or of a higher epoch."""
        state = self._state
        if push.parts is not None:
            self._ends.start_over(push, LeaseState.RELEASED)
        push.parts, push.content, push.lease_id, push.part_epoch = parts, content, lease.id, event.part_epoch
        push.handed_over = event.takes_registrations
        state.timers.clear(Timer.RENDEZVOUS, push.transfer_id)
        lease.transfer_id = push.transfer_id
        lease.cap = push.cap
        lease.deadline = min(lease.deadline, push.cap)
        lease.finished, lease.received, lease.trouble = push.finished, push.received, push.trouble
        lease.cancelled_by = push.cancelled_by
        if lease.on_abort is OnAbort.RELEASE:
            push.finished |= push.dropped
        push.consumers = lease.consumers
        self._leases.add(lease, event)
        state.change(push.transfer_id, consumers=push.consumers)

    def _admit(self, push: SourcePush, lease: Lease) -> None:
        """Keeps as many destinations as the hand-over declares. Those that gave up meanwhile count."""
        for move in push.live[max(push.consumers - len(push.finished), 0) :]:
            if move.stage is not MoveStage.ENDED:  # an earlier failure here may have ended the push
                self._ends.fail_with(move, Reason.TRANSFER_EXISTS, f"it has {push.consumers} destinations already")
        self._leases.count(lease)

    def _check_key(self, key: bytes, tenant: str) -> None:
        """Checks as `Tombstones.check_key`. Counts a refused destination that missed reclaimed blocks."""
        state = self._state
        try:
            state.tombstones.check_key(key, tenant=tenant)
        except PreconditionFailed:
            leases = (state.send.leases.find(transfer.lease_id) for transfer in state.transfers.with_key(key))
            for lease in filter(None, leases):
                state.send.soft_leases.missed(lease)
            raise

    def _check_new(self, key: bytes, payer: str) -> None:
        """Raises the error that refuses a new push."""
        if any(t.direction is Direction.SEND and not t.over for t in self._state.transfers.with_key(key)):
            other = "blocks were handed over to readers under this transfer key"
            raise PreconditionFailed(Reason.WAITS_FOR_MISMATCH, other)
        self._state.pool.check_open()
        self._state.transfers.check_room(payer)

    def _check_again(self, push: SourcePush, known: Registration) -> None:
        """Raises PreconditionFailed (TRANSFER_ENDED) for a registration that failed."""
        if known.stage is MoveStage.ENDED and known.claims.engine_id not in push.received:
            raise PreconditionFailed(Reason.TRANSFER_ENDED, "this registration has failed here: reserve blocks anew")

    def _check_wanted(self, push: SourcePush) -> None:
        """Raises AlreadyExists (TRANSFER_EXISTS) when the push has all the destinations that it may have."""
        most = self._state.limits.registrations
        if len(push.registrations) >= most:
            raise AlreadyExists(Reason.TRANSFER_EXISTS, f"{most} destinations came for this push already")
        if push.content is not None and len(push.live) >= push.consumers - len(push.finished):
            raise AlreadyExists(Reason.TRANSFER_EXISTS, f"this push has all destinations: it declared {push.consumers}")

    def _check(
        self, event: FinishedBlocks, push: SourcePush | None, *, first: bool
    ) -> tuple[Blocks, Parts, Part, ContentId]:
        """Checks a part completely before anything changes. `first` marks the first part of its epoch."""
        state = self._state
        if push is None:
            state.tombstones.check_key(event.key, begins=False, tenant=tenant_of(event.call.principal))
            self._check_new(event.key, event.call.payer)
        elif handed_over.taken(state, push, event.call.principal):
            raise AlreadyExists(Reason.TRANSFER_EXISTS, "another caller pushes blocks under this transfer key")
        elif event.part_epoch < push.part_epoch:
            replaced = f"these parts were replaced or taken back: part_epoch {push.part_epoch} is next"
            raise PreconditionFailed(Reason.PREEMPTED, replaced)
        granted_ttl(event.ttl_s, state.limits)
        if event.consumers > (most := state.limits.registrations):
            raise too_many(f"a push has at most {most} destinations", most)
        blocks = state.pool.resolve(event.blocks, "part.blocks")
        if not any(len(ids) for ids in blocks) and (first or not event.last):
            raise PreconditionFailed(Reason.EMPTY_FINISH, "there are no blocks to hand over")
        content = _content(event, push)
        parts = None if push is None or first else push.parts
        if parts is None:
            parts = Parts(state.life.engine.pool, content.tokens, state.limits.blocks_per_request)
        part = parts.check(blocks, event.layers, last=event.last, after_step=event.after_step)
        state.pool.check_owned(blocks, event.allocation_id, event.call.principal)
        state.pool.pins.check_free_for(PinKind.LEASE, blocks)
        state.ledger.check(event.call.payer, PART_BYTES + blocks_bytes(blocks) + len(content.digests) * first)
        return blocks, parts, part, content

    def _lease(
        self, event: FinishedBlocks, push: SourcePush | None, content: ContentId, blocks: Blocks, *, first: bool
    ) -> Lease:
        """Returns the lease of the epoch, or the lease that its first part would make."""
        if push is None or first:
            return self._leases.new(event, blocks, content, self._state.limits.registration_timeout_s)
        if event.lease_id not in ("", push.lease_id):
            raise invalid("part.lease_id", f"is that of all parts of this epoch: {push.lease_id}")
        return self._state.send.leases.get(push.lease_id)

    def _give_up(self, event: FinishedBlocks, push: SourcePush | None) -> None:
        """Handles a source that cannot deliver. Without a push, the next push under that key is refused."""
        state = self._state
        if push is None:
            if not event.validate_only:
                tenant = tenant_of(event.call.principal)
                state.tombstones.end_key(event.key, event.failure, state.now, Reason.SOURCE_FAILED, tenant=tenant)
            state.reply(event.call.id, GaveUp(None))
            return
        if not event.validate_only:
            if push.parts is None:
                state.change(push.transfer_id, owner=event.call.principal)
            failure = Failure(Reason.SOURCE_FAILED, event.failure, push.phase, Side.SOURCE, next=NextStep.RECOMPUTE)
            self._ends.end(push, State.FAILED, failure)
        state.reply(event.call.id, GaveUp(state.transfers.find(push.transfer_id)))


_REASONS = {
    CloseOutcome.CANCELLED: Reason.CANCELLED,
    CloseOutcome.DROPPED: Reason.PEER_LOST,
    CloseOutcome.FAILED: Reason.PEER_FAILED,
}
"""Reasons for the end of a registration, by the outcome with which its destination closed it."""


def _content(event: FinishedBlocks, push: SourcePush | None) -> ContentId:
    """Returns the content of the push. The first part states it and later parts may repeat it."""
    known = event.content if push is None or push.content is None else push.content
    if known is None:
        raise InvalidRequest(Reason.CONTENT_REQUIRED, "the first part of a push states the content of the whole prompt")
    if event.content not in (None, known):
        raise PreconditionFailed(Reason.CONTENT_MISMATCH, "the parts of a push have one content: the whole prompt's")
    return known
