"""Firm, claimed, soft: whether a lease may be taken back.

A lease is firm for its firm time after its hand-over, and for as long after its last claimer has gone; a renewal by
anybody but the engine makes it firm for the time renewed. It is claimed while an access on it is open or waits to be,
and a push while it has a destination, or while our own postings read it. A push that still gets parts is not soft: the
engine is computing them. All other leases are soft. Which of them yield to older requests says `weak_claims`.
"""

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer


class Firmness:
    """Of all live leases."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def handed_over(self, lease: Lease) -> None:
        """Blocks were handed over under it: it is firm from now on."""
        self._keep_firm(lease)

    def renewed(self, lease: Lease, ttl_s: float) -> None:
        """Somebody else than the engine cares for it: it is firm for that time."""
        self._keep(lease, ttl_s)

    def claimed(self, lease: Lease) -> None:
        """It has a claimer."""
        if self._take_out(lease):
            self._state.pins.harden(lease.id, PinKind.LEASE)

    def unclaimed(self, lease: Lease) -> None:
        """A claimer has gone: if it was the last one of a live lease, the lease is firm anew."""
        if lease.live and not self.is_claimed(lease):
            self._keep_firm(lease)

    def ended(self, lease: Lease) -> None:
        """It is over; its pin goes with it."""
        self._take_out(lease)

    def due(self, _: str = "") -> None:
        """Leases whose firm time is over by now are soft."""
        state = self._state
        for lease in state.soft_leases.soften(state.now):
            state.pins.soften(lease.id, PinKind.LEASE)
        self._arm()

    def is_claimed(self, lease: Lease) -> bool:
        """Whether someone reads its blocks, is about to, or is still being computed for."""
        if not lease.pushed:
            return lease.read
        push = self._state.pushes.find(lease.transfer_id)
        return push is None or push.claimed

    def soft_in_s(self, lease: Lease) -> float | None:
        """In how long a live lease is soft, 0 for one that is; None while it is claimed."""
        return None if self.is_claimed(lease) else max(lease.firm_until - self._state.now, 0.0)

    def _keep_firm(self, lease: Lease) -> None:
        """Its firm time begins."""
        lease.kept_until = self._state.now + lease.firm_ttl_s
        self._keep(lease, lease.firm_ttl_s)

    def _keep(self, lease: Lease, for_s: float) -> None:
        """It is firm for that time, or longer if it was so already."""
        state = self._state
        lease.firm_until = max(lease.firm_until, min(state.now + for_s, lease.cap))
        if self.is_claimed(lease):
            return
        if state.soft_leases.firm(lease):
            state.pins.harden(lease.id, PinKind.LEASE)
        if lease.firm_until <= state.now:
            self.due()
        else:
            self._arm()

    def _take_out(self, lease: Lease) -> bool:
        """Whether it was soft."""
        soft_leases = self._state.soft_leases
        was_soft = soft_leases.take_out(lease)
        if not soft_leases.firm_count:
            self._state.timers.clear(Timer.SOFTEN, "")
        return was_soft

    def _arm(self) -> None:
        """Sees to it that the next lease becomes soft in time."""
        state = self._state
        when, armed = state.soft_leases.next_end(), state.timers.when(Timer.SOFTEN, "")
        if when is not None and (armed is None or when < armed):
            state.timers.set(Timer.SOFTEN, "", when)
