"""Places for calls that are open at this server at once: limited for each connection, and for all together.

A connection is named by gRPC's text for its other end. The first places of a connection are its own, however many
others have: a flood from elsewhere does not stop a peer or the renewal of a lease. Of the other places a connection has
at most as many as it leaves free, so that several greedy connections never take the last ones.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from kvgrpc import open_files
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Exhausted, Reason

_log = logging.getLogger(__name__)

OWN = 4
"""Number of places that even a full server has for each connection: a peer needs two streams to live."""

CONNECTION: ContextVar[str] = ContextVar("connection", default="")
"""Connection of the call that is served."""
STANDING_BYTES = 16_384
"""Bytes of a standing call's request for each place it takes."""
WAITS_SHARE = 0.5
"""Share of the standing places that calls may move to: the rest is left for streams."""
Method = Callable[[Any, Any], Awaitable[object]]


class Places:
    """Places of one kind. `each`: limit of one connection. `of_tenant`: limit of one tenant; 0 for none. `most`: limit
    of all together, beside the first `own` of each connection; nobody else has more of it than is left. `what` names
    the takers, as text.
    """

    def __init__(
        self, what: str, each: int, most: int, retry_delay_s: float, own: int = OWN, of_tenant: int = 0
    ) -> None:
        self._what, self._each, self._most, self._own, self._of_tenant = what, each, most, own, of_tenant
        self._retry_delay_s = retry_delay_s
        self._held: dict[str, int] = {}
        self._by_tenant: dict[str, int] = {}
        self._taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Holds a place for the served call, and counts it as its tenant's. Raises the same errors as `take`."""
        connection, call = CONNECTION.get(), _PLACE.get()
        tenant = call.tenant if call is not None else ""
        if tenant:
            self.take_of_tenant(tenant, 1)
        try:
            self.take(connection)
            try:
                yield
            finally:
                self.give_back(connection)
        finally:
            if tenant:
                self.give_back_of_tenant(tenant, 1)

    def take(self, connection: str, count: int = 1, share: float = 1.0) -> None:
        """Takes places, up to `share` of the limits. Raises Exhausted (LIMIT_EXCEEDED); then no place is taken."""
        held = self._held.get(connection, 0)
        if held + count > self._each * share:
            self._refuse(f"this connection has {held} {self._what}, which is its limit: let some end first", self._each)
        if held + count > self._most * share - self._taken and held + count > self._own:
            self._refuse(
                f"this server has {self._taken} {self._what}; its limit is {self._most}, and this connection, with "
                f"{held}, may have as many as it leaves free: come back later",
                self._most,
            )
        self._held[connection] = held + count
        self._taken += count

    def give_back(self, connection: str, count: int = 1) -> None:
        self._taken -= count
        left = self._held[connection] - count
        if left:
            self._held[connection] = left
        else:
            del self._held[connection]

    def take_of_tenant(self, tenant: str, count: int) -> None:
        """Counts places that were taken as those of a tenant. Raises as `take`; then they are not counted."""
        held = self._by_tenant.get(tenant, 0)
        if self._of_tenant and held + count > self._of_tenant:
            self._refuse(
                f"this tenant has {held} {self._what}, which is its share: let some end first", self._of_tenant
            )
        self._by_tenant[tenant] = held + count

    def give_back_of_tenant(self, tenant: str, count: int) -> None:
        """Counts places as those of a tenant no more."""
        left = self._by_tenant[tenant] - count
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]

    def _refuse(self, message: str, limit: int) -> None:
        metadata = {"limit": str(limit)}
        raise Exhausted(Reason.LIMIT_EXCEEDED, message, retry_delay_s=self._retry_delay_s, metadata=metadata)


class CallPlace:
    """The place of the call that is served, which may move to one of `standing`."""

    def __init__(self, places: Places, connection: str, standing: Places | None) -> None:
        """Raises the same errors as `Places.take`."""
        places.take(connection)
        self._places, self._connection, self._standing = places, connection, standing
        self._count, self.tenant = 1, ""
        _PLACE.set(self)

    def stand(self, nbytes: int) -> bool:
        """Moves to standing places, if there are some for a request of `nbytes`. Returns whether there are."""
        if self._standing is None:
            return True
        count = max(1, -(-nbytes // STANDING_BYTES))
        try:
            self._standing.take(self._connection, count, WAITS_SHARE)
            try:
                if self.tenant:
                    self._standing.take_of_tenant(self.tenant, count)
            except Exhausted:
                self._standing.give_back(self._connection, count)
                raise
        except Exhausted:
            return False
        self.give_back()
        self._places, self._standing, self._count = self._standing, None, count
        return True

    def belong(self, tenant: str) -> None:
        self._places.take_of_tenant(tenant, self._count)
        self.tenant = tenant

    def give_back(self) -> None:
        self._places.give_back(self._connection, self._count)
        if self.tenant:
            self._places.give_back_of_tenant(self.tenant, self._count)


_PLACE: ContextVar[CallPlace | None] = ContextVar("place", default=None)


def belong(tenant: str) -> None:
    """Counts the place of the served call as the tenant's. Raises Exhausted (LIMIT_EXCEEDED) when the tenant has its
    share. Called once for a call, when its caller is known.
    """
    place = _PLACE.get()
    if place is not None:
        place.belong(tenant)


def may_stand(nbytes: int) -> bool:
    """Returns whether the served call may last as long as its caller likes, although its request of `nbytes` is kept as
    long. If so, the call has moved from its place to standing places.
    """
    place = _PLACE.get()
    return place is None or place.stand(nbytes)


def within_open_files(limits: Limits) -> Limits:
    """Returns limits whose connections leave half of the open files to all else: gRPC knows no reserve."""
    most = open_files.unreserved() // 2
    if limits.connections <= most:
        return limits
    _log.warning(
        "limits.connections is %d, and %d here: this process may have %d open files",
        limits.connections,
        most,
        open_files.limit(),
    )
    return replace(limits, connections=most)
