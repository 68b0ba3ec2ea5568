"""Callers: the principal of an RPC."""

import secrets
from collections.abc import Iterable
from contextvars import ContextVar

from kvgrpc.core.values.owners import ANONYMOUS, ENGINE, SCHEDULER
from kvgrpc.errors import PermissionDenied, Reason
from kvgrpc.service.places import CONNECTION

TICKET = "kvgrpc-ticket"
"""Metadata key by which a caller proves that it speaks for the attached engine. The value is the ticket of the engine's
session, in hex digits.
"""
PRINCIPAL: ContextVar[str] = ContextVar("principal", default=ANONYMOUS)
"""Principal of the call that is served."""

Metadata = Iterable[tuple[str, str | bytes]]


def ticket_of(metadata: Metadata | None) -> str:
    """Returns the ticket that a call shows; empty if it shows none."""
    for key, value in metadata or ():
        if key == TICKET and isinstance(value, str):
            return value
    return ""


def principal_of(metadata: Metadata | None, ticket: bytes) -> str:
    """Returns the principal of a call. `ticket`: the attached engine's; empty if none is attached.

    Raises PermissionDenied (NOT_OWNER) for a ticket that is not the attached engine's.
    """
    shown = ticket_of(metadata)
    if not shown:
        return ANONYMOUS
    if not ticket or not secrets.compare_digest(shown.lower().encode(), ticket.hex().encode()):
        raise PermissionDenied(Reason.NOT_OWNER, "this ticket belongs to no engine that is attached here")
    return SCHEDULER


def payer() -> str:
    """Returns the payer of what the served call keeps: its principal, or its connection for callers without
    credentials. A call without a connection is the engine's.
    """
    principal = PRINCIPAL.get()
    return principal if principal != ANONYMOUS else CONNECTION.get() or ENGINE
