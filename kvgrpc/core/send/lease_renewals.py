"""RenewLeases: extends leases of this engine, and pushes for which no part has come yet.

A lease is named by its id, a grant or its transfer key. A destination that waits for blocks has only the key. The key
may name a lease, or a push that waits for its first part. The source's engine knows whether that part will come.
"""

from collections.abc import Callable

from kvgrpc.core.actions import Renewed
from kvgrpc.core.events import LeaseRef, RenewLeases
from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.send.weak_claims import WeakClaims
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Direction
from kvgrpc.core.values.limits import check_renewals, granted_ttl
from kvgrpc.core.values.owners import ENGINE_SIDE, within
from kvgrpc.errors import KVGrpcError, NotFound, Reason

Row = tuple[float, Reason | None, LeaseState | None]
"""Remaining time in seconds, the reason why the row was not renewed, and the lease's state."""


class LeaseRenewals:
    """Renewals of this engine's leases."""

    def __init__(
        self, state: NodeState, firmness: Firmness, weak_claims: WeakClaims, find: Callable[[LeaseRef, str], Lease]
    ) -> None:
        """Takes `find`, which raises the error for an invalid lease id or grant."""
        self._state = state
        self._firmness = firmness
        self._weak_claims = weak_claims
        self._find = find

    def renew(self, event: RenewLeases) -> None:
        """Handles RenewLeases with one row for each requested lease. An ended lease is a row, not an error."""
        if event.source is not None:
            return
        state = self._state
        check_renewals(len(event.leases), state.limits)
        ttl_s = None if event.ttl_s is None else granted_ttl(event.ttl_s, state.limits)
        if not event.validate_only:
            self._weak_claims.reading(event.reading)
        rows = tuple(self._renew_one(ref, ttl_s, event) for ref in event.leases)
        state.reply(event.call.id, Renewed(rows))

    def _renew_one(self, ref: LeaseRef, ttl_s: float | None, event: RenewLeases) -> Row:
        caller = event.call.principal
        if ref.key and (left_s := self._await_longer(ref.key, event)) is not None:
            return left_s, None, None
        try:
            lease = self._under(ref.key, caller) if ref.key else self._find(ref, caller)
        except KVGrpcError as error:
            return 0.0, error.reason, None
        if not lease.live:
            return 0.0, lease.end_reason, lease.state
        if not event.validate_only:
            lease.renew(self._state.now, ttl_s)
            self._state.send.leases.keep_others(lease)
            if not event.for_access and caller not in ENGINE_SIDE:
                self._firmness.renewed(lease, lease.last_ttl_s)
        return lease.deadline - self._state.now, None, lease.state

    def _await_longer(self, key: bytes, event: RenewLeases) -> float | None:
        """Returns the seconds left to wait for parts under a key. Returns None when no push without parts has this key.
        The wait restarts when the engine will hand parts over or say that there are none.
        """
        state = self._state
        push = state.send.pushes.with_key(key)
        if push is None or push.parts is not None:
            return None
        if not within(event.call.principal, state.transfers.get(push.transfer_id).tenant):
            return None
        due = state.timers.when(Timer.RENDEZVOUS, push.transfer_id)
        assert due is not None, "a push without parts waits for some"
        if (push.expected or push.part_epoch) and not event.validate_only:
            due = max(due, min(state.now + state.limits.registration_timeout_s, push.cap))
            state.timers.set(Timer.RENDEZVOUS, push.transfer_id, due)
        return due - state.now

    def _under(self, key: bytes, caller: str) -> Lease:
        """Returns the lease that is handed over or pushed under a key. Raises NotFound (LEASE_NOT_FOUND)."""
        state = self._state
        known = [found for found in state.transfers.with_key(key) if within(caller, found.tenant)]
        sends = [found for found in known if found.direction is Direction.SEND]
        leases = [lease for found in sends if (lease := state.send.leases.find(found.lease_id)) is not None]
        if leases:
            return next((lease for lease in leases if lease.live), leases[-1])
        raise NotFound(Reason.LEASE_NOT_FOUND, "nothing is handed over under this transfer key")
