"""The course of one pull: its checks, its steps, the renewals of its lease, and its ends.

    connect -> open -> opened -> (blocks, step) -> posted -> settle

Success needs a VALID settle; everything else fails closed. Blocks that a posting may still touch stay in quarantine
until it ended, even if the transfer is over. `moves.course` has the parts that a pull shares with a push.
"""

from collections.abc import Sequence
from typing import TypeVar

from kvgrpc.core.actions import BlocksReturnedNews, FailedNews, PullOpenedNews, ReceivedNews, SendRenew
from kvgrpc.core.events import CloseOutcome, Destination, Opened, PullBlocks
from kvgrpc.core.moves.course import Course
from kvgrpc.core.moves.ends import Ends
from kvgrpc.core.moves.failures import move_failure
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import Move, MoveStage, PullMove
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Disposition, Failure, State
from kvgrpc.core.values import content as contents
from kvgrpc.core.values.block_ids import Blocks, wrong_lists
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import UNIT_TOKENS, ContentClaim
from kvgrpc.core.values.grants import AccessKind, Claims, check_tenant, read_claims
from kvgrpc.core.values.groups import Group, check_prefix
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.owners import tenant_of
from kvgrpc.errors import InvalidRequest, PermissionDenied, PreconditionFailed, Reason, invalid


def check_pull(state: NodeState, event: PullBlocks) -> tuple[Claims, ContentClaim]:
    """Returns the grant's claims, and the claim to make of its content. Raises the errors of `read_claims` and
    `contents.claim`, and errors for a wrong kind or key.
    """
    assert len(event.access_id) == ACCESS_ID_BYTES, "the event has 16 random bytes"
    claims = read_claims(event.token)
    if claims.access is not AccessKind.READ:
        raise PreconditionFailed(Reason.GRANT_WRONG_ACCESS, "a pull takes a READ grant; this is a WRITE grant")
    check_tenant(event.call.principal, claims)
    check_key(event.key, claims.transfer_key, "this grant")
    state.tombstones.check_key(claims.transfer_key, tenant=claims.tenant or tenant_of(event.call.principal))
    if event.content is None:
        raise InvalidRequest(Reason.CONTENT_REQUIRED, "a pull states the content that it wants")
    claim = contents.claim(event.content, claims.token_count, event.use_tokens, prefix=event.allow_prefix)
    check_prefix(state.life.engine.pool.groups, claims.token_count, claim.tokens)
    return claims, claim


def check_key(stated: bytes, key: bytes, what: str) -> None:
    """Raises PermissionDenied (TRANSFER_KEY_MISMATCH) for a stated key that is not the request's."""
    if stated and stated != key:
        raise PermissionDenied(Reason.TRANSFER_KEY_MISMATCH, f"{what} belongs to another request than the transfer key")


def check_destination(
    state: NodeState, destination: Destination, tokens: int, caller: str, prefix: str = "destination."
) -> Blocks:
    """Returns the destination's blocks, which `caller` names. `prefix`: the path of its fields in the request."""
    have = destination.have_tokens
    if have < 0:
        raise invalid(f"{prefix}have_tokens", f"counts tokens; got {have}")
    groups = state.life.engine.pool.groups
    blocks = state.pool.resolve(destination.blocks, f"{prefix}blocks")
    if any(map(len, blocks)):
        for i, group in enumerate(groups):
            needed = max(group.blocks_of(tokens) - group.held_of(tokens, have), 0)
            if len(blocks[i]) != needed:
                raise InvalidRequest(
                    Reason.BLOCK_COUNT_MISMATCH,
                    f"group {i}: {tokens} tokens, {have} of them held, take {needed} blocks; "
                    f"{len(blocks[i])} are listed",
                    metadata={"group": str(i), "block_count": str(needed)},
                )
    state.pool.check_owned(blocks, destination.allocation_id, caller)
    state.pool.pins.check_free_for(PinKind.TARGET, blocks)
    return blocks


def wrong_opened(source: EngineDescription, pull: PullMove, opened: Opened, groups: Sequence[Group]) -> str:
    """Returns the error in the source's answer, as text; empty if there is none. `groups`: of this engine."""
    claim = pull.claim
    fewer = claim.prefix and 0 < opened.token_count < claim.tokens and opened.token_count % UNIT_TOKENS == 0
    if opened.token_count != claim.tokens and not fewer:
        return f"it granted {opened.token_count} tokens, {claim.tokens} were asked for"
    if fewer and not all(group.stands_for(claim.tokens, opened.token_count) for group in groups):
        return f"its first {opened.token_count} tokens do not serve the blocks of {claim.tokens} here"
    if not (opened.ttl_s > 0 and opened.remaining_s >= 0):
        return "its lease has no time"
    return wrong_lists(source.pool, opened.blocks, opened.token_count, exact=True)


INTERVAL_MIN_S = 0.05
"""Minimum interval of renewals, in seconds, however short a TTL the peer states."""
ROWS_MAX = 4_096
"""Maximum rows of one call: grants of the greatest length fit into a message."""
BATCH_S = 1.0
"""Renewals due within this time, in seconds, go in one call; for short TTLs within 10 % of the TTL: none is late."""


class PullRenewals:
    """Renewals of all pulls."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def start(self, pull: PullMove) -> None:
        """Plans the first renewal of a pull whose access is open. Its lease may have less than the TTL left."""
        assert pull.opened is not None
        self._plan(pull, min(pull.opened.ttl_s, pull.opened.remaining_s))

    def due(self, pull: PullMove) -> None:
        """Renews this pull's lease, and the leases at the same peer that are due soon."""
        now = self._state.now
        rows: list[tuple[str, bytes]] = []
        reading: list[bytes] = []
        for other in self._state.moves.of_peer(pull.peer):
            if other.opened is None or other.stage is MoveStage.ENDED:
                continue
            if other.next_renewal <= now + min(BATCH_S, other.opened.ttl_s / 10):
                rows.append((other.transfer_id, other.token))
                reads = (
                    isinstance(other, PullMove) and other.opened_without_blocks and other.stage is not MoveStage.OPEN
                )
                reading.append(other.access_id if reads else b"")
                self._plan(other, other.opened.ttl_s)
        most = min(self._state.limits.renewals_per_call, ROWS_MAX)
        for at in range(0, len(rows), most):
            told = tuple(access_id for access_id in reading[at : at + most] if access_id)
            self._state.emit(SendRenew(pull.peer, tuple(rows[at : at + most]), told))

    def due_by(self, pull: PullMove, when: float) -> None:
        """Moves a pull's next renewal to this time, if it is planned for later."""
        if when < pull.next_renewal:
            pull.next_renewal = when
            self._state.timers.set(Timer.RENEW, pull.name, when)

    def _plan(self, pull: Move, left_s: float) -> None:
        pull.next_renewal = self._state.now + max(left_s / 3, INTERVAL_MIN_S)
        self._state.timers.set(Timer.RENEW, pull.name, pull.next_renewal)


P = TypeVar("P", bound=PullMove)


class PullEnds(Ends[P]):
    """Ends pulls. The ends of reservations extend it."""

    def succeed(self, pull: P) -> None:
        """Ends a pull with success: the source vouched for the bytes, and the blocks are the engine's."""
        state = self._state
        assert pull.stage is MoveStage.SETTLING
        assert not pull.busy
        pull.move(MoveStage.ENDED)
        self._close_writes(pull, None, CloseOutcome.FAILED)
        self._state.stop(pull)
        state.pool.pins.drop(pull.transfer_id, PinKind.TARGET)
        transfer = state.change(pull.transfer_id, state=State.SUCCEEDED, memory=Disposition.RETURNED)
        news = ReceivedNews(transfer.id, transfer.request_id, transfer.use_tokens, pull.telemetry)
        state.tell(transfer.owner, news)
        self._forget(pull)

    def fail_with(
        self, move: P, reason: Reason, message: str, *, closed: bool = False, rank: int | None = None
    ) -> None:
        """Ends a pull for this reason. A peer's CANCELLED cancels this side too."""
        failure = move_failure(move, reason, message, rank)
        if reason is Reason.CANCELLED:
            self.end(move, State.CANCELLED, failure, CloseOutcome.CANCELLED, closed=closed)
        else:
            self.end(move, State.FAILED, failure, closed=closed)

    def end(
        self,
        pull: P,
        end: State,
        failure: Failure,
        outcome: CloseOutcome = CloseOutcome.FAILED,
        *,
        closed: bool = False,
    ) -> None:
        """Ends a pull without success. `outcome` is what the other side is told."""
        state = self._state
        self._state.stop(pull)
        memory = Disposition.QUARANTINED if pull.busy else Disposition.RETURNED
        transfer = state.change(pull.transfer_id, state=end, failure=failure, memory=memory)
        self._close_writes(pull, failure, outcome)
        if not closed:
            self._closes.close(pull, outcome, failure.message)
        pull.move(MoveStage.ENDED)
        state.moves.over(pull)
        state.tell(transfer.owner, FailedNews(transfer.id, transfer.request_id, failure, end is State.CANCELLED))
        if pull.busy:
            if not pull.moves_nothing:
                state.pool.pins.quarantine(pull.transfer_id, state.now)
            return
        state.pool.pins.drop(pull.transfer_id, PinKind.TARGET)
        state.tell(transfer.owner, BlocksReturnedNews(transfer.id, transfer.request_id))
        self._forget(pull)

    def at_rest(self, move: P) -> None:
        """Gives back the blocks of an ended pull: nothing accesses them any more."""
        state = self._state
        state.pool.pins.drop(move.transfer_id, PinKind.QUARANTINE)
        transfer = state.change(move.transfer_id, memory=Disposition.RETURNED)
        state.tell(transfer.owner, BlocksReturnedNews(transfer.id, transfer.request_id))
        self._forget(move)

    def _close_writes(self, move: P, failure: Failure | None, outcome: CloseOutcome) -> None:
        """Ends a source's access to write; only reservations have one."""

    def _forget(self, pull: P) -> None:
        self._state.moves.remove(pull)
        del self._state.receive.transfers[pull.transfer_id]


class PullCourse(Course[P]):
    """Takes a pull from its start to its end."""

    def __init__(self, state: NodeState, handshakes: Handshakes, liveness: PeerLiveness, ends: PullEnds[P]) -> None:
        super().__init__(state, handshakes, liveness)
        self.ends: PullEnds[P] = ends
        self._renewals = PullRenewals(state)
        self.retries[Timer.RENEW] = self._renewals.due

    def take(self, pull: P, blocks: Blocks, after_step: int, have_tokens: int = 0) -> None:
        """Takes the destination's blocks: the transfer's until they are returned. The caller weighs the pull."""
        state = self._state
        pull.destination, pull.after_step, pull.have_tokens = blocks, after_step, have_tokens
        if not pull.moves_nothing:
            state.pool.pins.add(pull.transfer_id, PinKind.TARGET, blocks, state.now)

    def reached(self, move: P, peer: Peer) -> None:
        self.open(move, peer)

    def try_post(self, move: P) -> None:
        """Moves the bytes once source, destination and step are known."""
        if move.stage is not MoveStage.OPEN or move.destination is None or not move.has_parts:
            return
        if not any(map(len, move.filled)):
            move.begin_round()
            self.settle(move)
        else:
            self._post_when_ready(move)

    def renew_by(self, pull: P, when: float) -> None:
        """Moves the next renewal of a pull's lease to this time, if it is planned for later."""
        self._renewals.due_by(pull, when)

    def _post(self, move: P) -> None:
        """Posts a pull. If it was opened without blocks, its source leaves its claim alone only for a firm time: a
        renewal before that says that the pull reads.
        """
        super()._post(move)
        if move.opened_without_blocks and move.stage is MoveStage.WIRE:
            soon = move.opened_at + self._state.limits.firm_ttl_s / 2
            self.renew_by(move, max(soon, self._state.now))

    def settled(self, move: P) -> None:
        """Ends a pull with success: the source's lease held throughout the read."""
        self.ends.succeed(move)

    def _wrong(self, move: P, peer: Peer, opened: Opened) -> str:
        return wrong_opened(peer.description, move, opened, self._state.life.engine.pool.groups)

    def _accept(self, move: P, peer: Peer, opened: Opened) -> None:  # noqa: ARG002 - a push needs its peer
        state = self._state
        asked, waits = move.claim.tokens, move.destination is None
        if opened.token_count != asked:
            groups = state.life.engine.pool.groups
            move.unfilled = tuple(group.blocks_of(asked) - group.blocks_of(opened.token_count) for group in groups)
        state.moves.weigh(move)
        transfer = state.change(
            move.transfer_id,
            phases=self._phase(move, "queue"),
            waiting_for="blocks" if waits else "step",
            peer_transfer_id=opened.transfer_id,
            use_tokens=opened.token_count,
        )
        if move.unfilled and not waits:
            state.change(transfer.id, nbytes=state.pool.bytes_of([len(ids) for ids in move.filled]))
        if waits:
            state.tell(transfer.owner, PullOpenedNews(transfer.id, transfer.request_id, opened.token_count))
            state.timers.clear(Timer.QUEUE, move.name)
            state.timers.set(Timer.BLOCKS, move.name, transfer.created + state.limits.lease_cap_s)
        move.opened_at = state.now
        self._renewals.start(move)

    def _opening(self, move: P, request_id: str, paths: tuple[str, ...]) -> AccessOpening:
        move.opened_without_blocks = move.destination is None
        return AccessOpening(
            move.access_id, move.token, move.claim, move.transfer_id, request_id, paths,
            waits_for_blocks=move.opened_without_blocks, request_time_us=move.request_time_us,
        )  # fmt: skip
