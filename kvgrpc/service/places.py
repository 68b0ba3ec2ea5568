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

    def take(self, connection: str) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED); then no place is taken."""
        held = self._held.get(connection, 0)
        if held >= self._each:
            self._refuse(f"this connection has {held} {self._what}, which is its limit: let some end first", self._each)
        if self._taken >= self._most and held >= self._own:
            self._refuse(
                f"this server has {self._taken} {self._what}; its limit is {self._most}: come back later", self._most
            )
        self._held[connection] = held + 1
        self._taken += 1

    def give_back(self, connection: str) -> None:
        """One that was taken."""
        self._taken -= 1
        left = self._held[connection] - 1
        if left:
            self._held[connection] = left
        else:
            del self._held[connection]

    def _refuse(self, message: str, limit: int) -> None:
        metadata = {"limit": str(limit)}
        raise Exhausted(Reason.LIMIT_EXCEEDED, message, retry_delay_s=self._retry_delay_s, metadata=metadata)

    def bounding(self, method: Method, who: Callable[[], common_pb2.ResponseHeader]) -> Method:
        """A method of a service, which has a place while it is served; else the lead in `who` refuses it. How it
        ends leads back neither to the request nor to the context, which keeps it.
        """

        async def call(request: Any, context: Any) -> object:
            connection = context.peer()
            CONNECTION.set(connection)
            try:
                self.take(connection)
                try:
                    return await method(request, context)
                finally:
                    self.give_back(connection)
            except KVGrpcError as error:
                await status.abort(context, error, who())
            except BaseException as ended:
                ended.__traceback__ = None
                raise
            finally:
                del request, context

        return call
