"""The ends of reservations: like those of pulls, and the source's access to write ends too."""

from kvgrpc.core.events import CloseOutcome
from kvgrpc.core.receive.pull_ends import PullEnds
from kvgrpc.core.receive.writers import drop_writer
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.tables.accesses import Access, AccessState
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Failure
from kvgrpc.errors import Reason


class ReservationEnds(PullEnds[ReservationMove]):
    """Ends reservations."""

    def stop_reading(self, reservation: ReservationMove) -> None:
        """Closes the access at the source, so that nothing more is read under it; the push goes on."""
        self._closes.close(reservation, CloseOutcome.FAILED)
        self._state.moves.drop_access(reservation)

    def close_access(self, access: Access) -> None:
        """Closes the source's access to write."""
        state = self._state
        access.move(AccessState.CLOSED)
        state.expect(access, open_=False)
        kept_s = max(state.limits.settle_timeout_s, state.limits.open_wait_s)
        state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), state.now + kept_s)

    def proved(self, access_id: bytes, reservation: ReservationMove) -> None:
        """Takes a proof that nothing is written any more under an access of an ended reservation."""
        drop_writer(self._state, access_id)
        self.at_rest(reservation)

    def released_by_operator(self, move: ReservationMove) -> None:
        for access_id in list(move.writers):
            drop_writer(self._state, access_id)

    def _close_writes(self, move: ReservationMove, failure: Failure | None, outcome: CloseOutcome) -> None:
        """Ends the source's access to write: its later calls are refused. They get CANCELLED only if both sides were
        cancelled.
        """
        reason = failure.reason if failure else None
        if failure is not None and outcome is CloseOutcome.CANCELLED:
            self._state.tombstones.end_grant(move.token, failure.message, self._state.now, Reason.CANCELLED)
        elif reason is Reason.CANCELLED:
            reason = Reason.TRANSFER_ENDED
        access = self._state.access.rows.get(move.write_access)
        if access is not None and access.state is AccessState.OPEN:
            self._end_access(access, reason)

    def _end_access(self, access: Access, reason: Reason | None) -> None:
        state = self._state
        access.stale = reason
        if access.id in state.receive.open_writes:
            access.move(AccessState.STALE)
            state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), state.now + state.limits.lease_cap_s)
        else:
            self.close_access(access)

    def _forget(self, pull: ReservationMove) -> None:
        super()._forget(pull)
        del self._state.receive.targets[pull.target_id]
        self._state.ledger.drop(RowKind.PARTS, pull.name)
