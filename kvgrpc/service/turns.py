"""Turns: the order in which calls begin while more come than this server can serve.

gRPC hands calls over one after the other, whoever made them. A call that has not been handed over waits behind those of
all other callers. So a busy server has calls handed over first. They wait here, each in the line of its caller, and
begin while gRPC has no more. All streams of a caller with too many calls wait here then, and its own library holds the
next ones back. The call of another caller is handed over at once, and has the next turn.

A caller is a principal, or a connection where callers have none. Calls of the engine's session and of peers' streams
take no turns.
"""

import asyncio
import time
from contextvars import Context

from kvgrpc.core.tables.fair_line import FairLine
from kvgrpc.errors import Exhausted, Reason
from kvgrpc.service.backlog import Backlog

LOOK_S = 0.025
"""Interval at which gRPC is asked for its backlog while calls come, in seconds."""
BACKLOG_MAX = 8
"""Number of calls that gRPC has not handed over, above which the server is busy."""
STALLED_S = 0.02
"""Time in which gRPC hands over a call that it has, in seconds. A later one was given up by its caller."""
LISTEN_S = 0.1
"""Time after which calls begin although gRPC still has some, in seconds."""
BEGIN_S = 0.002
"""Time in which calls begin before gRPC's backlog is looked at again, in seconds."""
ROUNDS = 3
"""Rounds of the event loop for each call that begins: in the others, what the others wait for goes on."""
CROWD_S = 0.001
"""Time in which the calls of a stream's message join the line, in seconds."""
AT_ONCE = 4
"""Number of calls that begin without waiting between two looks at the backlog, of callers that have none in line."""
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
        self.busy = False
        """True while the server is busy: then a call must `take` its turn. Read-only outside."""
        self.backlogs: list[Backlog] = []
        self._look_at = 0.0
        self._awaited = 0
        """Number of calls that gRPC has and that are awaited before calls begin."""
        self._listens_since = 0.0
        self._came_at = 0.0
        self._begin_until = 0.0
        self._round = 0
        self._at_once = 0
        self._stalled: asyncio.TimerHandle | None = None

    def handed_over(self) -> None:
        """Notes that gRPC has handed a call over. It may have more."""
        now = self._came_at = time.perf_counter()
        if self.busy:
            self._awaited -= 1
            if self._awaited == 0:
                asyncio.get_running_loop().call_soon(self._look, context=Context())
        elif now >= self._look_at:
            self._look_at = now + LOOK_S
            if self._backlog() > BACKLOG_MAX:
                self.busy, self._listens_since = True, now
                self._look()

    def crowd(self) -> None:
        """Makes the server busy for the calls that one stream has brought."""
        if not self.busy:
            self.busy, self._listens_since, self._awaited = True, time.perf_counter(), 0
            asyncio.get_running_loop().call_later(CROWD_S, self._look, context=Context())

    def _backlog(self) -> int:
        return sum(backlog.count() for backlog in self.backlogs)

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
        """Waits until gRPC has no more calls, then lets calls begin."""
        now, self._at_once = time.perf_counter(), 0
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._awaited = self._backlog()
        if self._awaited and now < self._listens_since + LISTEN_S:
            loop = asyncio.get_running_loop()
            self._stalled = loop.call_later(STALLED_S, self._look_again, context=Context())
        elif self._line:
            self._awaited = 0
            self._begin_until, self._round = now + BEGIN_S, 0
            self._begin()
        else:
            self.busy = False

    def _look_again(self) -> None:
        """Looks again: a call that was awaited does not come."""
        if time.perf_counter() >= self._came_at + STALLED_S:
            for backlog in self.backlogs:
                backlog.forget()
        self._look()

    def _begin(self) -> None:
        """Gives turns, one in some rounds of the loop, for some time."""
        now = time.perf_counter()
        if not self._line or now >= self._begin_until:
            self._listens_since = now
            self._look()
            return
        if self._round % ROUNDS == 0:
            self._give(now)
        self._round += 1
        asyncio.get_running_loop().call_soon(self._begin, context=Context())

    def _give(self, now: float) -> None:
        caller, turn = self._line.next(now - LATE_S)
        _wake(turn, has_turn=True)
        late = self._line.take_late(caller, now - WAIT_S)
        if late is not None:
            _wake(late, has_turn=False)


def _wake(turn: "asyncio.Future[bool]", *, has_turn: bool) -> None:
    if not turn.done():
        turn.set_result(has_turn)
