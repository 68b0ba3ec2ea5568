"""Firm, claimed, soft: decides whether a lease may be taken back.

A lease is firm for its firm time after its hand-over, and again after its last claimer has gone. A renewal by anybody
but the engine makes it firm for the renewed time. A lease is claimed while an access on it is open or waiting. A pushed
lease is claimed while the push has a destination, while our own postings read its blocks, or while it still gets parts,
because the engine is computing them. All other leases are soft. `weak_claims` decides which leases yield to older
requests.
"""

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer


class Firmness:
    """The firm times and claims of all live leases."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def handed_over(self, lease: Lease) -> None:
        """Starts the firm time of a lease: blocks were handed over under it, or its last claimer has gone."""
        lease.kept_until = self._state.now + lease.firm_ttl_s
        self._keep(lease, lease.firm_ttl_s)

    def renewed(self, lease: Lease, ttl_s: float) -> None:
        """Makes a lease firm for `ttl_s` after somebody other than the engine renewed it."""
        self._keep(lease, ttl_s)

    def claimed(self, lease: Lease) -> None:
        """Hardens a lease that got a claimer."""
        if self._take_out(lease):
            self._state.pool.pins.harden(lease.id, PinKind.LEASE)

    def unclaimed(self, lease: Lease) -> None:
        """Makes a live lease firm again if its last claimer has gone."""
        if lease.live and not self.is_claimed(lease):
            self.handed_over(lease)

    def ended(self, lease: Lease) -> None:
        """Removes an ended lease. The caller drops its pin."""
        self._take_out(lease)

    def due(self, _: str = "") -> None:
        """Softens the leases whose firm time is over."""
        state = self._state
        for lease in state.send.soft_leases.soften(state.now):
            state.pool.pins.soften(lease.id, PinKind.LEASE)
        if (when := state.send.soft_leases.next_end()) is not None:
            self._arm(when)

    def is_claimed(self, lease: Lease) -> bool:
        """Returns whether someone reads the lease's blocks, is about to, or waits for parts of them."""
        if not lease.pushed:
            return bool(lease.accesses or lease.waiting)
        push = self._state.send.pushes.find(lease.transfer_id)
        return push is None or push.claimed

    def soft_in_s(self, lease: Lease) -> float | None:
        """Returns the seconds until a live lease is soft: 0 when it is, None while it is claimed."""
        return None if self.is_claimed(lease) else max(lease.firm_until - self._state.now, 0.0)

    def _keep(self, lease: Lease, for_s: float) -> None:
        """Makes a lease firm for `for_s` from now, up to its cap. It never shortens the firm time."""
        state = self._state
        lease.firm_until = max(lease.firm_until, min(state.now + for_s, lease.cap))
        if self.is_claimed(lease):
            return
        if state.send.soft_leases.firm(lease):
            state.pool.pins.harden(lease.id, PinKind.LEASE)
        if lease.firm_until <= state.now:
            self.due()
        else:
            self._arm(lease.firm_until)

    def _take_out(self, lease: Lease) -> bool:
        """Removes a lease from the table and returns whether it was soft."""
        soft_leases = self._state.send.soft_leases
        was_soft = soft_leases.take_out(lease)
        if not soft_leases.firm_until:
            self._state.timers.clear(Timer.SOFTEN, "")
        return was_soft

    def _arm(self, when: float) -> None:
        """Sets the timer for a lease that becomes soft at this time, unless it is set for an earlier one."""
        timers = self._state.timers
        armed = timers.when(Timer.SOFTEN, "")
        if armed is None or when < armed:
            timers.set(Timer.SOFTEN, "", when)
