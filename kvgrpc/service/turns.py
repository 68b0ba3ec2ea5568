"""Turns: the order in which calls begin while more come than this server can serve.

gRPC hands calls over one after the other, whoever made them. A call that has not been handed over waits behind those of
all other callers. So while calls come close together, they are handed over first, and wait here, each in the line of
its caller; they begin while gRPC has no more. Under load all streams of a caller with too many calls wait here, and its
own library holds the next ones back. The call of another caller is handed over at once, and has the next turn.

A caller is a principal, or a connection where callers have none. Calls of the engine's session and of peers' streams
take no turns.
"""

import asyncio
import time
from contextvars import Context

from kvgrpc.core.tables.fair_line import FairLine
from kvgrpc.errors import Exhausted, Reason

CLOSE_S = 0.002
"""Time between two calls below which they come close together, in seconds. Other calls begin at once."""
QUIET_ROUNDS = 6
"""Number of rounds of the event loop in which gRPC hands over a call that it has."""
QUIET_S = 0.000_1
"""Minimum time of these rounds in seconds: threads of gRPC take part in them."""
ROUNDS_MAX = 64
"""Number of rounds after which calls begin although others still come."""
BEGIN_S = 0.000_5
"""Time in which calls begin, one in each round, before gRPC is given time again, in seconds."""
AT_ONCE = 2
"""Number of calls that begin without waiting between two turns, of callers that have none in line."""
LATE_S = 0.5
"""Time after which the newest call of a caller goes before its oldest, in seconds."""
WAIT_S = 1.0
"""Time after which a call may be refused, in seconds. With each turn, its caller's oldest call is, if it is so late."""
COST_BYTES = 16_384
"""Size of a request that costs as much as a call, in bytes."""
BYTES_MAX = 64 << 20
"""Maximum size of all requests in line, in bytes. A caller has as much as it leaves for the others."""


class Turns:
    """The line of one server, on its event loop."""

    def __init__(self) -> None:
        self._line: FairLine[asyncio.Future[bool]] = FairLine()
        self._bytes: dict[str, int] = {}
        """Bytes of requests in line, by caller."""
        self._bytes_of_all = 0
        self._came_at = 0.0
        self.busy = False
        """True while calls come close together or wait: then a call must `take` its turn. Read-only outside."""
        self._rounds = 0
        """Number of rounds since the last call was handed over."""
        self._rounds_of_all = 0
        """Number of rounds since calls began the last time."""
        self._begin_until = 0.0
        self._at_once = 0

    def handed_over(self) -> None:
        """Notes that gRPC has handed a call over. It may have more."""
        now = time.perf_counter()
        close, self._came_at, self._rounds = now - self._came_at < CLOSE_S, now, 0
        if close and not self.busy:
            self.busy, self._rounds_of_all, self._at_once = True, 0, 0
            asyncio.get_running_loop().call_soon(self._look, context=Context())

    async def take(self, caller: str, nbytes: int = 0, *, patient: bool = False) -> None:
        """Returns when it is a caller's turn. `nbytes` of a request are kept meanwhile.

        Raises Exhausted (LIMIT_EXCEEDED) for a caller that has too much in line, and after `WAIT_S` unless it is
        `patient`.
        """
        if not self._line.count_of(caller) and self._at_once < AT_ONCE:
            self._at_once += 1
            return
        held = self._bytes.get(caller, 0) + nbytes
        if held > BYTES_MAX - self._bytes_of_all:
            self._refuse(f"{held} bytes of requests of this caller", BYTES_MAX)
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._keep(caller, nbytes)
        now = time.perf_counter()
        self._line.join(caller, turn, 1.0 + nbytes / COST_BYTES, float("inf") if patient else now)
        try:
            has_turn = await turn
        finally:
            self._line.leave(caller, turn)
            self._keep(caller, -nbytes)
        if not has_turn:
            self._refuse(f"{self._line.count_of(caller)} calls of this caller", 0)

    def _refuse(self, what: str, limit: int) -> None:
        message = f"this server has more calls than it can serve, and {what} wait: come back later"
        metadata = {"limit": str(limit)} if limit else {}
        raise Exhausted(Reason.LIMIT_EXCEEDED, message, retry_delay_s=WAIT_S, metadata=metadata)

    def _keep(self, caller: str, nbytes: int) -> None:
        self._bytes_of_all += nbytes
        left = self._bytes.get(caller, 0) + nbytes
        if left:
            self._bytes[caller] = left
        else:
            self._bytes.pop(caller, None)

    def _look(self) -> None:
        """Gives a turn if gRPC has no more calls. Looks again in the next round, unless nobody waits."""
        self._rounds += 1
        self._rounds_of_all += 1
        now = time.perf_counter()
        quiet = self._rounds >= QUIET_ROUNDS and now >= self._came_at + QUIET_S
        if quiet or now < self._begin_until or self._rounds_of_all >= ROUNDS_MAX:
            if not self._line:
                self.busy = False
                return
            if now >= self._begin_until:
                self._begin_until, self._rounds, self._rounds_of_all = now + BEGIN_S, 0, 0
            self._at_once = 0
            self._give(now)
        asyncio.get_running_loop().call_soon(self._look, context=Context())

    def _give(self, now: float) -> None:
        caller, turn = self._line.next(now - LATE_S)
        _wake(turn, has_turn=True)
        late = self._line.take_late(caller, now - WAIT_S)
        if late is not None:
            _wake(late, has_turn=False)


def _wake(turn: "asyncio.Future[bool]", *, has_turn: bool) -> None:
    if not turn.done():
        turn.set_result(has_turn)
