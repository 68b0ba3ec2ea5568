"""The call queue: the order in which calls begin while more come than this server can serve.

gRPC hands calls over one after the other, whoever made them. A call that has not been handed over waits behind those of
all other callers. So a busy server has calls handed over first. They wait here, apart for each caller, and begin while
gRPC has no more. All streams of a caller with too many calls wait here then, and its own library holds the next ones
back. The call of another caller is handed over at once, and is the next to begin.

A caller is a principal, or a connection where callers have none. Calls of the engine's session and of peers' streams
do not wait here.
"""

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from math import inf

from kvgrpc.core.tables.fair_queue import FairQueue
from kvgrpc.errors import Exhausted, Reason
from kvgrpc.service.backlog import Backlog

LOOK_S = 0.025
"""Interval at which gRPC is asked for its backlog while calls come, in seconds."""
BACKLOG_MAX = 8
"""Number of calls that gRPC has not handed over, above which the server is busy."""
STALLED_S = 0.05
"""Time in which gRPC hands over a call that it has, in seconds. A later one counts as given up by its caller."""
DOUBT_S = 0.5
"""Time after which such a count is doubted, in seconds: on a machine with other work gRPC may take longer."""
DRAIN_S = 0.02
"""Time without a call after which gRPC has none, whatever its count says, in seconds."""
DRAIN_MAX_S = 1.0
"""Maximum time to find that out, in seconds."""
LISTEN_S = 0.25
"""Time after which calls begin although gRPC still has some, in seconds."""
BEGIN_S = 0.002
"""Minimum time in which calls begin before gRPC's backlog is looked at again, in seconds."""
BEGIN_SHARE = 0.25
"""Minimum of that time for each second in which gRPC's calls were awaited before, in seconds."""
ROUNDS = 8
"""Rounds of the event loop for each call that begins: in the others, what the others wait for goes on."""
CROWD_S = 0.001
"""Time in which the calls of a stream's message join the queue, in seconds."""
AT_ONCE = 4
"""Number of calls that begin without waiting between two looks, of callers that have none in the queue."""
LATE_S = 0.5
"""Time after which the newest call of a caller goes before its oldest, in seconds."""
WAIT_S = 1.0
"""Time after which a call may be refused, in seconds: its caller's oldest is, with each call that begins."""
COST_BYTES = 16_384
"""Size of a request that costs as much as a call, in bytes."""
BYTES_MAX = 64 << 20
"""Maximum size of all requests in the queue, in bytes. A caller has as much as it leaves for the others."""


class CallQueue:
    """The queue of one lead, on its event loop."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[bool]] = FairQueue()
        self._bytes: dict[str, int] = {}
        """Bytes of requests in the queue, by caller."""
        self._bytes_of_all = 0
        self.busy = False
        """True while the server is busy: then a call must `enter`. Read-only outside."""
        self.refused = 0
        """Number of calls that were refused. Read-only outside."""
        self.backlogs: list[Backlog] = []
        self._look_at = 0.0
        self._awaited = 0
        """Number of calls that gRPC has and that are awaited before calls begin."""
        self._listens_since = 0.0
        self._came_at = 0.0
        self._doubt_at = inf
        """Time at which the count of the backlog is doubted."""
        self._begin_until = 0.0
        self._round = 0
        self._at_once = 0
        self._step: asyncio.Handle | None = None
        """The next step while the server is busy: there is never more than one."""

    def handed_over(self) -> None:
        """Notes that gRPC has handed a call over. It may have more."""
        now = self._came_at = time.perf_counter()
        if self.busy:
            self._awaited -= 1
            if self._awaited == 0:
                self._next(self._look)
        elif now >= self._look_at:
            self._look_at = now + LOOK_S
            if self.backlog() > BACKLOG_MAX:
                self.busy, self._listens_since = True, now
                self._look()

    def crowd(self) -> None:
        """Makes the server busy for the calls that one stream has brought."""
        if not self.busy:
            self.busy, self._listens_since, self._awaited = True, time.perf_counter(), 0
            self._next(self._look, CROWD_S)

    def _next(self, step: Callable[[], None], delay_s: float = 0.0) -> None:
        """Makes this the next step, in the next round of the loop or later. It belongs to no caller's context."""
        if self._step is not None:
            self._step.cancel()
        loop = asyncio.get_running_loop()
        later = loop.call_later(delay_s, step, context=Context()) if delay_s else None
        self._step = later or loop.call_soon(step, context=Context())

    @property
    def waiting(self) -> int:
        """Number of calls in the queue."""
        return len(self._queue)

    def backlog(self) -> int:
        """Returns the number of calls that gRPC has not handed over."""
        return sum(backlog.count() for backlog in self.backlogs)

    async def enter(self, caller: str, nbytes: int = 0, *, patient: bool = False) -> bool:
        """Returns when a call may begin: True if it has waited. `nbytes` of its request are kept meanwhile.

        Raises Exhausted (LIMIT_EXCEEDED) for a caller that has too much in the queue, and after `WAIT_S` unless it is
        `patient`.
        """
        if not self._queue.count_of(caller) and self._at_once < AT_ONCE:
            self._at_once += 1
            return False
        held = self._bytes.get(caller, 0) + nbytes
        if held > BYTES_MAX - self._bytes_of_all:
            self._refuse(f"{held} bytes of requests of this caller wait in the queue", BYTES_MAX)
        waits: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._keep(caller, nbytes)
        now = time.perf_counter()
        self._queue.join(caller, waits, 1.0 + nbytes / COST_BYTES, inf if patient else now)
        try:
            begins = await waits
        finally:
            self._queue.leave(caller, waits)
            self._keep(caller, -nbytes)
        if not begins:
            others = self._queue.count_of(caller)
            self._refuse(f"this call waited {WAIT_S:g} s in the queue, with {others} others of its caller", WAIT_S)
        return True

    def _refuse(self, what: str, limit: float) -> None:
        self.refused += 1
        message = f"{what}: this server has more calls than it serves; come back later"
        metadata = {"limit": f"{limit:.0f}"}
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
        if now >= self._doubt_at:
            self._awaited = 0
            self._next(self._drain, DRAIN_S)
            return
        self._awaited = self.backlog()
        if self._awaited and now < self._listens_since + LISTEN_S:
            self._next(self._look_again, STALLED_S)
        elif self._queue:
            self._awaited = 0
            self._begin_until = now + max(BEGIN_S, BEGIN_SHARE * (now - self._listens_since))
            self._round = 0
            self._begin()
        else:
            self.busy = False

    def _look_again(self) -> None:
        """Looks again. A call that was awaited and does not come is forgotten."""
        now = time.perf_counter()
        if now >= self._came_at + STALLED_S:
            self._forget(now)
        self._look()

    def _drain(self) -> None:
        """Waits until gRPC hands no more calls over, and begins to count anew."""
        now = time.perf_counter()
        if now < min(self._came_at + DRAIN_S, self._listens_since + DRAIN_MAX_S):
            self._next(self._drain, DRAIN_S)
            return
        self._forget(now)
        self._look()

    def _forget(self, now: float) -> None:
        forgotten = sum(backlog.forget() for backlog in self.backlogs)
        self._doubt_at = now + DOUBT_S if forgotten else inf

    def _begin(self) -> None:
        """Lets calls begin, one in some rounds of the loop, for some time."""
        now = time.perf_counter()
        if not self._queue or now >= self._begin_until:
            self._listens_since = now
            self._look()
            return
        if self._round % ROUNDS == 0:
            self._let_one_begin(now)
        self._round += 1
        self._next(self._begin)

    def _let_one_begin(self, now: float) -> None:
        caller, first = self._queue.next(now - LATE_S)
        _wake(first, begins=True)
        late = self._queue.take_late(caller, now - WAIT_S)
        if late is not None:
            _wake(late, begins=False)


def _wake(waits: "asyncio.Future[bool]", *, begins: bool) -> None:
    if not waits.done():
        waits.set_result(begins)
