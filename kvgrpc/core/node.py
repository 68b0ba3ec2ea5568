"""The node: a lead's mind. One object owns all state; events go in, actions come out.

    actions = node.handle(event, now)
    when = node.next_deadline()

`handle` first fires every deadline that is due at `now`, in order, and then handles the event: a lease that ends at
this very moment has ended before the event. A refused call changes nothing. Same events, same times, same actions.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kvgrpc.core import events
from kvgrpc.core.access.cancels import ALREADY_ENDED, CANCELLED_BEFORE_ACCESS, CANCELLED_IN_FLIGHT, TOMBSTONED, Cancels
from kvgrpc.core.access.checksums import ChecksumCalls
from kvgrpc.core.access.openings import AccessOpenings
from kvgrpc.core.access.post_sends import PostSends
from kvgrpc.core.access.served_accesses import ServedAccesses
from kvgrpc.core.actions import Acknowledged, Action, DrainChanged, SendClose, TransferChanged
from kvgrpc.core.defects import closings, take_over
from kvgrpc.core.idempotency import Begun
from kvgrpc.core.invariants import check
from kvgrpc.core.moves.course import Course
from kvgrpc.core.moves.moves import Moves
from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.moves.send_asks import SendAsks
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.peers.refusals import RETRY_DELAY_S
from kvgrpc.core.pool.allocations import Allocations
from kvgrpc.core.pool.quarantine import Quarantine
from kvgrpc.core.receive.pull_course import PullCourse, PullEnds
from kvgrpc.core.receive.pulls import Pulls
from kvgrpc.core.receive.reservation_course import ReservationCourse, ReservationEnds
from kvgrpc.core.receive.reservations import Reservations
from kvgrpc.core.send.checksum_prefetch import ChecksumPrefetch
from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.send.hand_overs import HandOvers
from kvgrpc.core.send.leases import Leases
from kvgrpc.core.send.mirror_copies import MirrorCopies
from kvgrpc.core.send.push_course import PushCourse
from kvgrpc.core.send.push_ends import PushEnds
from kvgrpc.core.send.pushes import Pushes
from kvgrpc.core.send.reclaims import Reclaims
from kvgrpc.core.send.weak_claims import WeakClaims
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import Move, MoveStage, PullMove
from kvgrpc.core.state.push import Registration
from kvgrpc.core.state.reactions import Reactions, reaction
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.tables.leases import Lease, LeaseState, LeaseTimes
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Failure, Side, Transfer
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.networks import EVERYWHERE, PrivateNetworks
from kvgrpc.errors import KVGrpcError, NextStep, Reason, Unavailable

Handler = Callable[[Any], None]

__all__ = ["ALREADY_ENDED", "CANCELLED_BEFORE_ACCESS", "CANCELLED_IN_FLIGHT", "TOMBSTONED", "Node"]


class Node:
    """Everything a lead decides. `state` may be read between events; only the node changes it.

    `writers`: the data paths over which it writes what it pushes; over all others the destination reads. With
    `checksums` it compares every block that it receives with the source's before the block counts. `networks`: where KV
    may travel in plain text.
    """

    def __init__(
        self, limits: Limits | None = None, writers: frozenset[str] = frozenset(), *, checksums: bool = False,
        networks: PrivateNetworks = EVERYWHERE,
    ) -> None:  # fmt: skip
        state = self.state = NodeState(limits or Limits(), writers, checksums=checksums, networks=networks)
        self._liveness = PeerLiveness(state)
        self._handshakes = Handshakes(state, self._liveness)
        self._closes = PendingCloses(state, self._handshakes)
        pull_ends, reservation_ends = PullEnds[PullMove](state, self._closes), ReservationEnds(state, self._closes)
        pull_course = PullCourse(state, self._handshakes, self._liveness, pull_ends)
        reservation_course = ReservationCourse(state, self._handshakes, self._liveness, reservation_ends)
        self._firmness = Firmness(state)
        self.weak_claims = WeakClaims(state)
        self._leases = Leases(state, self._firmness, self.weak_claims)
        self._hand_overs = HandOvers(state, self._leases, self._firmness)
        self._reclaims = Reclaims(state, self._leases, self.weak_claims, self._closes)
        self._push_ends = PushEnds(state, self._closes, self._leases, self._firmness)
        self._push_course = PushCourse(state, self._handshakes, self._liveness, self._push_ends, self._leases)
        courses: dict[type[Move], Course[Any]] = {
            PullMove: pull_course,
            ReservationMove: reservation_course,
            Registration: self._push_course,
        }
        self._moves = Moves(state, self._liveness, courses)
        ends: dict[type[PullMove], PullEnds[Any]] = {PullMove: pull_ends, ReservationMove: reservation_ends}
        self._pulls = Pulls(state, self._handshakes, pull_course, ends)
        self._reservations = Reservations(state, self._handshakes, reservation_course)
        self._mirror_copies = MirrorCopies(state, self._leases, self._push_course)
        self._pushes = Pushes(
            state, self._handshakes, self._push_course, self._leases, self._firmness, self._mirror_copies
        )
        self._prefetch = ChecksumPrefetch(state)
        self._checksums = ChecksumCalls(state, self._prefetch)
        self._post_sends, self._send_asks = PostSends(state), SendAsks(state)
        self._openings = AccessOpenings(state, self._reservations, self._firmness)
        self._served = ServedAccesses(
            state, self._leases, self._pulls, self._reservations, self._pushes, self._openings
        )
        self._cancels = Cancels(state, self._closes, self._pulls, self._pushes, self._leases)
        self._quarantine = Quarantine(state, self._liveness, self._moves, self._reservations)
        self._pool = Allocations(state, self._reclaims)
        state.react = self._reactions()
        self._handlers = self._make_handlers()
        self._deadlines = self._make_deadlines()

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Fires what is due, then handles the event. `now` never goes back."""
        state = self.state
        assert now >= state.now, "time went back"
        if state.timers.earliest <= now:
            self._fire_due(now)
        state.now = now
        handlers = self._handlers[type(event)]
        call: Any = getattr(event, "call", None)
        try:
            if call is not None and call.incarnation:
                state.life.check(call.incarnation)
            known = state.keys.begin(call) if call is not None and call.key else Begun.NEW
            if known is Begun.NEW:
                for handler in handlers:
                    handler(event)
            elif known is not Begun.JOINED:
                state.emit(replace(known, call_id=call.id))
        except KVGrpcError as error:
            if call is None:
                raise  # nobody asked: it is a defect
            state.refuse(call.id, error)
        # What waits for no event goes on: a re-key, and moves that wait for a turn.
        pool, turns = state.pool, state.moves.turns
        if pool.rekeying or pool.proofs.processes_ended or any(pool.pins.quarantined):
            self._quarantine.look()
        if pool.rekeying or turns.paused or turns.waiting:
            self._moves.give_turns()
        taken = state.actions.copy()
        state.actions.clear()
        return taken

    def successor(self, incarnation: int, now: float) -> "tuple[Node, list[Transfer]]":
        """Returns a node like this one, in a life of that name without an engine, and the transfers that ended with
        this life. Call it after `handle` raised or its actions failed: `state.actions` has the decided ones.
        """
        state = self.state
        moves, networks = state.moves, state.peers.networks
        node = type(self)(state.limits, moves.writers, checksums=moves.checksums, networks=networks)
        return node, take_over(node.state, state, incarnation, now)

    def unclosed(self) -> list[SendClose]:
        """Returns the closings of this node's pushes at destinations. Call it after `handle` raised."""
        moves = [move for push in self.state.send.pushes for move in push.registrations.values()]
        return closings([move for move in moves if move.access_id and move.peer], self.state.life.incarnation)

    def next_deadline(self) -> float | None:
        """Returns when `handle(Tick(), now)` has something to do, or None."""
        return self.state.timers.next_deadline()

    def open_accesses(self, peer: Peer) -> int:
        """Returns the number of accesses that are open here for a life of another engine, and there for this engine."""
        held = sum(self.state.access.rows[access_id].held for access_id in peer.accesses)
        return held + self.state.moves.open_accesses(peer.key)

    def find_lease(self, ref: events.LeaseRef, caller: str = "") -> Lease:
        """Returns a lease, live or ended. Raises NotFound, or the grant's errors."""
        return self._leases.find(ref, caller)

    def lease_times(self, lease: Lease) -> LeaseTimes:
        return self._leases.times(lease)

    def oldest_posting(self) -> float | None:
        """Returns when the oldest posting or copy in flight at its ranks began; None if there is none."""
        move, copies = self.state.moves.oldest_in_flight(), self.state.send.mirrors.running.values()
        began = [portion.since for portion in copies] if move is None else [move.posted_at, *(p.since for p in copies)]
        return min(began, default=None)

    def missing_proof(self, transfer_id: str) -> str:
        """Returns the proof that an ended transfer's blocks lack; empty if they are at rest, or it is not over."""
        push = self.state.send.pushes.find(transfer_id)
        if push is not None:
            moves = push.registrations.values() if push.over else ()
            return "; ".join(move.missing_proof for move in moves if move.postings)
        move = self.state.moves.find(transfer_id)
        return move.missing_proof if move is not None and move.stage is MoveStage.ENDED else ""

    def check(self) -> None:
        """Asserts what holds between events. For tests and simulators."""
        check(self.state)

    def _reactions(self) -> Reactions:
        """Returns the reactions of the parts to each other's decisions, in this order. What a life does without is not
        called: mirrors, and checksums.
        """
        access, closes, moves, asking = self._served, self._closes, self._moves, self._send_asks
        ends = access.peer_dead, closes.peer_dead, moves.peer_dead, self._liveness.hang_up
        prefetch = [self._prefetch] * self.state.moves.checksums
        # Ranks with mirrors compute checksums in the mirrors, once the blocks are there.
        ahead = [self._mirror_copies.announced] if self.state.life.mirrored else [part.announced for part in prefetch]
        return Reactions(
            peer_heard=reaction(access.peer_heard, asking.peer_heard),
            peer_back=reaction(closes.peer_back),
            peer_dead=reaction(*ends, self._handshakes.peer_dead, asking.peer_dead, moves.peer_replaced),
            peer_forgotten=reaction(closes.peer_forgotten),
            peer_ready=reaction(moves.peer_ready, closes.peer_ready),
            peer_failed=reaction(moves.peer_failed, closes.peer_failed),
            peer_again=reaction(access.peer_again),
            memory_changed=reaction(moves.memory_changed),
            rekey_begins=reaction(moves.rekey_begins, access.stop_reads),
            rekey_ends=reaction(access.stop_reads, self._handshakes.rekey_ends, self._liveness.rekey_ends),
            lease_began=reaction(*ahead, access.lease_announced),
            lease_copied=reaction(*[part.copied for part in prefetch], access.lease_copied),
            lease_refused=reaction(access.lease_refused),
            lease_ended=reaction(*[part.ended for part in prefetch]),
            lease_missed=reaction(self._openings.lease_missed),
            push_ended=reaction(self._push_ends.end_rest),
            lease_voided=reaction(self._pushes.voided),
        )

    def _make_handlers(self) -> dict[type, tuple[Handler, ...]]:
        """Returns the parts that hear each event, in this order."""
        computed = (self._moves.checksums_computed, self._prefetch.computed, self._checksums.computed)
        return {
            events.FinishedBlocks: (self._finish,),
            events.PullBlocks: (self._pulls.start,),
            events.GiveDestination: (self._pulls.give,),
            events.RenewLeases: (self._leases.renewals.renew, self._reservations.keys.pass_on),
            events.ReleaseLease: (self._leases.release,),
            events.CancelTransfer: (self._cancel,),
            events.AcknowledgeTransfers: (self._acknowledge,),
            events.AllocateBlocks: (self._pool.allocate,),
            events.ReclaimBlocks: (self._reclaims.reclaim,),
            events.FreeBlocks: (self._pool.free,),
            events.GiveAllocation: (self._pool.give,),
            events.ConnectPeer: (self._handshakes.connect,),
            events.HandshakeReceived: (self._handshakes.received,),
            events.PeerAnswered: (self._handshakes.answered,),
            events.DialFailed: (self._handshakes.dial_failed,),
            events.ProofRefused: (self._handshakes.proof_refused,),
            events.PeerAlive: (self._liveness.streaming,),
            events.PeerSilent: (self._liveness.silent,),
            events.OpenAccess: (self._served.open,),
            events.SettleAccess: (self._served.settle,),
            events.CloseAccess: (self._served.close,),
            events.AccessAnswered: (self._moves.access_answered,),
            events.SettleAnswered: (self._moves.settle_answered,),
            events.CloseAnswered: (self._closes.answered,),
            events.RenewAnswered: (self._pulls.renew_answered,),
            events.KeysRenewed: (self._reservations.keys.answered,),
            events.EndpointOffered: (self._handshakes.endpoint_offered,),
            events.MeetingBegan: (self._handshakes.meeting_began,),
            events.PeerMapped: (self._handshakes.mapped,),
            events.PostingEnded: (self._moves.posting_ended, self._served.posting_ended),
            events.StepDone: (self._step_done,),
            events.LeasesVoided: (self._leases.void,),
            events.LifeBegan: (self._begin,),
            events.MemoryGone: (self._memory_gone,),
            events.Tick: (),
            events.RegisterPush: (self._pushes.register,),
            events.ReserveBlocks: (self._reservations.reserve,),
            events.PartsReady: (self._served.parts_ready,),
            events.PartsAnswered: (self._push_course.parts_answered,),
            events.ChecksumBlocks: (self._checksums.ask,),
            events.CallAbandoned: (self._checksums.abandoned, self._post_sends.abandoned, self._handshakes.abandoned),
            events.PostSend: (self._post_sends.ask,),
            events.SendPosted: (self._post_sends.posted,),
            events.SendWanted: (self._send_asks.wanted,),
            events.PostSendAnswered: (self._send_asks.answered,),
            events.ChecksumsAnswered: (self._moves.checksums_answered,),
            events.ChecksumsComputed: computed,
            events.CopiedOut: (self._mirror_copies.copied,),
            events.RegisterAnswered: (self._moves.register_answered,),
            events.ProcessEnded: (self._quarantine.process_ended,),
            events.Rekeyed: (self._quarantine.rekeyed,),
            events.ReleaseQuarantine: (self._quarantine.release,),
            events.StartDrain: (self._start_drain,),
            events.CancelDrain: (self._cancel_drain,),
        }

    def _make_deadlines(self) -> dict[Timer, Callable[[str], None]]:
        """Returns the part that acts on each deadline; missing ones are deadlines of moves."""
        return {
            Timer.LEASE: self._leases.due,
            Timer.SOFTEN: self._firmness.due,
            Timer.RENDEZVOUS: self._pushes.expected_pushes.due,
            Timer.OPEN_WAIT: self._openings.wait_due,
            Timer.ACCESS_FORGET: self._served.forget,
            Timer.CLOSED_IDS: self._served.closed_ids_due,
            Timer.CLOSE_RETRY: self._closes.due,
            Timer.DEAD_PEER_RETRY: self._closes.retry_dead_peer,
            Timer.PEER_GRACE: self._liveness.grace_over,
            Timer.CONNECT: self._handshakes.connect_due,
            Timer.DIAL_AGAIN: self._handshakes.dial_again,
            Timer.ADMIT: self._handshakes.admit_due,
            Timer.IDEMPOTENCY: self.state.key_due,
            Timer.TOMBSTONE: lambda table: self.state.tombstones.expire(table, self.state.now),
            Timer.ALLOCATION: self._pool.due,
            Timer.CHECKSUMS: self._checksums.due,
            Timer.SEND: self._post_sends.due,
            Timer.QUARANTINE: self._quarantine.quarantine_due,
            Timer.REKEY: self._quarantine.rekey_due,
        }

    def _fire_due(self, now: float) -> None:
        state = self.state
        while (when := state.timers.next_deadline()) is not None and when <= now:
            state.now = max(state.now, when)
            for timer, name in state.timers.due(state.now):
                due = self._deadlines.get(timer) or partial(self._moves.due, timer)
                due(name)

    def _finish(self, event: events.FinishedBlocks) -> None:
        if event.expected:
            self._pushes.expected_pushes.expected(event)
        elif event.waits_for is events.WaitsFor.REGISTRATION or self._pushes.expected_pushes.awaited(event):
            self._pushes.finish(replace(event, waits_for=events.WaitsFor.REGISTRATION))
        else:
            self._hand_overs.finish(event)

    def _step_done(self, event: events.StepDone) -> None:
        """Takes a finished step, or some layers of it if they are named: parts of a push may wait for no more."""
        state = self.state
        if state.life.description is None:
            return
        before = state.pool.steps.done()
        state.pool.steps.finish(event.rank, event.step, event.layers)
        if state.life.mirrored:
            self._mirror_copies.go_on()
        if state.pool.steps.done() > before:
            self._served.retry_step()
            if state.moves.checksums:
                self._prefetch.go_on()
        self._moves.step_done(event)

    def _cancel(self, event: events.CancelTransfer) -> None:
        """Handles CancelTransfer, and frees the allocations that it names."""
        if event.free_allocation_ids:
            self._pool.check_kind()
        self._cancels.cancel(event)
        if not event.validate_only:
            self._pool.free_all(event.free_allocation_ids, event.call.principal)

    def _acknowledge(self, event: events.AcknowledgeTransfers) -> None:
        count = self.state.transfers.acknowledge(event.transfer_ids, event.call.principal, asking=event.validate_only)
        self.state.reply(event.call.id, Acknowledged(count))

    def _start_drain(self, event: events.StartDrain) -> None:
        life = self.state.life
        if not event.validate_only and not life.stopping:
            life.drain(event.reason, self.state.now)
        self.state.reply(event.call.id, DrainChanged(life.draining))

    def _cancel_drain(self, event: events.CancelDrain) -> None:
        life = self.state.life
        if not event.validate_only:
            life.cancel_drain()
        self.state.reply(event.call.id, DrainChanged(life.draining))

    def _memory_gone(self, _: events.MemoryGone) -> None:
        """Takes the end of earlier lives' memory, and with it of what they left in quarantine."""
        for transfer in self.state.transfers.memory_gone():
            self.state.emit(TransferChanged(transfer))

    def _begin(self, event: events.LifeBegan) -> None:
        """Ends everything of the present incarnation, then starts the next with empty tables.

        The old engine is gone and is told nothing. Watchers of transfers hear the end.
        """
        state = self.state
        state.life.attached = False
        why = "the engine was attached anew or is gone"
        gone = Failure(Reason.ENGINE_LOST, why, "", Side.SOURCE, next=NextStep.RECOMPUTE)
        changed = "the engine behind this lead changed"
        error = Unavailable(Reason.ENGINE_LOST, changed)
        self._openings.end_all(error)  # before their leases, which would refuse them for another reason
        for lease in list(state.send.leases):
            self._leases.end(lease, LeaseState.RELEASED, gone)
        self._pushes.end_all(gone)
        self._pulls.end_all(gone)
        state.drop_moves()
        self._served.end_all()
        self._checksums.end_all(error)
        self._post_sends.end_all(error)
        self._handshakes.end_all(Unavailable(Reason.ENGINE_LOST, changed, retry_delay_s=RETRY_DELAY_S))
        self._quarantine.end_all(error)
        self._liveness.end_all()
        state.timers.clear_all()
        state.begin(event)
        state.react = self._reactions()
