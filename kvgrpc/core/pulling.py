"""Pulling: the destination's side of a transfer, from PullBlocks to the end of its memory.

Success has one way only: through SETTLING with VALID. Everything else fails closed: the bytes are never offered.
The stages are data in `pull`; what is checked before anything changes is in `pull_checks`; ends are in `pull_ends`.
"""

from kvgrpc.core.accesses import Verdict
from kvgrpc.core.actions import Pulling
from kvgrpc.core.closing import Closings
from kvgrpc.core.events import (
    AccessAnswered,
    CloseAnswered,
    GiveDestination,
    Opened,
    PostingEnded,
    PullBlocks,
    RenewAnswered,
    SettleAnswered,
)
from kvgrpc.core.limits import granted_timeout
from kvgrpc.core.lives import Lives
from kvgrpc.core.peering import Peering
from kvgrpc.core.peers import Peer
from kvgrpc.core.pins import PinKind
from kvgrpc.core.pull import AT_ISSUER, LOST_SOURCE, TIMEOUTS, Pull, Stage, rank_of
from kvgrpc.core.pull_checks import check_destination, check_key, check_pull
from kvgrpc.core.pull_ends import PullEnds
from kvgrpc.core.pull_steps import PullSteps
from kvgrpc.core.pull_table import PullTable
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Direction, Failure, Next, Phase, Side, State, Transfer
from kvgrpc.errors import KVGrpcError, NotFound, PreconditionFailed, Reason

RETRY_DELAY_S = 0.2
"""Between two tries of a call to a peer that did not answer; short against every timeout that bounds the tries."""


class Pulls:
    """All pulls of this engine."""

    def __init__(self, state: NodeState, peering: Peering, lives: Lives) -> None:
        self._state = state
        self._lives = lives
        self._pulls = PullTable()
        self._closings = Closings(state)
        self._ends = PullEnds(state, self._pulls, self._closings)
        self._steps = PullSteps(state, peering, lives, self._pulls, self._ends)

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
        pull = Pull(transfer.id, event.token, claims, claim, event.access_id, event.call.trace, queue_s, transfer_s)
        self._pulls.add(pull)
        state.timers.set(Timer.QUEUE, transfer.id, state.now + queue_s)
        if taken is not None:
            self._steps.take(pull, *taken, event.after_step)
        state.reply(event.call.id, Pulling(transfer))
        self._steps.connect(pull)

    def give(self, event: GiveDestination) -> None:
        """PullBlocks by transfer id: the blocks of an earlier pull."""
        state = self._state
        transfer = state.transfers.get(event.transfer_id)
        pull = self._pulls.find(event.transfer_id)
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
            self._steps.take(pull, blocks, skip, event.after_step)
            state.timers.set(Timer.QUEUE, pull.transfer_id, state.now + pull.queue_timeout_s)
            state.timers.clear(Timer.BLOCKS, pull.transfer_id)
            self._steps.try_post(pull)

    def cancel(self, transfer: Transfer, message: str) -> bool:
        """Ends a pull; True when bytes may be in flight."""
        pull = self._pulls.find(transfer.id)
        assert pull is not None
        failure = Failure(
            Reason.CANCELLED, message or "cancelled", pull.stage.value, Side.DESTINATION, next=Next.RECOMPUTE
        )
        in_flight = bool(pull.postings)
        self._ends.end(pull, State.CANCELLED, failure)
        return in_flight

    def end_all(self, failure: Failure) -> None:
        """The incarnation ends: every pull fails. Its access is closed under the old life, which is said once:
        an issuer that misses it closes all accesses of that life when it buries it.
        """
        for pull in self._pulls:
            if pull.stage is not Stage.ENDED:
                self._ends.end(pull, State.FAILED, failure)
        self._closings.clear()
        self._pulls.clear()

    # -- peers

    def peer_ready(self, address: str, peer: Peer) -> None:
        """The lead at an address is connected: pulls that wait for it open their accesses."""
        found = peer.description.engine_id
        for pull in [*self._pulls.take_address(address), *self._pulls.take_unmapped(address)]:
            if pull.claims.engine_id != found:
                message = f"engine {found} answers at {address}, {pull.claims.engine_id} was expected"
                self._ends.fail_with(pull, Reason.WRONG_ENGINE, message)
            elif pull.stage is Stage.CONNECTING:
                self._steps.open(pull, peer)
            else:
                self._steps.try_post(pull)
        self._closings.reached(address, peer.key)

    def peer_failed(self, address: str, error: KVGrpcError, expected: str | None) -> None:
        """The lead at an address cannot be used; where `expected` is stated, only by those who expect that engine."""
        for pull in [*self._pulls.take_address(address), *self._pulls.take_unmapped(address)]:
            if expected in (None, pull.claims.engine_id):
                self._ends.fail(pull, error)
            elif pull.stage is Stage.CONNECTING:
                self._steps.connect(pull)
            else:
                self._steps.try_post(pull)
        self._closings.unreachable(address)

    def peer_dead(self, peer: Peer) -> None:
        """Pulls from a dead life of a peer fail."""
        self._closings.peer_dead(peer.key)
        self._fail_all(peer, Reason.PEER_LOST, f"engine {peer.description.engine_id} was taken for dead")

    def peer_back(self, peer: Peer) -> None:
        """A life that was taken for dead shook hands again."""
        self._closings.peer_back(peer.key)

    def peer_gone(self, key: str) -> None:
        """A dead life is forgotten."""
        self._closings.peer_gone(key)

    def memory_changed(self, peer: Peer) -> None:
        """Pulls from memory that was registered anew fail."""
        self._fail_all(peer, Reason.MEMORY_CHANGED, f"engine {peer.description.engine_id} registered its memory anew")

    def access_answered(self, event: AccessAnswered) -> None:
        """The source answered OpenAccess."""
        pull = self._pulls.of_access(event.access_id)
        if pull is None or pull.stage is not Stage.OPENING:
            return
        if isinstance(event.result, Opened):
            self._steps.opened(pull, event.result)
        elif event.result.reason is Reason.NO_HANDSHAKE:
            self._steps.reconnect(pull)
        elif event.retryable:
            self._state.timers.set(Timer.OPEN_RETRY, pull.transfer_id, self._state.now + RETRY_DELAY_S)
        else:
            self._ends.fail(pull, event.result)

    def settle_answered(self, event: SettleAnswered) -> None:
        """The source gave its verdict."""
        pull = self._pulls.of_access(event.access_id)
        if pull is None or pull.stage is not Stage.SETTLING:
            return
        result = event.result
        if isinstance(result, Verdict):
            if result.valid:
                self._ends.succeed(pull)
            else:
                self._ends.fail_with(pull, result.reason or Reason.PEER_FAILED, result.message, closed=True)
        elif result.reason is Reason.NO_HANDSHAKE:
            self._lives.forget(pull.peer)
            message = "the source restarted, or took this engine for dead, before it settled"
            self._ends.fail_with(pull, Reason.INCARNATION_CHANGED, message, closed=True)
        elif event.retryable:
            self._state.timers.set(Timer.SETTLE_RETRY, pull.transfer_id, self._state.now + RETRY_DELAY_S)
        else:
            self._ends.fail(pull, result)

    def close_answered(self, event: CloseAnswered) -> None:
        """The issuer knows that an access is closed, or did not answer."""
        self._closings.answered(event)

    def renew_answered(self, event: RenewAnswered) -> None:
        """A pull whose source is gone fails at once while it waits; while it reads, settle tells."""
        pull = self._pulls.find(event.transfer_id)
        if pull is None or event.error is None or pull.stage is not Stage.OPEN:
            return
        if event.error.reason in LOST_SOURCE:
            self._ends.fail(pull, event.error)

    # -- ranks

    def posting_ended(self, event: PostingEnded) -> None:
        """A posting is over. The last one of a finished transfer proves its blocks to be at rest."""
        if not event.quiesced:
            self._lost(event)
            return
        pull = self._pulls.take_posting(event.posting_id)
        if pull is None:
            return
        if event.done:
            pull.nbytes += event.nbytes
            self._state.bytes_received += event.nbytes
        if pull.stage is Stage.ENDED:
            if not pull.postings:
                self._ends.at_rest(pull)
        elif not event.done:
            self._broke(pull, event)
            self._lives.map_anew(pull.peer)
        elif not pull.postings:
            self._steps.settle(pull)

    def _lost(self, event: PostingEnded) -> None:
        """A posting of which nobody can say that it is at rest: its blocks stay in quarantine."""
        pull = self._pulls.of_posting(event.posting_id)
        if pull is None:
            return
        pull.unproved.add(event.posting_id)
        if pull.stage is not Stage.ENDED:
            self._broke(pull, event)

    def _broke(self, pull: Pull, event: PostingEnded) -> None:
        self._ends.fail_with(pull, Reason.DATA_PATH_FAILED, event.message, rank=rank_of(event.posting_id))

    def step_done(self) -> None:
        """Pulls that waited for the engine's step are tried again."""
        for pull in self._pulls.take_stepping():
            self._steps.try_post(pull)

    # -- timers

    def due(self, timer: Timer, name: str) -> None:
        """A deadline of a pull, or of a closing."""
        if timer is Timer.CLOSE_RETRY:
            self._closings.due(name)
            return
        pull = self._pulls.find(name)
        assert pull is not None
        if timer is Timer.OPEN_RETRY:
            self._steps.send_open(pull)
        elif timer is Timer.SETTLE_RETRY:
            self._steps.send_settle(pull)
        elif timer is Timer.RENEW:
            self._steps.renewals.due(pull)
        else:
            reason, message = TIMEOUTS[timer]
            self._ends.fail_with(pull, reason, message.format(phase=pull.stage.value))

    # -- for people and checks

    def open_accesses(self, peer: str) -> int:
        """Accesses that this engine has open at that life of a peer."""
        return sum(pull.stage in AT_ISSUER for pull in self._pulls.of_peer(peer))

    def oldest_posting(self) -> float | None:
        """When the oldest posting in flight was posted."""
        pull = self._pulls.oldest_in_flight()
        return None if pull is None else pull.posted_at

    def missing_proof(self, transfer_id: str) -> str:
        """What would prove the blocks of an ended pull to be at rest; empty when they are, or it is not over."""
        pull = self._pulls.find(transfer_id)
        return pull.missing_proof if pull is not None and pull.stage is Stage.ENDED else ""

    def wanted_pins(self) -> set[tuple[str, PinKind]]:
        """The pins that pulls have reason for: their targets, or what is left of them after the end."""
        kinds = {True: PinKind.QUARANTINE, False: PinKind.TARGET}
        return {
            (pull.transfer_id, kinds[pull.stage is Stage.ENDED])
            for pull in self._pulls
            if pull.destination is not None and not pull.moves_nothing
        }

    def _fail_all(self, peer: Peer, reason: Reason, message: str) -> None:
        for pull in self._pulls.of_peer(peer.key):
            if pull.stage is not Stage.ENDED:
                self._ends.fail_with(pull, reason, message)
