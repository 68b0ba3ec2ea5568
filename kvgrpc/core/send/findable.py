"""Leases that can be found by what their blocks hold, and the search for them.

The engine, or the caller, that hands over vouches for the content, as for every hand-over. A find tells and changes
nothing of a lease: whoever finds one opens it as everybody does, and everything is checked there.
"""

from typing import NamedTuple

from kvgrpc.core.events import FinishedBlocks
from kvgrpc.core.send.leases import read_grant
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.offer_index import first_unit
from kvgrpc.core.values.content import DIGEST_BYTES, UNIT_TOKENS, ContentId
from kvgrpc.core.values.owners import tenant_of
from kvgrpc.errors import InvalidRequest, Reason, invalid, too_many

FOUND_MAX = 4
"""Maximum number of leases that one search returns."""
FIND_UNITS_MAX = 65_536
"""Maximum number of units of a content that is searched for: those of about a million tokens."""


class FoundOffer(NamedTuple):
    """A lease that a search found."""

    lease: Lease
    tokens: int
    """Number of leading tokens that the lease and the searched content have in common, and that can be pulled alone."""
    token: bytes
    """READ grant on the lease."""


def check_findable(state: NodeState, event: FinishedBlocks, content: ContentId) -> None:
    """Raises InvalidRequest (CONTENT_REQUIRED) for a content that has no beginnings, and (INVALID_FIELD) for a
    hand-over that is not for every consumer that comes; Exhausted (LIMIT_EXCEEDED) if the index has no room.
    """
    where = "for_readers." if event.transfer else ""
    check_chain(content)
    if event.bound_to:
        raise invalid(f"{where}bound_to", "is for one consumer: leave it out of what others find")
    if event.takes_registrations:
        raise invalid(f"{where}takes_registrations", "is for one destination: leave it out of what others find")
    units = len(content.digests) // DIGEST_BYTES - first_unit(state.life.engine.pool.groups, content) + 1
    state.send.offers.check_room(event.tenant or tenant_of(event.call.principal), units)


def check_chain(content: ContentId | None) -> ContentId:
    """Returns a content that has beginnings. Raises InvalidRequest (CONTENT_REQUIRED) for another."""
    if content is None or content.opaque:
        raise InvalidRequest(Reason.CONTENT_REQUIRED, "only a digest chain, or tokens, can be found")
    return content


def find_offers(state: NodeState, wanted: ContentId | None, tenant: str, key: bytes) -> tuple[FoundOffer, ...]:
    """Returns the leases of a tenant with the longest beginning of a content, the newest first. Their grants have the
    transfer key `key`, which the caller makes up.

    Raises InvalidRequest (CONTENT_REQUIRED), OutOfRange (LIMIT_EXCEEDED) for a content that is too long, and
    PreconditionFailed (DRAINING) while no new work is accepted.
    """
    state.pool.check_taking()
    content = check_chain(wanted)
    count = len(content.digests) // DIGEST_BYTES
    if count > FIND_UNITS_MAX:
        text = f"the content has {count} units of {UNIT_TOKENS} tokens; a search takes at most {FIND_UNITS_MAX}"
        raise too_many(text, FIND_UNITS_MAX, "content", "units")
    units, lease_ids = state.send.offers.find(tenant, content, FOUND_MAX)
    found = [state.send.leases.get(lease_id) for lease_id in lease_ids]
    tokens = min(units * UNIT_TOKENS, content.tokens)
    return tuple([FoundOffer(lease, tokens, read_grant(state, lease, key)) for lease in found])
