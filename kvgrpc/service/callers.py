"""Who calls: the principal of a call by RPC."""

import secrets
from collections.abc import Iterable
from contextvars import ContextVar

from kvgrpc.core.values.owners import ANONYMOUS, ENGINE, SCHEDULER
from kvgrpc.errors import PermissionDenied, Reason
from kvgrpc.service.places import CONNECTION

TICKET = "kvgrpc-ticket"
"""Metadata by which a caller shows that it speaks for the attached engine: the ticket of the engine's session, in hex
digits.
"""
PRINCIPAL: ContextVar[str] = ContextVar("principal", default=ANONYMOUS)
"""That of the call that is served."""

Metadata = Iterable[tuple[str, str | bytes]]


def ticket_of(metadata: Metadata | None) -> str:
    """The ticket that a call shows; empty where it shows none."""
    for key, value in metadata or ():
        if key == TICKET and isinstance(value, str):
            return value
    return ""


def principal_of(metadata: Metadata | None, ticket: bytes) -> str:
    """The principal of a call. `ticket` is that of the attached engine; empty where none is attached.

    Raises PermissionDenied (NOT_OWNER) for a ticket of no engine that is attached here.
    """
    shown = ticket_of(metadata)
    if not shown:
        return ANONYMOUS
    if not ticket or not secrets.compare_digest(shown.lower().encode(), ticket.hex().encode()):
        raise PermissionDenied(Reason.NOT_OWNER, "this ticket belongs to no engine that is attached here")
    return SCHEDULER


def payer() -> str:
    """Whose share what the call that is served keeps is in: its principal's, or, of callers without credentials, its
    connection's. Without a connection the engine asks.
    """
    principal = PRINCIPAL.get()
    return principal if principal != ANONYMOUS else CONNECTION.get() or ENGINE
