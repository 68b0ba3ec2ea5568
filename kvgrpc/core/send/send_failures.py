"""Reasons why a SEND did not succeed."""

from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.transfers import Failure, Side
from kvgrpc.errors import NextStep, Reason

WANTED_ENDS = frozenset({Reason.CANCELLED, Reason.LEASE_RELEASED, Reason.LEASE_VOIDED})
"""Reasons of an early lease end that is no failure."""


def send_failure(lease: Lease) -> Failure | None:
    """Returns why the SEND transfer of an ended lease did not succeed, or None when it did."""
    if lease.state is LeaseState.DONE and lease.received:
        return None
    messages = {
        LeaseState.DONE: "every consumer dropped it",
        LeaseState.EXPIRED: f"no consumer was done within the lease ({lease.ttl_s:g} s, {lease.renewals} renewals)",
        LeaseState.RELEASED: "the lease was released",
        LeaseState.VOIDED: "the engine took its blocks back",
        LeaseState.RECLAIMED: "its blocks were needed while nobody had claimed it",
    }
    if lease.yielded:
        messages[LeaseState.RECLAIMED] = "an older request needed its blocks, and its readers had none of their own yet"
    phase = "rendezvous" if lease.pushed else "readers"
    if lease.state is LeaseState.DONE and lease.cancelled_by:
        engine_id, why = next(reversed(lease.cancelled_by.items()))
        return consumer_cancelled(engine_id, why, phase)
    reason = Reason.CANCELLED if lease.state is LeaseState.DONE else lease.end_reason
    if lease.pushed and lease.state is LeaseState.EXPIRED:
        reason = Reason.REGISTRATION_TIMEOUT
    message = messages[lease.state] + (f"; the last one that failed: {lease.trouble}" if lease.trouble else "")
    return Failure(reason, message, phase, Side.SOURCE, next=NextStep.RECOMPUTE)


def consumer_cancelled(engine_id: str, why: str, phase: str) -> Failure:
    """Returns the failure of a SEND whose last consumer was cancelled."""
    message = f"engine {engine_id} cancelled it: {why}"
    return Failure(Reason.CANCELLED, message, phase, Side.DESTINATION, next=NextStep.RECOMPUTE)
