"""Pushing: the source's side, from the first part or the registration to the end of its last posting.

A push begins with RegisterPush or with its first part, whichever comes first; the two are paired by the exact transfer
key. Everything wrong with a part is found before anything changes.
"""

from kvgrpc.core.accesses import Access
from kvgrpc.core.actions import GaveUp, HandedOver, Registered
from kvgrpc.core.closing import Closings
from kvgrpc.core.content import Content
from kvgrpc.core.events import Closing, FinishedBlocks, Opened, PartsAnswered, RegisterPush, Settling
from kvgrpc.core.grants import Access as AccessKind
from kvgrpc.core.grants import read_claims
from kvgrpc.core.handover import HandOver
from kvgrpc.core.ids import ACCESS_ID_BYTES, check_transfer_key
from kvgrpc.core.leases import Lease
from kvgrpc.core.lives import Lives
from kvgrpc.core.moves import Stage
from kvgrpc.core.moving import RETRY_DELAY_S, Moving
from kvgrpc.core.parts import Part, Parts
from kvgrpc.core.peering import Peering
from kvgrpc.core.pins import PinKind
from kvgrpc.core.push import UNREGISTERED, Push, PushTable
from kvgrpc.core.push_steps import PushEnds, PushSteps
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Direction, Failure, Next, Phase, Side, State, Transfer
from kvgrpc.errors import AlreadyExists, InvalidRequest, PreconditionFailed, Reason, Unimplemented


class Pushes(Moving[Push]):
    """All pushes from this engine."""

    def __init__(
        self, state: NodeState, peering: Peering, lives: Lives, handover: HandOver, closings: Closings
    ) -> None:
        table = self._pushes = PushTable()
        self._handover = handover
        self._push_ends = PushEnds(state, table, handover, closings)
        self._push_steps = PushSteps(state, peering, lives, table, self._push_ends, handover)
        super().__init__(state, lives, table, self._push_steps, self._push_ends)

    # -- calls

    def register(self, event: RegisterPush) -> None:
        """RegisterPush: from now on the source knows where the blocks go."""
        state = self._state
        claims = read_claims(event.token)
        if claims.access is not AccessKind.WRITE:
            raise PreconditionFailed(Reason.GRANT_WRONG_ACCESS, "a push takes a WRITE grant; this is a READ grant")
        push = self._find(claims.transfer_key)
        if push is not None and push.registered:
            if push.token != event.token:
                raise AlreadyExists(Reason.TRANSFER_EXISTS, "this push has another destination already")
            state.reply(event.call.id, Registered(state.transfers.get(push.transfer_id)))
            return
        state.check_key(claims.transfer_key)
        if push is None:
            self._check_alone(claims.transfer_key)
            state.check_open()
            state.check_room()
            push = self._new(event, claims.transfer_key, "parts")
            self._state.timers.set(
                Timer.REGISTRATION, push.transfer_id, state.now + state.limits.registration_timeout_s
            )
        push.token, push.claims = event.token, claims
        transfer = state.change(
            push.transfer_id,
            peer_engine_id=claims.engine_id,
            peer_incarnation=claims.incarnation,
            peer_address=claims.address,
        )
        state.reply(event.call.id, Registered(transfer))
        self._steps.connect(push)

    def finish(self, event: FinishedBlocks) -> None:
        """FinishedBlocks for a registration: one part, or that there will be none."""
        state = self._state
        check_transfer_key(event.key)
        push = self._find(event.key)
        if event.failure:
            self._give_up(event, push)
            return
        parts, part, content = self._check(event, push)
        lease = self._lease(event, push, content, part)
        if event.validate_only:
            state.reply(event.call.id, HandedOver(self._handover.view(lease), None, b""))
            return
        if push is None:
            push = self._new(event, event.key, "registration")
        if push.parts is None:
            push.parts, push.content, push.lease_id, push.part_epoch = parts, content, lease.id, event.part_epoch
            state.timers.clear(Timer.REGISTRATION, push.transfer_id)
            lease.transfer_id = push.transfer_id
            self._handover.add(lease, event)
        parts.add(part)
        lease.blocks = parts.blocks
        state.pins.extend(lease.id, PinKind.LEASE, part.blocks, state.now)
        self._handover.extend(lease, state.limits.registration_timeout_s)
        pool = state.pool.pool
        transfer = state.change(
            push.transfer_id,
            owner=event.call.principal,
            lease_id=lease.id,
            blocks=sum(len(ids) for ids in lease.blocks),
            nbytes=state.pool.world_size * pool.bytes_of([len(ids) for ids in lease.blocks]),
        )
        state.reply(event.call.id, HandedOver(self._handover.view(lease), transfer, b""))
        if push.stage is Stage.RENDEZVOUS and push.registered:
            self._steps.connect(push)
        else:
            self._steps.try_post(push)

    def cancel(self, transfer: Transfer, message: str) -> bool:
        """Ends a push; True when bytes may be in flight."""
        push = self._table.find(transfer.id)
        assert push is not None
        in_flight = push.busy
        failure = Failure(Reason.CANCELLED, message or "cancelled", push.stage.value, Side.SOURCE, next=Next.RECOMPUTE)
        self._push_ends.end(push, State.CANCELLED, failure)
        return in_flight

    def end_all(self, failure: Failure) -> None:
        """The incarnation ends: what has no lease fails too."""
        for push in self._table:
            if push.stage is not Stage.ENDED:
                self._push_ends.end(push, State.FAILED, failure)
        self._table.clear()

    # -- what ends it

    def lease_ended(self, lease: Lease, message: str) -> bool:
        """The lease of a push is over; whether our own postings still read its blocks."""
        return self._push_ends.lease_ended(lease, message)

    def refused(self, peer: str, row: Closing) -> bool:
        """The destination ends an access that we opened there. False: it is none of ours."""
        push = self._table.of_access(row.access_id)
        if push is None or push.peer != peer:
            return False
        if push.stage is not Stage.ENDED:
            reason = Reason.CANCELLED if row.dropped else Reason.PEER_FAILED
            self._ends.fail_with(push, reason, row.message or "the destination ended the push")
        return True

    def reader_gone(self, access: Access) -> None:
        """The destination closed the access under which it read."""
        push = self._pushes.of_reader(access.id)
        if push is not None and push.stage is not Stage.ENDED:
            self._ends.fail_with(push, Reason.PEER_FAILED, "the destination gave up")

    def vouches(self, access: Access, row: Settling) -> bool:
        """Whether a destination that reads was told of the part that it settles; a pull has no parts."""
        push = self._pushes.of_reader(access.id)
        if push is None:
            return not row.part
        assert push.parts is not None
        known = row.part < max(push.told, push.telling)
        return known and row.last == (push.parts.complete and row.part == len(push.parts) - 1)

    def parts_answered(self, event: PartsAnswered) -> None:
        """The destination knows which parts are ready, or did not answer."""
        push = self._table.of_access(event.access_id)
        if push is None or push.stage is not Stage.OPEN or not push.telling:
            return
        if event.error is None:
            push.told, push.telling = push.telling, 0
            self._steps.try_post(push)
        elif event.retryable:
            self._state.timers.set(Timer.PARTS_RETRY, push.transfer_id, self._state.now + RETRY_DELAY_S)
        else:
            self._ends.fail(push, event.error)

    # -- timers, checks

    def due(self, timer: Timer, name: str) -> None:
        """A deadline of a push."""
        push = self._table.find(name)
        if timer is Timer.PARTS_RETRY:
            assert push is not None
            self._push_steps.tell(push)
        else:
            super().due(timer, name)

    def wanted_pins(self) -> set[tuple[str, PinKind]]:
        """The pins that pushes have reason for: what their own postings read."""
        pins = self._state.pins
        return {
            (push.transfer_id, PinKind.ACCESS)
            for push in self._table
            if pins.has(push.transfer_id, PinKind.ACCESS) and (push.held or push.stage is not Stage.ENDED)
        }

    def _find(self, key: bytes) -> Push | None:
        """The push under a key that is not over."""
        push = self._pushes.with_key(key)
        return push if push is not None and push.stage is not Stage.ENDED else None

    def _new(self, event: RegisterPush | FinishedBlocks, key: bytes, waiting_for: str) -> Push:
        assert len(event.access_id) == len(event.reverse_access_id) == ACCESS_ID_BYTES, "the event has random ids"
        state = self._state
        transfer = state.create(
            direction=Direction.SEND,
            key=key,
            owner=event.call.principal,
            request_id=event.request_id,
            trace=event.call.trace,
            waiting_for=waiting_for,
            phases=(Phase("rendezvous", state.now),),
            consumers=1,
        )
        push = Push(
            transfer.id, b"", UNREGISTERED, event.access_id, event.call.trace,
            stage=Stage.RENDEZVOUS,
            transfer_timeout_s=state.limits.transfer_timeout_s,
            key=key,
            reverse_id=event.reverse_access_id,
        )  # fmt: skip
        self._table.add(push)
        return push

    def _check_alone(self, key: bytes) -> None:
        if any(t.direction is Direction.SEND and not t.over for t in self._state.transfers.with_key(key)):
            raise PreconditionFailed(
                Reason.WAITS_FOR_MISMATCH, "blocks were handed over to readers under this transfer key"
            )

    def _check(self, event: FinishedBlocks, push: Push | None) -> tuple[Parts, Part, Content]:
        """Everything that can be wrong with a part, before anything changes."""
        state = self._state
        state.check_key(event.key)
        if push is None:
            self._check_alone(event.key)
            state.check_open()
            state.check_room()
        if event.consumers > 1:
            raise Unimplemented(Reason.FEATURE_UNAVAILABLE, "a push has one destination")
        parts = None if push is None else push.parts
        if push is not None and parts is not None and event.part_epoch != push.part_epoch:
            if event.part_epoch < push.part_epoch:
                raise PreconditionFailed(Reason.PREEMPTED, "a higher part_epoch has replaced the parts of this one")
            raise Unimplemented(Reason.FEATURE_UNAVAILABLE, "a prefill that starts over is handed over under a new key")
        blocks = state.resolve(event.blocks, "blocks")
        if not any(len(ids) for ids in blocks) and not (event.last and parts is not None):
            raise PreconditionFailed(Reason.EMPTY_FINISH, "there are no blocks to hand over")
        content = _content(event, push)
        if parts is None:
            parts = Parts(state.pool.pool, content.tokens)
        part = parts.check(blocks, event.layers, last=event.last, after_step=event.after_step)
        state.check_owned(blocks)
        state.pins.check_free_for(PinKind.LEASE, blocks)
        return parts, part, content

    def _lease(self, event: FinishedBlocks, push: Push | None, content: Content, part: Part) -> Lease:
        """The push's lease, or the one that its first part makes."""
        if push is None or push.parts is None:
            return self._handover.new_lease(event, part.blocks, content, self._state.limits.registration_timeout_s)
        if event.lease_id not in ("", push.lease_id):
            raise InvalidRequest(Reason.INVALID_FIELD, f"the parts of this push share lease {push.lease_id}")
        return self._state.leases.get(push.lease_id)

    def _give_up(self, event: FinishedBlocks, push: Push | None) -> None:
        """The source cannot deliver. Without a push the next one under that key is refused."""
        state = self._state
        if push is None:
            if not event.validate_only:
                state.bury_key(event.key, event.failure)
            state.reply(event.call.id, GaveUp(None))
            return
        if not event.validate_only:
            failure = Failure(Reason.SOURCE_FAILED, event.failure, push.stage.value, Side.SOURCE, next=Next.RECOMPUTE)
            self._push_ends.end(push, State.FAILED, failure)
        state.reply(event.call.id, GaveUp(state.transfers.find(push.transfer_id)))

    def _opened(self, move: Push, opened: Opened) -> None:
        self._push_steps.opened(move, opened)

    def _account(self, nbytes: int) -> None:
        self._state.bytes_sent += nbytes


def _content(event: FinishedBlocks, push: Push | None) -> Content:
    """The content of the push; that of its first part, which later ones may repeat."""
    known = None if push is None else push.content
    if event.content is None and known is None:
        raise InvalidRequest(Reason.CONTENT_REQUIRED, "the first part of a push states the content of the whole prompt")
    if known is not None and event.content not in (None, known):
        raise PreconditionFailed(Reason.CONTENT_MISMATCH, "the parts of a push have one content: the whole prompt's")
    found = known or event.content
    assert found is not None
    return found
