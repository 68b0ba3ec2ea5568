"""CancelTransfer: ends transfers of this engine, and at the other side according to its scope.

A destination tells its source by closing the access, or the grant if it has no access yet. A source tells each
destination of a push by closing the access that it opened there. It tells each reader by closing, at the reader, the
access that the reader opened here. Late calls are refused with CANCELLED.
"""

from kvgrpc.core.actions import Cancelled
from kvgrpc.core.events import CancelScope, CancelTransfer, CloseOutcome
from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.receive.pulls import Pulls
from kvgrpc.core.send.leases import Leases
from kvgrpc.core.send.pushes import Pushes
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.transfers import Direction, Failure, Side, Transfer
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.owners import Ground, Verb, tenant_of, within
from kvgrpc.errors import NextStep, Reason, invalid

CANCELLED_BEFORE_ACCESS = "cancelled_before_access"
CANCELLED_IN_FLIGHT = "cancelled_in_flight"
ALREADY_ENDED = "already_ended"
TOMBSTONED = "tombstoned"

_OUTCOMES = {
    CancelScope.BOTH: CloseOutcome.CANCELLED,
    CancelScope.THIS_SIDE: CloseOutcome.FAILED,
    CancelScope.ON_ABORT: CloseOutcome.DROPPED,
}
"""Outcome that a destination tells its source, by scope."""
PAST_SHOWN_MAX = 64
"""Maximum number of ended transfers under one key in the answer."""


class Cancels:
    """The CancelTransfer calls."""

    def __init__(
        self,
        state: NodeState,
        closes: PendingCloses,
        pulls: Pulls,
        pushes: Pushes,
        leases: Leases,
    ) -> None:
        self._state = state
        self._closes = closes
        self._pulls = pulls
        self._pushes = pushes
        self._leases = leases

    def cancel(self, event: CancelTransfer) -> None:
        """Cancels a transfer by id, or all transfers under a key. An unknown key is refused from now on."""
        state = self._state
        found, foreign = self._find(event)
        live = [transfer for transfer in found if not transfer.over]
        in_flight = any(self._in_flight(transfer) for transfer in live)
        if live:
            outcome = CANCELLED_IN_FLIGHT if in_flight else CANCELLED_BEFORE_ACCESS
        else:
            outcome = ALREADY_ENDED if found else TOMBSTONED
        if not event.validate_only:
            for transfer in live:
                self._cancel(transfer, event)
            if not found and not foreign:
                message, tenant = event.message or "it was cancelled before it came", tenant_of(event.call.principal)
                state.tombstones.end_key(event.key, message, state.now, tenant=tenant)
            elif found and not live:
                state.tombstones.let_retry(event.key)
        after = (state.transfers.find(transfer.id) or transfer for transfer in found)
        state.reply(event.call.id, Cancelled(outcome, tuple(after)))

    def _find(self, event: CancelTransfer) -> tuple[list[Transfer], bool]:
        """Returns the transfers that the call names, ended ones too, and whether there are others of another tenant,
        which its key must not end. Raises InvalidRequest (INVALID_FIELD), NotFound (TRANSFER_NOT_FOUND).
        """
        transfers = self._state.transfers
        if bool(event.transfer_id) == bool(event.key):
            raise invalid("target", "is required: a transfer_id or a transfer_key")
        if event.transfer_id:
            return [transfers.get_for(event.call.principal, Verb.END, event.transfer_id, Ground.NAME)], False
        check_transfer_key(event.key)
        known = [*transfers.past_with_key(event.key)[-PAST_SHOWN_MAX:], *transfers.with_key(event.key)]
        found = [transfer for transfer in known if within(event.call.principal, transfer.tenant)]
        return found, len(found) < len(known)

    def _in_flight(self, transfer: Transfer) -> bool:
        """Returns whether this engine's movers may have bytes in flight for a transfer."""
        if transfer.direction is Direction.RECEIVE:
            return self._pulls.busy(transfer)
        push = self._state.send.pushes.find(transfer.id)
        return push is not None and push.posting

    def _cancel(self, transfer: Transfer, event: CancelTransfer) -> None:
        both = event.scope is not CancelScope.THIS_SIDE
        message = event.message or "cancelled"
        push = self._state.send.pushes.find(transfer.id)
        if transfer.direction is Direction.RECEIVE:
            self._pulls.cancel(transfer, message, self._outcome(transfer, event.scope))
        elif push is not None:
            self._pushes.cancel(push, message, CloseOutcome.CANCELLED if both else CloseOutcome.FAILED)
        else:
            self._cancel_lease(self._state.send.leases.get(transfer.lease_id), message, both=both)

    def _outcome(self, transfer: Transfer, scope: CancelScope) -> CloseOutcome:
        """Returns the outcome that a destination tells its source. On abort, a source that is not known to have handed
        anything over is told to stop computing: no hand-over has said yet what an abort means.
        """
        move = self._state.receive.transfers[transfer.id]
        if scope is CancelScope.ON_ABORT and type(move) is ReservationMove and not (move.access_id or move.part_epoch):
            return CloseOutcome.CANCELLED
        return _OUTCOMES[scope]

    def _cancel_lease(self, lease: Lease, message: str, *, both: bool) -> None:
        """Ends a hand-over to readers. With `both`, tells its readers, and refuses openings as cancelled."""
        readers = [self._state.access.rows[access_id] for access_id in lease.accesses]
        if both:
            lease.cancelled = message
        failure = Failure(Reason.CANCELLED, message, "readers", Side.SOURCE, next=NextStep.RECOMPUTE)
        self._leases.end(lease, LeaseState.RELEASED, failure, cancelled=True)
        if both:
            for access in readers:
                self._closes.cancel_reader(access, message, lease.trace)
