"""Ids of leases that callers mint. An engine announces a lease by its grant before its lead knows the lease."""

from kvgrpc.core.events import FinishedBlocks
from kvgrpc.core.state import NodeState
from kvgrpc.core.values.owners import ENGINE, EVERYONE, Thing, ThingKind, Verb, may
from kvgrpc.errors import AlreadyExists, PermissionDenied, Reason, invalid

LEASE_ID_BYTES_MAX = 64


def may_mint(state: NodeState, event: FinishedBlocks) -> bool:
    """Returns whether the caller may choose lease ids. Where an engine is attached, only the engine may."""
    return may(event.call.principal, Verb.MINT, Thing(ThingKind.LEASE, ENGINE if state.life.attached else EVERYONE))


def check_lease_id(state: NodeState, event: FinishedBlocks) -> None:
    """Raises PermissionDenied (NOT_OWNER) for a lease id that the caller may not mint, InvalidRequest (INVALID_FIELD)
    for one that is too long, and AlreadyExists (TRANSFER_EXISTS) for one that was used before.
    """
    lease_id = event.lease_id
    if lease_id and not may_mint(state, event):
        raise PermissionDenied(Reason.NOT_OWNER, "the attached engine alone mints lease ids: leave it out")
    if len(lease_id) > LEASE_ID_BYTES_MAX:
        raise invalid("for_readers.lease_id", f"has at most {LEASE_ID_BYTES_MAX} characters")
    if lease_id and (state.send.leases.known(lease_id) or lease_id in state.tombstones.leases):
        raise AlreadyExists(Reason.TRANSFER_EXISTS, f"lease id {lease_id} was used already: mint a new one")
