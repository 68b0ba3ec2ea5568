"""Pulling: the destination's side of a transfer, from PullBlocks to the end of its memory.

Success has one way only: through SETTLING with VALID. Everything else fails closed: the bytes are never offered.
The stages are data in `pull`; what is checked before anything changes is in `pull_checks`.
"""

from kvgrpc.core import content as contents
from kvgrpc.core.accesses import Opening, Verdict
from kvgrpc.core.actions import (
    BlocksReturned,
    Failed,
    Post,
    Pulling,
    PullOpened,
    Received,
    SendOpen,
    SendRenew,
    SendSettle,
)
from kvgrpc.core.closing import Closings
from kvgrpc.core.descriptors import plan_runs
from kvgrpc.core.events import (
    AccessAnswered,
    CloseAnswered,
    GiveDestination,
    Opened,
    PostingEnded,
    PullBlocks,
    RenewAnswered,
    SettleAnswered,
    Settling,
)
from kvgrpc.core.grants import Claims
from kvgrpc.core.peering import Peering
from kvgrpc.core.peers import Peer
from kvgrpc.core.pins import Blocks, PinKind
from kvgrpc.core.pull import LOST_SOURCE, PULL_TIMERS, TIMEOUTS, Pull, Stage, pull_failure
from kvgrpc.core.pull_checks import check_destination, check_grant, check_opened
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Direction, Disposition, Failure, Next, Side, State, Transfer, TransferPath
from kvgrpc.errors import Exhausted, InvalidRequest, KVGrpcError, NotFound, PreconditionFailed, Reason

RETRY_DELAY_S = 0.2
"""Between two tries of a call to a peer that did not answer; short against every timeout that bounds the tries."""


class Pulls:
    """All pulls of this engine."""

    def __init__(self, state: NodeState, peering: Peering) -> None:
        self._state = state
        self._peering = peering
        self._pulls: dict[str, Pull] = {}
        self._by_access: dict[bytes, str] = {}
        self._by_posting: dict[str, str] = {}
        self._connecting: dict[str, dict[str, Pull]] = {}
        """Pulls in CONNECTING by the address that they wait for."""
        self._by_peer: dict[str, dict[str, Pull]] = {}
        """Pulls past CONNECTING by the life of their source."""
        self._closings = Closings(state)

    # -- calls

    def start(self, event: PullBlocks) -> None:
        """PullBlocks with a grant: a RECEIVE transfer that opens its access at once."""
        state = self._state
        claims = check_grant(state, event)
        if event.content is None:
            raise InvalidRequest(Reason.CONTENT_REQUIRED, "a pull states the content that it wants")
        claim = contents.claim(event.content, claims.token_count, event.use_tokens)
        blocks, skip = None, list[int]()
        if event.destination is not None:
            blocks, skip = check_destination(state, event.destination, claim.tokens)
        if state.transfers.live >= state.limits.transfers:
            raise Exhausted(Reason.QUEUE_FULL, f"{state.limits.transfers} transfers wait or run", retry_delay_s=1.0)
        if event.validate_only:
            state.reply(event.call.id, Pulling(None))
            return
        transfer = self._create(event, claims, claim)
        pull = Pull(
            transfer.id,
            event.token,
            claims,
            claim,
            event.access_id,
            event.call.trace,
            event.queue_timeout_s or state.limits.queue_timeout_s,
            event.transfer_timeout_s or state.limits.transfer_timeout_s,
        )
        self._pulls[transfer.id] = pull
        self._by_access[event.access_id] = transfer.id
        state.timers.set(Timer.QUEUE, transfer.id, state.now + pull.queue_timeout_s)
        if blocks is not None:
            self._take(pull, blocks, skip, event.after_step)
        self._connect(pull)
        state.reply(event.call.id, Pulling(state.transfers.get(transfer.id)))

    def give(self, event: GiveDestination) -> None:
        """PullBlocks by transfer id: the blocks of an earlier pull."""
        state = self._state
        transfer = state.transfers.get(event.transfer_id)
        pull = self._pulls.get(event.transfer_id)
        if transfer.direction is not Direction.RECEIVE:
            raise NotFound(Reason.TRANSFER_NOT_FOUND, f"transfer {transfer.id} is no pull")
        if transfer.over or pull is None:
            why = f": {transfer.failure.message}" if transfer.failure else ""
            raise PreconditionFailed(Reason.TRANSFER_ENDED, f"transfer {transfer.id} is over{why}")
        if pull.destination is not None:
            raise PreconditionFailed(Reason.TRANSFER_EXISTS, f"transfer {transfer.id} has its blocks already")
        blocks, skip = check_destination(state, event.destination, pull.claim.tokens)
        if not event.validate_only:
            self._take(pull, blocks, skip, event.after_step)
            state.timers.set(Timer.QUEUE, pull.transfer_id, state.now + pull.queue_timeout_s)
            state.timers.clear(Timer.BLOCKS, pull.transfer_id)
            self._try_post(pull)
        state.reply(event.call.id, Pulling(state.transfers.get(transfer.id)))

    def cancel(self, transfer: Transfer, message: str) -> bool:
        """Ends a pull; True when bytes may be in flight."""
        pull = self._pulls[transfer.id]
        failure = Failure(
            Reason.CANCELLED, message or "cancelled", pull.stage.value, Side.DESTINATION, next=Next.RECOMPUTE
        )
        in_flight = bool(pull.postings)
        self._end(pull, State.CANCELLED, failure)
        return in_flight

    def end_all(self, failure: Failure) -> None:
        """The incarnation ends: every pull fails, and its access is closed under the old life."""
        for pull in list(self._pulls.values()):
            if pull.stage is not Stage.ENDED:
                self._end(pull, State.FAILED, failure)
        self._closings.clear()
        self._pulls.clear()
        self._by_peer.clear()
        self._connecting.clear()
        self._by_access.clear()
        self._by_posting.clear()

    # -- peers

    def peer_ready(self, address: str, peer: Peer) -> None:
        """The lead at an address is connected: pulls that wait for it open their accesses."""
        for pull in self._connecting.pop(address, {}).values():
            self._open(pull, peer)
        self._closings.reached(address, peer.key)

    def peer_failed(self, address: str, error: KVGrpcError) -> None:
        """The lead at an address cannot be used."""
        for pull in self._connecting.pop(address, {}).values():
            self._fail(pull, error)
        self._closings.unreachable(address)

    def peer_dead(self, peer: Peer) -> None:
        """Pulls from a dead life of a peer fail; there is nobody left to close at."""
        for pull in list(self._by_peer.get(peer.key, {}).values()):
            if pull.stage is not Stage.ENDED:
                self._fail_with(pull, Reason.PEER_LOST, f"engine {peer.description.engine_id} was taken for dead")
        self._closings.peer_dead(peer.key)

    def access_answered(self, event: AccessAnswered) -> None:
        """The source answered OpenAccess."""
        pull = self._pull_of(event.access_id)
        if pull is None or pull.stage is not Stage.OPENING:
            return
        if isinstance(event.result, Opened):
            self._opened(pull, event.result)
        elif event.result.reason is Reason.NO_HANDSHAKE:
            pull.move(Stage.CONNECTING)
            self._peering.forget(pull.peer)
            self._unindex(pull)
            pull.peer = ""
            self._connect(pull)
        elif event.retryable:
            self._state.timers.set(Timer.OPEN_RETRY, pull.transfer_id, self._state.now + RETRY_DELAY_S)
        else:
            self._fail(pull, event.result)

    def settle_answered(self, event: SettleAnswered) -> None:
        """The source gave its verdict."""
        pull = self._pull_of(event.access_id)
        if pull is None or pull.stage is not Stage.SETTLING:
            return
        if isinstance(event.result, Verdict):
            if event.result.valid:
                self._succeed(pull)
            else:
                reason = event.result.reason or Reason.PEER_FAILED
                self._fail_with(pull, reason, event.result.message, closed=True)
        elif event.result.reason is Reason.NO_HANDSHAKE:
            self._fail_with(pull, Reason.INCARNATION_CHANGED, "the source restarted before it settled")
        elif event.retryable:
            self._state.timers.set(Timer.SETTLE_RETRY, pull.transfer_id, self._state.now + RETRY_DELAY_S)
        else:
            self._fail(pull, event.result)

    def close_answered(self, event: CloseAnswered) -> None:
        """The issuer knows that an access is closed, or did not answer."""
        self._closings.answered(event)

    def renew_answered(self, event: RenewAnswered) -> None:
        """A pull whose source is gone fails at once while it waits; while it reads, settle tells."""
        pull = self._pulls.get(event.transfer_id)
        if pull is None or event.error is None or pull.stage is not Stage.OPEN:
            return
        if event.error.reason in LOST_SOURCE:
            self._fail(pull, event.error)

    # -- ranks

    def posting_ended(self, event: PostingEnded) -> None:
        """A posting is over. The last one of a finished transfer proves its blocks to be at rest."""
        state = self._state
        pull = self._pulls.get(self._by_posting.pop(event.posting_id, ""))
        if pull is None:
            return
        pull.postings.discard(event.posting_id)
        if event.done:
            pull.nbytes += event.nbytes
            state.bytes_received += event.nbytes
        if pull.stage is Stage.ENDED:
            if not pull.postings:
                self._return(pull)
        elif not event.done:
            self._fail_with(pull, Reason.DATA_PATH_FAILED, event.message)
        elif not pull.postings:
            self._settle(pull)

    def step_done(self) -> None:
        """Pulls that waited for the engine's step can post."""
        for pull in [p for p in self._pulls.values() if p.after_step]:
            self._try_post(pull)

    # -- timers

    def due(self, timer: Timer, name: str) -> None:
        """A deadline of a pull, or of a closing."""
        if timer is Timer.CLOSE_RETRY:
            self._closings.due(name)
            return
        pull = self._pulls[name]
        if timer is Timer.OPEN_RETRY:
            self._send_open(pull)
        elif timer is Timer.SETTLE_RETRY:
            self._send_settle(pull)
        elif timer is Timer.RENEW:
            self._renew(pull)
        else:
            reason, message = TIMEOUTS[timer]
            self._fail_with(pull, reason, message.format(phase=pull.stage.value))

    # -- steps of a pull

    def _create(self, event: PullBlocks, claims: Claims, claim: contents.Claim) -> Transfer:
        return self._state.create(
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
            priority=event.priority,
        )

    def _take(self, pull: Pull, blocks: Blocks, skip: list[int], after_step: int) -> None:
        """The destination's blocks are the transfer's until they are returned."""
        state = self._state
        pull.destination, pull.skip, pull.after_step = blocks, skip, after_step
        if any(len(ids) for ids in blocks):
            state.pins.add(pull.transfer_id, PinKind.TARGET, blocks, state.now)

    def _connect(self, pull: Pull) -> None:
        state = self._state
        transfer = state.transfers.get(pull.transfer_id)
        phases = transfer.phase_started("handshake", state.now)
        state.change(pull.transfer_id, phases=phases, waiting_for="handshake")
        self._connecting.setdefault(pull.claims.address, {})[pull.transfer_id] = pull
        peer = self._peering.want(pull.claims.address, pull.claims.engine_id, pull.claims.incarnation, pull.trace)
        if peer is not None:
            self._unindex(pull)
            self._open(pull, peer)

    def _open(self, pull: Pull, peer: Peer) -> None:
        state = self._state
        pull.move(Stage.OPENING)
        pull.peer = peer.key
        self._by_peer.setdefault(peer.key, {})[pull.transfer_id] = pull
        transfer = state.transfers.get(pull.transfer_id)
        state.change(
            pull.transfer_id,
            phases=transfer.phase_started("open", state.now),
            waiting_for="access",
            peer_engine_id=peer.description.engine_id,
            peer_incarnation=peer.description.incarnation,
            paths=tuple(TransferPath(peer.paths[rank]) for rank in sorted(peer.paths)),
        )
        self._send_open(pull)

    def _send_open(self, pull: Pull) -> None:
        pull.asked = True
        peer = self._state.peers[pull.peer]
        transfer = self._state.transfers.get(pull.transfer_id)
        paths = tuple(peer.paths[rank].data_path for rank in sorted(peer.paths))
        opening = Opening(pull.access_id, pull.token, pull.claim, pull.transfer_id, transfer.request_id, paths)
        self._state.emit(SendOpen(pull.peer, opening, pull.trace))

    def _opened(self, pull: Pull, opened: Opened) -> None:
        state = self._state
        error = check_opened(state, pull, opened)
        if error:
            self._fail_with(pull, Reason.PEER_FAILED, f"the source's answer makes no sense: {error}")
            return
        pull.opened = opened
        pull.move(Stage.OPEN)
        transfer = state.transfers.get(pull.transfer_id)
        waiting = "blocks" if pull.destination is None else "step"
        state.change(
            pull.transfer_id,
            phases=transfer.phase_started("queue", state.now),
            waiting_for=waiting,
            peer_transfer_id=opened.transfer_id,
        )
        state.tell(transfer.owner, PullOpened(transfer.id, transfer.request_id, pull.claim.tokens))
        if pull.destination is None:
            state.timers.clear(Timer.QUEUE, pull.transfer_id)
            state.timers.set(Timer.BLOCKS, pull.transfer_id, transfer.created + state.limits.lease_cap_s)
        pull.next_renewal = state.now + min(opened.ttl_s, opened.remaining_s) / 3
        state.timers.set(Timer.RENEW, pull.transfer_id, pull.next_renewal)
        self._try_post(pull)

    def _try_post(self, pull: Pull) -> None:
        """Moves the bytes once source, destination and step are known."""
        state = self._state
        if pull.stage is not Stage.OPEN or pull.destination is None or pull.after_step > state.step_done():
            return
        state.timers.clear(Timer.QUEUE, pull.transfer_id)
        if not any(len(ids) for ids in pull.destination):
            self._settle(pull)
            return
        assert pull.opened is not None
        source = [ids[skip:] for (_, ids), skip in zip(pull.opened.blocks, pull.skip, strict=True)]
        peer = state.peers[pull.peer]
        runs = plan_runs(peer.description.pool, state.pool.pool, source, pull.destination)
        pull.move(Stage.WIRE)
        state.timers.set(Timer.TRANSFER, pull.transfer_id, state.now + pull.transfer_timeout_s)
        transfer = state.transfers.get(pull.transfer_id)
        ranks = range(state.pool.world_size)
        state.change(
            pull.transfer_id,
            state=State.ACTIVE,
            waiting_for="",
            phases=transfer.phase_started("wire", state.now),
            blocks=sum(len(ids) for ids in pull.destination),
            nbytes=runs.total_bytes * len(ranks),
            paths=tuple(TransferPath(peer.paths[r], runs.total_bytes, len(runs)) for r in ranks),
        )
        for rank in ranks:
            posting_id = f"{pull.transfer_id}/{rank}"
            pull.postings.add(posting_id)
            self._by_posting[posting_id] = pull.transfer_id
            state.emit(Post(rank, posting_id, pull.peer, runs, pull.transfer_id))

    def _settle(self, pull: Pull) -> None:
        state = self._state
        pull.move(Stage.SETTLING)
        state.timers.clear(Timer.TRANSFER, pull.transfer_id)
        state.timers.set(Timer.SETTLE, pull.transfer_id, state.now + state.limits.settle_timeout_s)
        transfer = state.transfers.get(pull.transfer_id)
        state.change(
            pull.transfer_id,
            state=State.ACTIVE,
            waiting_for="settle",
            nbytes_done=pull.nbytes,
            phases=transfer.phase_started("settle", state.now),
        )
        self._send_settle(pull)

    def _send_settle(self, pull: Pull) -> None:
        settling = Settling(pull.access_id, last=True, nbytes=pull.nbytes)
        self._state.emit(SendSettle(pull.peer, settling, pull.trace))

    def _renew(self, pull: Pull) -> None:
        """Renews this lease, and with it those of the same peer that are due within a second: one call for many."""
        state = self._state
        due = [
            other
            for other in self._by_peer[pull.peer].values()
            if other.opened
            and other.stage is not Stage.ENDED
            and other.next_renewal <= state.now + min(1.0, other.opened.ttl_s / 10)
        ]
        for other in due:
            assert other.opened is not None
            other.next_renewal = state.now + other.opened.ttl_s / 3
            state.timers.set(Timer.RENEW, other.transfer_id, other.next_renewal)
        state.emit(SendRenew(pull.peer, tuple((other.transfer_id, other.token) for other in due)))

    # -- ends

    def _succeed(self, pull: Pull) -> None:
        state = self._state
        pull.move(Stage.ENDED)
        self._clear_timers(pull)
        state.pins.drop(pull.transfer_id, PinKind.TARGET)
        transfer = state.change(
            pull.transfer_id, state=State.SUCCEEDED, memory=Disposition.RETURNED, nbytes_done=pull.nbytes
        )
        state.tell(transfer.owner, Received(transfer.id, transfer.request_id, transfer.use_tokens))
        self._forget(pull)

    def _fail(self, pull: Pull, error: KVGrpcError) -> None:
        self._fail_with(pull, error.reason, error.message)

    def _fail_with(self, pull: Pull, reason: Reason, message: str, *, closed: bool = False) -> None:
        failure = pull_failure(pull, reason, message)
        self._end(pull, State.FAILED, failure, closed=closed)

    def _end(self, pull: Pull, end: State, failure: Failure, *, closed: bool = False) -> None:
        """Ends without success. Blocks that a posting may still touch stay in quarantine until it ended."""
        state = self._state
        self._clear_timers(pull)
        transfer = state.change(
            pull.transfer_id,
            state=end,
            failure=failure,
            memory=Disposition.QUARANTINED if pull.postings else Disposition.RETURNED,
        )
        dropped = end is State.CANCELLED or failure.reason is Reason.ENGINE_LOST
        if not closed:
            self._closings.close(pull, dropped=dropped)
        pull.move(Stage.ENDED)
        state.tell(transfer.owner, Failed(transfer.id, transfer.request_id, failure, end is State.CANCELLED))
        if pull.postings:
            state.pins.quarantine(pull.transfer_id, state.now)
            return
        state.pins.drop(pull.transfer_id, PinKind.TARGET)
        state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id))
        self._forget(pull)

    def _return(self, pull: Pull) -> None:
        """The last posting of an ended pull is over: its blocks are at rest."""
        state = self._state
        state.pins.drop(pull.transfer_id, PinKind.QUARANTINE)
        transfer = state.change(pull.transfer_id, memory=Disposition.RETURNED)
        state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id))
        self._forget(pull)

    def _forget(self, pull: Pull) -> None:
        del self._pulls[pull.transfer_id]
        self._unindex(pull)
        self._by_access.pop(pull.access_id, None)

    def _clear_timers(self, pull: Pull) -> None:
        for timer in PULL_TIMERS:
            self._state.timers.clear(timer, pull.transfer_id)

    def _unindex(self, pull: Pull) -> None:
        for index, name in ((self._connecting, pull.claims.address), (self._by_peer, pull.peer)):
            pulls = index.get(name, {})
            pulls.pop(pull.transfer_id, None)
            if not pulls:
                index.pop(name, None)

    def _pull_of(self, access_id: bytes) -> Pull | None:
        return self._pulls.get(self._by_access.get(access_id, ""))
