"""The course of one pull: from its grant to the question whether the bytes are valid.

    connect -> open -> opened -> (blocks, step) -> posted -> settle

`moves.course` has the parts that it shares with a push.
"""

from typing import TypeVar

from kvgrpc.core.actions import PullOpenedNews
from kvgrpc.core.events import Opened
from kvgrpc.core.moves.course import Course
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.receive.pull_checks import wrong_opened
from kvgrpc.core.receive.pull_ends import PullEnds
from kvgrpc.core.receive.pull_renewals import PullRenewals
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.state.pull import PullMove
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.block_ids import Blocks

P = TypeVar("P", bound=PullMove)


class PullCourse(Course[P]):
    """Takes a pull from its start to its end."""

    def __init__(self, state: NodeState, handshakes: Handshakes, liveness: PeerLiveness, ends: PullEnds[P]) -> None:
        super().__init__(state, handshakes, liveness)
        self.ends: PullEnds[P] = ends
        self._renewals = PullRenewals(state)
        self.retries[Timer.RENEW] = self._renewals.due

    def take(self, pull: P, blocks: Blocks, after_step: int, have_tokens: int = 0) -> None:
        """Takes the destination's blocks: they are the transfer's until they are returned."""
        state = self._state
        pull.destination, pull.after_step, pull.have_tokens = blocks, after_step, have_tokens
        state.moves.weigh(pull)
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
