"""Pulling: the destination's side of a transfer, from PullBlocks to the end of its memory.

Success has one way only: through SETTLING with VALID. Everything else fails closed: the bytes are never offered.
The stages are data in `moves`; what is checked before anything changes is in `pull_checks`; ends are in `pull_ends`.
Pushes that land here (`delivering`) are kept and driven here too, once they are reserved.
"""

from kvgrpc.core.actions import Pulling
from kvgrpc.core.events import CloseAnswered, GiveDestination, Opened, PullBlocks, RenewAnswered
from kvgrpc.core.moves.failures import LOST_SOURCE
from kvgrpc.core.moves.move import MoveTable, Stage
from kvgrpc.core.moves.moves import Moves
from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.receive.checks import check_destination, check_key, check_pull
from kvgrpc.core.receive.pull import Pull
from kvgrpc.core.receive.pull_course import PullCourse
from kvgrpc.core.receive.pull_ends import PullEnds
from kvgrpc.core.receive.reservation import Reservation
from kvgrpc.core.receive.reservations import Reservations
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Direction, Failure, Next, Phase, Side, State, Transfer
from kvgrpc.core.values.limits import granted_timeout
from kvgrpc.errors import KVGrpcError, NotFound, PreconditionFailed, Reason


class Pulls(Moves[Pull]):
    """All pulls of this engine, and the pushes that land here."""

    def __init__(self, state: NodeState, peering: Handshakes, lives: PeerLiveness, closings: PendingCloses) -> None:
        table: MoveTable[Pull] = MoveTable()
        self._closings = closings
        self._pull_ends = PullEnds(state, table, closings)
        self._pull_steps = PullCourse(state, peering, lives, table, self._pull_ends)
        self.deliveries = Reservations(state, table, self._pull_steps, self._pull_ends)
        self._pull_ends.attach(self.deliveries)
        super().__init__(state, lives, table, self._pull_steps, self._pull_ends)

    # -- calls

    def start(self, event: PullBlocks) -> None:
        """PullBlocks with a grant: a RECEIVE transfer that opens its access at once."""
        state = self._state
        state.check_open()
        claims, claim = check_pull(state, event)
        queue_s = granted_timeout(event.queue_timeout_s, state.limits.queue_timeout_s, state.limits)
        transfer_s = granted_timeout(event.transfer_timeout_s, state.limits.transfer_timeout_s, state.limits)
        taken = None if event.destination is None else check_destination(state, event.destination, claim.tokens)
        state.check_room()
        connection = event.call.connection
        self._pull_steps.check_room(claims.address, claims.engine_id, claims.incarnation, connection)
        if event.validate_only:
            state.reply(event.call.id, Pulling(None))
            return
        transfer = state.create(
            direction=Direction.RECEIVE,
            key=claims.transfer_key,
            owner=event.call.principal,
            request_id=event.request_id,
            trace=event.call.trace,
            lease_id=claims.lease_id,
            peer_engine_id=claims.engine_id,
            peer_incarnation=claims.incarnation,
            peer_address=claims.address,
            use_tokens=claim.tokens,
            waiting_for="handshake",
            phases=(Phase("handshake", state.now),),
            priority=event.priority,
        )
        pull = Pull(
            transfer.id, event.token, claims, event.access_id, event.call.trace, claim,
            counts_waiting=False, transfer_timeout_s=transfer_s, queue_timeout_s=queue_s,
        )  # fmt: skip
        self._table.add(pull)
        state.timers.set(Timer.QUEUE, transfer.id, state.now + queue_s)
        if taken is not None:
            self._pull_steps.take(pull, *taken, event.after_step)
        state.reply(event.call.id, Pulling(transfer))
        self._pull_steps.connect(pull, connection)

    def give(self, event: GiveDestination) -> None:
        """PullBlocks by transfer id: the blocks of an earlier pull."""
        state = self._state
        transfer = state.transfers.get(event.transfer_id)
        pull = self._table.find(event.transfer_id)
        if transfer.direction is not Direction.RECEIVE:
            raise NotFound(Reason.TRANSFER_NOT_FOUND, f"transfer {transfer.id} is no pull")
        check_key(event.key, transfer.key, "this transfer")
        if transfer.over or pull is None:
            why = f": {transfer.failure.message}" if transfer.failure else ""
            raise PreconditionFailed(Reason.TRANSFER_ENDED, f"transfer {transfer.id} is over{why}")
        if pull.destination is not None:
            raise PreconditionFailed(Reason.TRANSFER_EXISTS, f"transfer {transfer.id} has its blocks already")
        blocks, skip = check_destination(state, event.destination, pull.claim.tokens)
        state.reply(event.call.id, Pulling(transfer))
        if not event.validate_only:
            self._pull_steps.take(pull, blocks, skip, event.after_step)
            state.timers.set(Timer.QUEUE, pull.name, state.now + pull.queue_timeout_s)
            state.timers.clear(Timer.BLOCKS, pull.name)
            self._pull_steps.try_post(pull)

    def cancel(self, transfer: Transfer, message: str) -> bool:
        """Ends a pull; True when bytes may be in flight."""
        pull = self._table.find(transfer.id)
        assert pull is not None
        failure = Failure(
            Reason.CANCELLED, message or "cancelled", pull.stage.value, Side.DESTINATION, next=Next.RECOMPUTE
        )
        in_flight = pull.busy
        self._pull_ends.end(pull, State.CANCELLED, failure)
        return in_flight

    def end_all(self, failure: Failure) -> None:
        """The incarnation ends: every pull fails. Its access is closed under the old life, which is said once:
        an issuer that misses it closes all accesses of that life when it buries it.
        """
        for pull in self._table:
            if pull.stage is not Stage.ENDED:
                self._pull_ends.end(pull, State.FAILED, failure)
        self._closings.clear()
        self.deliveries.clear()
        self._table.clear()

    # -- peers

    def peer_ready(self, address: str, peer: Peer) -> None:
        super().peer_ready(address, peer)
        self._closings.reached(address, peer.key)

    def peer_failed(self, address: str, error: KVGrpcError, expected: str | None, lead: Peer | None) -> None:
        super().peer_failed(address, error, expected, lead)
        if lead is None:
            self._closings.unreachable(address)
        else:
            self._closings.reached(address, lead.key)

    def peer_dead(self, peer: Peer) -> None:
        self._closings.peer_dead(peer.key)
        super().peer_dead(peer)

    def peer_back(self, peer: Peer) -> None:
        """A life that was taken for dead shook hands again."""
        self._closings.peer_back(peer.key)

    def peer_gone(self, key: str) -> None:
        """A dead life is forgotten."""
        self._closings.peer_gone(key)

    def close_answered(self, event: CloseAnswered) -> None:
        """The issuer knows that an access is closed, or did not answer."""
        self._closings.answered(event)

    def renew_answered(self, event: RenewAnswered) -> None:
        """A pull whose source is gone fails at once while it waits; while it reads, settle tells."""
        pull = self._table.find(event.transfer_id)
        if pull is None or event.error is None or pull.stage is not Stage.OPEN:
            return
        if event.error.reason in LOST_SOURCE:
            self._ends.fail(pull, event.error)

    # -- timers

    def due(self, timer: Timer, name: str) -> None:
        """A deadline of a pull, or of a closing."""
        if timer is Timer.CLOSE_RETRY:
            self._closings.due(name)
            return
        if timer is Timer.KNOCK:
            self._closings.knock(name)
            return
        pull = self._table.find(name)
        assert pull is not None
        if timer is Timer.RENEW:
            self._pull_steps.renewals.due(pull)
        elif timer is Timer.OPEN_RETRY and isinstance(pull, Reservation):
            self._pull_steps.send_register(pull)
        else:
            super().due(timer, name)

    # -- for checks

    def wanted_pins(self) -> set[tuple[str, PinKind]]:
        """The pins that pulls have reason for: their targets, or what is left of them after the end."""
        kinds = {True: PinKind.QUARANTINE, False: PinKind.TARGET}
        return {
            (pull.transfer_id, kinds[pull.stage is Stage.ENDED])
            for pull in self._table
            if pull.destination is not None and not pull.moves_nothing
        }

    def _opened(self, move: Pull, opened: Opened) -> None:
        self._pull_steps.opened(move, opened)

    def _stale(self, move: Pull, reason: Reason, message: str) -> None:
        """A push whose source took its parts back goes on with the next ones."""
        if isinstance(move, Reservation) and reason in (Reason.LEASE_VOIDED, Reason.PREEMPTED):
            self._pull_steps.start_over(move)
        else:
            super()._stale(move, reason, message)

    def _trust(self, move: Pull) -> None:
        if isinstance(move, Reservation):
            for access_id in list(move.writers):
                self.deliveries.writers.forget(access_id)

    def _account(self, nbytes: int) -> None:
        self._state.bytes_received += nbytes
