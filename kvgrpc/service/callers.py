"""Callers: the principal of an RPC."""

import secrets
from collections.abc import Iterable
from contextvars import ContextVar

from kvgrpc.core.values.owners import ANONYMOUS, ENGINE
from kvgrpc.errors import PermissionDenied, Reason
from kvgrpc.service.places import CONNECTION

TICKET = "kvgrpc-ticket"
"""Metadata key by which a caller proves that it speaks for the attached engine. The value is the ticket of the engine's
session, in hex digits.
"""
PRINCIPAL: ContextVar[str] = ContextVar("principal", default=ANONYMOUS)
"""Principal of the call that is served."""

Metadata = Iterable[tuple[str, str | bytes]]
METADATA: ContextVar[Metadata] = ContextVar("metadata", default=())
"""Metadata of the call that is served. gRPC makes it anew each time that it is asked for."""


def check_ticket(shown: str, ticket: bytes) -> None:
    """Raises PermissionDenied (NOT_OWNER) for a ticket that is not the attached engine's, which is `ticket`; empty if
    none is attached.
    """
    if not ticket or not secrets.compare_digest(shown.lower().encode(), ticket.hex().encode()):
        raise PermissionDenied(Reason.NOT_OWNER, "this ticket belongs to no engine that is attached here")


def payer() -> str:
    """Returns the payer of what the served call keeps: its principal, or its connection for callers without
    credentials. A call without a connection is the engine's.
    """
    principal = PRINCIPAL.get()
    return principal if principal != ANONYMOUS else CONNECTION.get() or ENGINE
