"""Admission: whether a lead takes new work, and why not, for GetStatus and for health."""

from kvgrpc.service.lead import Lead
from kvgrpc.v1 import handshake_pb2

WEDGED_S = 30.0
"""Time without progress of a mover that has postings in flight, in seconds, after which it counts as stuck."""

TAKES_WORK = (handshake_pb2.ADMISSION_OPEN, handshake_pb2.ADMISSION_OVERLOADED)
"""States in which callers may come: if something is full, they are told when to come back."""
BROKEN = (handshake_pb2.ADMISSION_NO_ENGINE, handshake_pb2.ADMISSION_WEDGED)
"""States in which no call is of use. A server that drains, or has too much in quarantine, still serves its old work."""


def admission(lead: Lead) -> tuple["handshake_pb2.Admission.ValueType", str]:
    """Returns the admission state and its reason as text; the reason is empty when admission is open."""
    state = lead.runner.node.state
    if state.life.description is None:
        return handshake_pb2.ADMISSION_NO_ENGINE, state.life.defect or "no engine is attached"
    if (age_s := lead.progress_age_s()) > WEDGED_S:  # before a drain, which does not end then
        return handshake_pb2.ADMISSION_WEDGED, f"no data path made progress for {age_s:.0f} s"
    if state.life.draining:
        why = "the server is shutting down" if state.life.stopping else "the server was told to take no new work"
        return handshake_pb2.ADMISSION_DRAINING, why
    anew = f"the memory is being registered again: {state.pool.rekeying}" if state.pool.rekeying else ""
    if full := anew or state.pool.quarantine_full():
        return handshake_pb2.ADMISSION_QUARANTINE_FULL, full
    if state.transfers.live >= state.limits.transfers or len(state.send.leases) >= state.limits.leases:
        return handshake_pb2.ADMISSION_OVERLOADED, "transfers or leases are at their limit"
    return handshake_pb2.ADMISSION_OPEN, ""
