"""LeadRestart: replaces a lead that died, step by step. No step waits, except for the start of a process.

First the old lead's process ends, with all its threads, which proves that nothing in it writes into shared memory any
more. Then a new lead serves at the same socket. Then the engine attaches there, once every worker is back with its
memory at rest.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from kvgrpc.core.values.layout import PoolKind, PoolLayout
from kvgrpc.engine.session.connection import LeadConnection, LeadDied
from kvgrpc.engine.session.launch import DIED_S, READY_TIMEOUT_S, STOP_TIMEOUT_S, LeadProcess
from kvgrpc.engine.ticket import RankTicket
from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.description import pool_to_proto
from kvgrpc.wire.frames import encode

_log = logging.getLogger(__name__)

WITHIN_S = 60.0
"""Time for which the death of a lead counts, in seconds."""
WORKERS_S = 30.0
"""Time that workers get to come back once a new lead serves, in seconds: first their postings end."""
COMES_BACK_S = 2 * READY_TIMEOUT_S
"""Time that a worker waits for a new lead, in seconds."""

Attached = tuple[LeadConnection, session_pb2.AttachResponse, int]
"""A session: its connection, the answer to the attach, and the descriptor of the void page."""


def attach_again(
    first: session_pb2.AttachRequest, engine_id: str, ticket: RankTicket, pool: PoolLayout
) -> session_pb2.AttachRequest:
    """Returns the request by which an engine attaches to its next lead: like `first`, with the same name and ranks."""
    again = session_pb2.AttachRequest()
    again.CopyFrom(first)
    again.engine_id, again.rank_ticket = engine_id, ticket.secret
    again.pool.CopyFrom(pool_to_proto(pool, PoolKind.ENGINE_MANAGED))
    return again


class LeadRestart:
    """The leads of one engine. `watch` is told the descriptor that is readable when `step` has something to do."""

    def __init__(
        self, lead: LeadProcess, request: session_pb2.AttachRequest, limit: int, watch: Callable[[int], None]
    ) -> None:
        """`limit`: maximum number of leads started anew within WITHIN_S."""
        self._lead = lead
        self._frame = encode(session_pb2.ClientFrame(attach=request))
        self._limit = limit
        self._watch = watch
        self._deaths: deque[float] = deque()
        self._step: Callable[[], Attached | None] | None = None
        self._deadline = 0.0
        self._pidfd = -1
        self._connection: LeadConnection | None = None
        self._why = ""

    @property
    def under_way(self) -> bool:
        """True while there is no lead, but may be one soon."""
        return self._step is not None

    def check(self) -> None:
        """Raises LeadDied, on every call, when there will be no other lead."""
        if self._why:
            raise LeadDied(Reason.PEER_LOST, self._why)

    def begin(self, error: LeadDied) -> None:
        """Begins to replace a lead that died. Raises LeadDied when too many died."""
        self.check()
        now = time.monotonic()
        while self._deaths and self._deaths[0] < now - WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) >= self._limit:
            many = f"; {self._limit} leads were started anew within {WITHIN_S:g} s" if self._limit else ""
            said = self._lead.last_words()
            self.give_up(error.message + (f": {said}" if said else "") + many)
        self._deaths.append(now)
        _log.warning("%s; a new one is started", error.message)
        self._pidfd = os.pidfd_open(self._lead.pid) if not self._lead.gone() else -1
        self._go(self._end, DIED_S, self._pidfd)

    def step(self) -> Attached | None:
        """Does what can be done now. Returns the new session once the engine is attached. Raises LeadDied when there
        will be none.
        """
        self.check()
        step = None
        try:
            while self._step is not None and step != self._step:
                step = self._step
                attached = step()
                if attached is not None:
                    self._step, self._connection = None, None
                    return attached
        except Unavailable as error:
            self._let_go()
            self.begin(LeadDied(Reason.PEER_LOST, error.message))
        except (KVGrpcError, OSError) as error:
            self.give_up(f"no other lead can take its place: {error}")
        return None

    def give_up(self, why: str) -> NoReturn:
        """Gives up: there will be no other lead. Raises LeadDied, and so does every later `check`."""
        self._why = why
        self._step = None
        self._let_go()
        raise LeadDied(Reason.PEER_LOST, why)

    def left_s(self) -> float:
        """Returns the time until `step` has something to do in any case, in seconds."""
        return max(self._deadline - time.monotonic(), 0.0)

    def close(self) -> None:
        """Ends the lead and the replacement. Idempotent."""
        self._let_go()
        self._step = None
        self._why = self._why or "the engine was closed"
        self._lead.stop()

    # -- the steps

    def _end(self) -> None:
        """Ends the last lead's process, then starts the next one. A process that only looks dead is killed."""
        if not self._lead.gone():
            if self._late():
                if self._lead.killed:
                    self.give_up("the process of the last lead does not end")
                self._lead.kill()
                self._deadline = time.monotonic() + STOP_TIMEOUT_S
            return
        self._lead.start_again()
        self._go(self._start, READY_TIMEOUT_S, self._lead.fileno())
        self._let_go()

    def _start(self) -> None:
        """Waits until the next lead serves, then sends the attach."""
        if not self._lead.serves():
            if self._late():
                self._lead.kill()
                raise Unavailable(Reason.DEADLINE, f"the lead did not serve within {READY_TIMEOUT_S:g} s")
            return
        self._connection = LeadConnection(self._lead.socket_path)
        self._connection.send(self._frame)
        self._go(self._attach, WORKERS_S, self._connection.fileno())

    def _attach(self) -> Attached | None:
        """Waits until the engine is attached there, with every worker."""
        assert self._connection is not None
        answer = self._connection.answer(0.0)
        if answer is not None:
            return self._connection, answer[0].attached, answer[1]
        if self._late():
            self.give_up(f"not every worker came back to its new lead within {WORKERS_S:g} s")
        return None

    def _go(self, step: Callable[[], Attached | None], timeout_s: float, fd: int) -> None:
        self._step = step
        self._deadline = time.monotonic() + timeout_s
        self._watch(fd)

    def _late(self) -> bool:
        return time.monotonic() >= self._deadline

    def _let_go(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._connection is not None:
            self._connection.close()
            self._connection = None
