"""PullBlocks: the destination's side of a transfer, from its grant on.

Success has one way only: through SETTLING with VALID. Everything else fails closed: the bytes are never offered.
`state.move` has the stages as data, `pull_course` the checks, the steps and the ends.
"""

from typing import Any

from kvgrpc.core.actions import PullStarted
from kvgrpc.core.events import AccessClosing, CloseOutcome, GiveDestination, PullBlocks, RenewAnswered
from kvgrpc.core.moves.failures import LOST_SOURCE
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.receive.pull_course import PullCourse, PullEnds, check_destination, check_key, check_pull
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import MOVE_BYTES, MoveStage, PullMove
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import TRANSFER_BYTES, Direction, Failure, Phase, Side, State, Transfer
from kvgrpc.core.values.block_ids import blocks_bytes
from kvgrpc.core.values.limits import granted_timeout
from kvgrpc.core.values.owners import ENGINE_SIDE, Verb
from kvgrpc.core.values.request_times import heard
from kvgrpc.errors import NextStep, NotFound, PreconditionFailed, Reason


class Pulls:
    """Pulls as their callers ask for them, and the ends that callers ask for of anything this engine receives."""

    def __init__(
        self,
        state: NodeState,
        handshakes: Handshakes,
        course: PullCourse[PullMove],
        ends: dict[type[PullMove], PullEnds[Any]],
    ) -> None:
        self._state = state
        self._handshakes = handshakes
        self._course = course
        self._ends = ends

    def start(self, event: PullBlocks) -> None:
        """Handles PullBlocks with a grant: makes a RECEIVE transfer that opens its access at once."""
        state = self._state
        state.pool.check_open()
        claims, claim = check_pull(state, event)
        queue_s = granted_timeout(event.queue_timeout_s, state.limits.queue_timeout_s, state.limits)
        asked_s = event.transfer_timeout_s
        transfer_s = None if asked_s is None else granted_timeout(asked_s, asked_s, state.limits)
        caller, payer = event.call.principal, event.call.payer
        taken = None if event.destination is None else check_destination(state, event.destination, claim.tokens, caller)
        state.transfers.check_room(payer)
        here = 0 if taken is None else blocks_bytes(taken)
        there = 8 * claims.block_count + len(claim.prefix)
        state.ledger.check(payer, MOVE_BYTES + TRANSFER_BYTES + there + here)
        connection = event.call.connection
        self._handshakes.check_room(claims.address, claims.engine_id, claims.incarnation, connection)
        if event.validate_only:
            state.reply(event.call.id, PullStarted(None))
            return
        transfer = state.create(
            event.call,
            direction=Direction.RECEIVE,
            key=claims.transfer_key,
            tenant=claims.tenant,
            request_id=event.request_id,
            lease_id=claims.lease_id,
            peer_engine_id=claims.engine_id,
            peer_incarnation=claims.incarnation,
            peer_address=claims.address,
            use_tokens=claim.tokens,
            nbytes=0 if taken is None else state.pool.bytes_of(list(map(len, taken))),
            waiting_for="handshake",
            phases=(Phase("handshake", state.now),),
            priority=event.priority,
        )
        pull = PullMove(
            transfer.id, event.token, claims, event.access_id, event.call.trace, claim,
            payer=payer, counts_waiting=False, transfer_timeout_s=transfer_s, queue_timeout_s=queue_s,
            request_time_us=self._began(event, claims.request_time_us),
        )  # fmt: skip
        if taken is not None:
            assert event.destination is not None
            self._course.take(pull, taken, event.after_step, event.destination.have_tokens)
        state.moves.add(pull)
        state.receive.transfers[transfer.id] = pull
        state.timers.set(Timer.QUEUE, transfer.id, state.now + queue_s)
        state.reply(event.call.id, PullStarted(transfer))
        self._course.connect(pull, connection)

    def _began(self, event: PullBlocks, handed_over_us: int) -> int:
        if not event.request_time_us:
            return handed_over_us
        return heard(event.request_time_us, event.call.wall_us, own=event.call.principal in ENGINE_SIDE)

    def give(self, event: GiveDestination) -> None:
        """Handles PullBlocks by transfer id: gives an earlier pull its blocks."""
        state = self._state
        caller = event.call.principal
        transfer = state.transfers.get_for(caller, Verb.GIVE_BLOCKS, event.transfer_id)
        pull = state.receive.transfers.get(event.transfer_id)
        if transfer.direction is not Direction.RECEIVE:
            raise NotFound(Reason.TRANSFER_NOT_FOUND, f"transfer {transfer.id} is no pull")
        check_key(event.key, transfer.key, "this transfer")
        if transfer.over or pull is None:
            why = f": {transfer.failure.message}" if transfer.failure else ""
            raise PreconditionFailed(Reason.TRANSFER_ENDED, f"transfer {transfer.id} is over{why}")
        if pull.destination is not None:
            raise PreconditionFailed(Reason.TRANSFER_EXISTS, f"transfer {transfer.id} has its blocks already")
        blocks = check_destination(state, event.destination, pull.claim.tokens, caller)
        state.ledger.check(pull.payer, 2 * blocks_bytes(blocks))
        state.reply(event.call.id, PullStarted(transfer))
        if not event.validate_only:
            self._course.take(pull, blocks, event.after_step, event.destination.have_tokens)
            state.moves.weigh(pull)
            state.change(transfer.id, nbytes=state.pool.bytes_of([len(ids) for ids in pull.filled]))
            state.timers.set(Timer.QUEUE, pull.name, state.now + pull.queue_timeout_s)
            state.timers.clear(Timer.BLOCKS, pull.name)
            self._course.try_post(pull)

    def busy(self, transfer: Transfer) -> bool:
        """Returns whether bytes of a pull, or a reservation, may be in flight."""
        return self._state.receive.transfers[transfer.id].busy

    def cancel(self, transfer: Transfer, message: str, outcome: CloseOutcome) -> None:
        """Cancels a pull, or a reservation."""
        self._cancel(self._state.receive.transfers[transfer.id], message, Side.DESTINATION, outcome)

    def cancelled(self, peer: str, row: AccessClosing) -> bool:
        """Takes a source's closing of a pull's access. CANCELLED cancels the pull. FAILED means that the blocks may be
        gone: the source is asked at once, by a renewal. Returns False if the access is no pull's from that life.
        """
        pull = self._state.moves.of_access(row.access_id)
        if type(pull) is not PullMove or peer not in (pull.peer, pull.asked_of):
            return False
        if row.outcome is CloseOutcome.CANCELLED and pull.stage is not MoveStage.ENDED:
            self._cancel(pull, row.message, Side.SOURCE, CloseOutcome.CANCELLED)
        elif row.outcome is CloseOutcome.FAILED and pull.stage is MoveStage.OPEN:
            self._course.renew_by(pull, self._state.now)
        return True

    def _cancel(self, pull: PullMove, message: str, side: Side, outcome: CloseOutcome) -> None:
        failure = Failure(Reason.CANCELLED, message or "cancelled", pull.stage.value, side, next=NextStep.RECOMPUTE)
        self._ends[type(pull)].end(pull, State.CANCELLED, failure, outcome)

    def end_all(self, failure: Failure) -> None:
        """Fails every pull and reservation: the incarnation ends. Each access is closed once, under the old life: an
        issuer that misses this closes all accesses of that life when it declares it dead.
        """
        for pull in list(self._state.receive.transfers.values()):
            if pull.stage is not MoveStage.ENDED:
                self._ends[type(pull)].end(pull, State.FAILED, failure, CloseOutcome.DROPPED)

    def renew_answered(self, event: RenewAnswered) -> None:
        """Fails a waiting pull at once if its source is gone; a pull that reads learns it by its settle."""
        pull = self._state.receive.transfers.get(event.transfer_id)
        if pull is None or event.error is None or pull.stage is not MoveStage.OPEN:
            return
        if event.error.reason in LOST_SOURCE:
            self._ends[type(pull)].fail(pull, event.error)
