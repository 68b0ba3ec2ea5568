"""Places for what is open at this server at once: so many for each connection, and so many in all.

A connection is named by gRPC's text for its other end. Those that a connection has first are its own, however many
others have: a flood from elsewhere keeps no peer and no lease from living on.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kvgrpc.errors import Exhausted, KVGrpcError, Reason
from kvgrpc.service import status
from kvgrpc.v1 import common_pb2

OWN = 4
"""Places of a connection that also a full server has for it: a peer needs two streams to live."""

CONNECTION: ContextVar[str] = ContextVar("connection", default="")
"""That of the call that is served."""
STANDING_BYTES = 16_384
"""Of the request of a call that stands, for each of its places."""
WAITS_SHARE = 0.5
"""Of the places of what stands that calls may move to: streams always find some."""
Method = Callable[[Any, Any], Awaitable[object]]


class Places:
    """`each`: places of one connection; `most`: of all together, beside the first `own` of each connection. `what`
    names their takers, as text.
    """

    def __init__(self, what: str, each: int, most: int, retry_delay_s: float, own: int = OWN) -> None:
        self._what, self._each, self._most, self._own = what, each, most, own
        self._retry_delay_s = retry_delay_s
        self._held: dict[str, int] = {}
        self._taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A place for the call that is served, while it is inside. Raises as `take`."""
        connection = CONNECTION.get()
        self.take(connection)
        try:
            yield
        finally:
            self.give_back(connection)

    def take(self, connection: str, count: int = 1, share: float = 1.0) -> None:
        """So many, of that share of all. Raises Exhausted (LIMIT_EXCEEDED); then no place is taken."""
        held = self._held.get(connection, 0)
        if held + count > self._each * share:
            self._refuse(f"this connection has {held} {self._what}, which is its limit: let some end first", self._each)
        if self._taken + count > self._most * share and held + count > self._own:
            self._refuse(
                f"this server has {self._taken} {self._what}; its limit is {self._most}: come back later", self._most
            )
        self._held[connection] = held + count
        self._taken += count

    def give_back(self, connection: str, count: int = 1) -> None:
        """So many that were taken."""
        self._taken -= count
        left = self._held[connection] - count
        if left:
            self._held[connection] = left
        else:
            del self._held[connection]

    def _refuse(self, message: str, limit: int) -> None:
        metadata = {"limit": str(limit)}
        raise Exhausted(Reason.LIMIT_EXCEEDED, message, retry_delay_s=self._retry_delay_s, metadata=metadata)

    def bounding(
        self, method: Method, who: Callable[[], common_pb2.ResponseHeader], standing: "Places | None" = None
    ) -> Method:
        """A method of a service, which has a place while it is served, and may move to one of `standing`; else the lead
        in `who` refuses it. How it ends leads back neither to the request nor to the context, which keeps it.
        """

        async def call(request: Any, context: Any) -> object:
            connection = context.peer()
            CONNECTION.set(connection)
            try:
                place = _Place(self, connection, standing)
                _PLACE.set(place)
                try:
                    return await method(request, context)
                finally:
                    place.give_back()
            except KVGrpcError as error:
                await status.abort(context, error, who())
            except BaseException as ended:
                ended.__traceback__ = None
                raise
            finally:
                del request, context

        return call


class _Place:
    """The place of one call that is served. Raises as `Places.take`."""

    def __init__(self, places: Places, connection: str, standing: Places | None) -> None:
        places.take(connection)
        self._places, self._connection, self._standing = places, connection, standing
        self._count = 1

    def stand(self, nbytes: int) -> bool:
        if self._standing is None:
            return True
        count = max(1, -(-nbytes // STANDING_BYTES))
        try:
            self._standing.take(self._connection, count, WAITS_SHARE)
        except Exhausted:
            return False
        self.give_back()
        self._places, self._standing, self._count = self._standing, None, count
        return True

    def give_back(self) -> None:
        self._places.give_back(self._connection, self._count)


_PLACE: ContextVar[_Place | None] = ContextVar("place", default=None)


def may_stand(nbytes: int) -> bool:
    """Whether the call that is served may last as long as its caller likes from here on, though its request, which is
    kept as long, has so many bytes. It has then left its place to others, for those of calls that stand.
    """
    place = _PLACE.get()
    return place is None or place.stand(nbytes)
