"""Proofs that peers write into this engine's memory no more, when the peers themselves do not say so.

* The end of a peer's processes: every rank watches those of the peer's ranks that it has reached. It is also the end of
  that life.
* Re-key: the ranks end the data paths that peers write by, and begin again under a new memory generation. It ends the
  transfers of the moment, so it is the last resort: past the quarantine budget, for engines that cannot set blocks
  aside, or when an operator asks. Re-keys are rate-limited.
* An operator's word.

A re-key first refuses new work and fails what moves. It then waits for postings to end by themselves, at most for the
transfer timeout. Then every rank is told. After the last rank's report peers must shake hands anew.
"""

from kvgrpc.core.actions import QuarantineReleased, Rekey
from kvgrpc.core.events import ProcessEnded, Rekeyed, ReleaseQuarantine
from kvgrpc.core.moves.moves import Moves
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.receive.reservations import Reservations
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.waiting_rows import Proofs
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.owners import Ground, Verb
from kvgrpc.errors import DeadlineExceeded, Exhausted, KVGrpcError, Reason, invalid

ANSWER_S = 15.0
"""Maximum time ranks get for a re-key before its callers are refused, in seconds; a library's agent ends in 10 s."""
TOO_MUCH = "too much memory is in quarantine"
"""Reason of a re-key that no operator asked for."""


class Quarantine:
    """Finds proofs for blocks in quarantine."""

    def __init__(self, state: NodeState, liveness: PeerLiveness, moves: Moves, reservations: Reservations) -> None:
        self._state = state
        self._liveness = liveness
        self._moves = moves
        self._reservations = reservations

    @property
    def _proofs(self) -> Proofs:
        return self._state.pool.proofs

    def process_ended(self, event: ProcessEnded) -> None:
        """Takes the end of a peer's process. After the last one the life is over, and at rest if nothing that its
        processes wrote can land any more.
        """
        peer = self._state.peers.lives.get(event.peer)
        pair = event.rank, event.peer_rank
        if peer is None or pair not in peer.bridges.pairs:
            return
        ended = self._proofs.processes_ended.setdefault(event.peer, {})
        ended[pair] = event.drained
        if len(ended) < len(peer.bridges.pairs):
            return
        self._liveness.exited(event.peer)
        if all(ended.values()):
            self._reservations.peer_at_rest(event.peer)

    def _forget_ended(self) -> None:
        """Forgets the process ends of lives that are dead and may write no more."""
        if not self._proofs.processes_ended:
            return
        writers, peers = self._state.receive.writing_lives(), self._state.peers.lives
        for life in list(self._proofs.processes_ended):
            if life not in writers and (life not in peers or peers[life].state is PeerState.DEAD):
                del self._proofs.processes_ended[life]

    def release(self, event: ReleaseQuarantine) -> None:
        """Handles ReleaseQuarantine: by re-key, answered when that is over, or at once by an operator's word."""
        state = self._state
        self._check(event)
        before = sum(state.pool.pins.quarantined)
        if event.validate_only:
            self._preview(event)
        elif event.force:
            self._moves.release_by_operator(event.transfer_ids)
            self._answer(event.call.id, before)
        elif self._anything:
            if not state.pool.rekeying:
                self._begin("an operator asked for it")
            elif state.timers.when(Timer.REKEY, "") is None:  # the ranks' time is over; this caller's begins
                state.timers.set(Timer.REKEY, "", state.now + ANSWER_S)
            self._proofs.calls.append(event.call.id)
        else:
            self._answer(event.call.id, before)

    def look(self) -> None:
        """Continues a re-key, or plans one, after each event."""
        state = self._state
        self._forget_ended()
        if state.pool.rekeying:
            if not self._proofs.rekeying_ranks and self._calm():
                self._go()
            return
        untried = state.pool.pins.quarantines != self._proofs.quarantines_tried and any(state.pool.pins.quarantined)
        if untried and self._wanted() and state.timers.when(Timer.QUARANTINE, "") is None:
            state.timers.set(Timer.QUARANTINE, "", max(state.now + state.limits.peer_grace_s, self._proofs.next_at))

    def quarantine_due(self, _: str) -> None:
        """Begins a re-key if too much is still in quarantine after the time to come to rest by itself."""
        state = self._state
        owners = {pin.owner: pin.since for pin in state.pool.pins if pin.kind is PinKind.QUARANTINE}
        fresh = [since for owner, since in owners.items() if owner not in self._proofs.tried]
        if not fresh:
            self._proofs.quarantines_tried = state.pool.pins.quarantines
            return
        if not self._wanted() or state.pool.rekeying:
            return
        ripe = min(fresh) + state.limits.peer_grace_s
        if ripe > state.now:
            state.timers.set(Timer.QUARANTINE, "", ripe)
        else:
            self._begin(TOO_MUCH)

    def rekey_due(self, _: str) -> None:
        """Tells the ranks once postings had their time to end, or refuses the callers once the ranks had theirs."""
        if not self._proofs.rekeying_ranks:
            self._go()
            return
        late = ", ".join(map(str, sorted(self._proofs.rekeying_ranks)))
        message = f"rank {late} has not begun its data paths again"
        self._refuse_calls(DeadlineExceeded(Reason.DEADLINE, message, retry_delay_s=1.0, metadata={"phase": "rekey"}))

    def rekeyed(self, event: Rekeyed) -> None:
        """Takes a rank's report of a re-key; the last one ends it."""
        if event.rank not in self._proofs.rekeying_ranks:
            return
        self._proofs.rekeying_ranks.discard(event.rank)
        if event.message:
            self._proofs.unproved.add(event.rank)
        if not self._proofs.rekeying_ranks:
            self._finish()

    def end_all(self, error: KVGrpcError) -> None:
        """Refuses the callers of a re-key: the incarnation ends, and with it what peers know of its memory."""
        self._refuse_calls(error)

    def _begin(self, why: str) -> None:
        state = self._state
        state.pool.rekeying = why
        state.timers.clear(Timer.QUARANTINE, "")
        state.timers.set(Timer.REKEY, "", state.now + state.limits.transfer_timeout_s)
        self._proofs.before = sum(state.pool.pins.quarantined)
        state.react.rekey_begins()

    def _calm(self) -> bool:
        """Returns whether nothing is left that could end by itself: our postings, and peers that still answer."""
        if self._state.moves.oldest_in_flight() is not None:
            return False
        return not any(self._state.peers.live_on(life) for life in self._state.receive.writing_lives())

    def _go(self) -> None:
        """Tells the ranks to re-key."""
        state = self._state
        for life in self._state.receive.writing_lives():
            self._liveness.watch(life)
        state.timers.set(Timer.REKEY, "", state.now + ANSWER_S)
        self._proofs.rekeying_ranks = set(range(state.life.engine.world_size))
        self._proofs.unproved.clear()
        for rank in sorted(self._proofs.rekeying_ranks):
            state.emit(Rekey(rank))

    def _finish(self) -> None:
        """Ends a re-key: the memory has a new generation, and peers that knew the last one shake hands again."""
        state = self._state
        writers = self._state.receive.writing_lives()
        state.timers.clear(Timer.REKEY, "")
        state.pool.rekeying = ""
        state.life.raise_generation()
        self._proofs.next_at = state.now + state.limits.rekey_interval_s
        state.react.rekey_ends()
        self._proofs.doubted = {life: self._proofs.doubted.get(life, set()) | self._proofs.unproved for life in writers}
        for life, doubted in self._proofs.doubted.items():
            if self._all_ended(life, doubted):
                self._reservations.peer_at_rest(life)
                self._proofs.processes_ended.pop(life, None)
        self._proofs.tried = frozenset(pin.owner for pin in state.pool.pins if pin.kind is PinKind.QUARANTINE)
        self._proofs.quarantines_tried = state.pool.pins.quarantines
        calls, self._proofs.calls = self._proofs.calls, []
        for call in calls:
            self._answer(call, self._proofs.before)

    def _all_ended(self, life: str, ranks: set[int]) -> bool:
        """Returns whether these ranks of ours saw the ends of all processes of a life that they had reached."""
        ended, peer = self._proofs.processes_ended.get(life, {}), self._state.peers.lives.get(life)
        return not ranks or (peer is not None and all(pair in ended for pair in peer.bridges.pairs if pair[0] in ranks))

    @property
    def _anything(self) -> bool:
        """True if a re-key goes on, or could prove something."""
        state = self._state
        return bool(state.pool.rekeying or any(state.pool.pins.quarantined) or state.transfers.quarantined)

    def _check(self, event: ReleaseQuarantine) -> None:
        """Raises InvalidRequest (INVALID_FIELD), NotFound (TRANSFER_NOT_FOUND) or Exhausted (QUARANTINED)."""
        if event.force:
            if not event.why:
                raise invalid("message", "is required with force: why nothing can write there")
            for id_ in event.transfer_ids:
                self._state.transfers.get_for(event.call.principal, Verb.SEE, id_, Ground.NAME)
        elif event.transfer_ids:
            raise invalid("transfer_ids", "go with force: a re-key is of all memory")
        elif self._anything and not self._state.pool.rekeying:
            self._check_interval()

    def _preview(self, event: ReleaseQuarantine) -> None:
        """Answers how many blocks a call would ask for."""
        state = self._state
        pins = [pin for pin in state.pool.pins if pin.kind is PinKind.QUARANTINE]
        asked = [pin for pin in pins if not event.transfer_ids or pin.owner in event.transfer_ids]
        count = sum(len(ids) for pin in asked for ids in pin.blocks)
        left = sum(state.pool.pins.quarantined) - count
        state.reply(event.call.id, QuarantineReleased(count, left, state.life.engine.memory_generation))

    def _answer(self, call: int, before: int) -> None:
        state = self._state
        left = sum(state.pool.pins.quarantined)
        generation = state.life.engine.memory_generation
        state.reply(call, QuarantineReleased(max(before - left, 0), left, generation))

    def _refuse_calls(self, error: KVGrpcError) -> None:
        calls, self._proofs.calls = self._proofs.calls, []
        for call in calls:
            self._state.refuse(call, error)

    def _wanted(self) -> bool:
        """Returns whether more is in quarantine than may stay there."""
        return not self._state.life.sets_aside or bool(self._state.pool.quarantine_full())

    def _check_interval(self) -> None:
        wait_s = self._proofs.next_at - self._state.now
        if wait_s > 0:
            raise Exhausted(Reason.QUARANTINED, "the last re-key is not long ago", retry_delay_s=wait_s)
