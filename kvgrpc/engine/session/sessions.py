"""The lives of an engine: its sessions, one lead after the other.

The death of a lead that the engine launched begins a succession (`LeadRestart`), for which every `flush` and `poll`
does what can be done at once. Transfers of the old life fail when a succession begins, and come back when it ends.
"""

import math
import select
import time
from contextlib import suppress
from typing import Any

from kvgrpc.engine.session.connection import LeadDied, SessionOver
from kvgrpc.engine.session.launch import LeadProcess
from kvgrpc.engine.session.lead_restart import Attached, LeadRestart
from kvgrpc.engine.session.session import Session
from kvgrpc.engine.steps import Steps
from kvgrpc.engine.transfers.events import BlocksReturned, Event, Received
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.engine.transfers.void_slots import VoidSlots
from kvgrpc.errors import Reason, Unavailable
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.limits import limits_from_proto
from kvgrpc.wire.session import step_report

RETRY_DELAY_S = 1.0
"""Retry delay for calls between leads, in seconds: about the time that a new lead takes to serve."""


class Sessions:
    """The calls of an engine to its lead, and the events from its lead."""

    def __init__(self, attached: Attached) -> None:
        self.page = VoidSlots()
        self._events: list[Event] = []
        self._lost: list[Handle] = []
        """Transfers that failed with a lead, until their memory is proved to be at rest."""
        self._steps = Steps()
        self._succession: LeadRestart | None = None
        self._readable = select.epoll()
        self._watched = -1
        self._begin(attached)

    def survive(self, lead: LeadProcess, request: session_pb2.AttachRequest, relaunches: int) -> None:
        """Has the engine's own lead replaced, from now on, when it dies."""
        self._succession = LeadRestart(lead, request, relaunches, self._watch)

    def present(self) -> Session:
        """Returns the session with the lead. Raises Unavailable (ENGINE_LOST) while there is no lead."""
        if self._between():
            raise _between_leads()
        return self._session

    def ask(self, handle: Handle | None, traceparent: str = "", **request: Any) -> session_pb2.Call:
        """Calls `Session.ask`. Raises Unavailable (ENGINE_LOST) while there is no lead."""
        return self.present().ask(handle, traceparent, **request)

    def mint(self) -> str:
        """Returns a new lease id."""
        return self._session.mint()

    def step_done(self, step: int, layers: tuple[int, int] | None) -> None:
        """Reports a step to the lead, and to later leads."""
        self._steps.done(step, layers)
        if not self._between():
            self._session.say(step_done=step_report(step, layers))

    def wait(self, timeout_s: float | None = None, **request: Any) -> session_pb2.CallAnswer:
        """Calls `Session.wait`. Raises Unavailable (ENGINE_LOST) while there is no lead."""
        try:
            return self.present().wait(timeout_s, **request)
        except LeadDied as error:
            self._lose(error)
            raise _between_leads() from error

    def answered(self, call_id: int) -> bool:
        """Calls `Session.answered`, in the life in which the call was made."""
        return self._session.answered(call_id)

    def answer(self, call_id: int) -> session_pb2.CallAnswer:
        return self._session.answer(call_id)

    def poll(self, timeout_s: float) -> list[Event]:
        """Sends queued calls and returns events, waiting up to `timeout_s` for the first one. Raises LeadDied."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while not (self._events or self._session.pushes_wanted) and self._read(deadline - time.monotonic()):
            pass
        events, self._events[:] = self._events[:], []
        self._session.told()
        for event in events:
            if isinstance(event, Received | BlocksReturned):
                event.transfer.over = True
        return events

    def take_pushes_wanted(self) -> list[bytes]:
        """Returns keys of PushWanted that were read, once each."""
        keys, self._session.pushes_wanted = self._session.pushes_wanted, []
        return keys

    def flush(self) -> None:
        """Sends queued calls. Raises LeadDied."""
        if self._succession is not None:
            self._succession.check()
        if self._between():
            self._advance()
            return
        try:
            self._session.flush()
        except LeadDied as error:
            self._lose(error)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` has something to do; -1 after `close`."""
        return -1 if self._readable.closed else self._readable.fileno()

    def due(self) -> bool:
        """Returns whether `poll` has something to do."""
        return bool(self._events) or self._between() or bool(not self._readable.closed and self._readable.poll(0))

    @property
    def lead_pid(self) -> int:
        return self._session.connection.lead_pid

    def close(self) -> None:
        """Ends the session, and a lead of the engine's own. Idempotent."""
        self._readable.close()
        self._session.connection.close()
        self.page.close()
        if self._succession is not None:
            self._succession.close()

    # -- from one lead to the next

    def _begin(self, attached: Attached) -> None:
        connection, answer, page = attached
        self.incarnation = answer.header.incarnation
        self.address = answer.address
        self.limits = limits_from_proto(answer.limits)
        self.page.begin(page, answer.void_slots)
        self._session = Session(connection, answer, self.page, self._events)
        for step, layers in self._steps:
            self._session.say(step_done=step_report(step, layers))
        self._watch(connection.fileno())

    def _read(self, timeout_s: float) -> bool:
        """Takes what comes. Returns False when there is no time left."""
        if self._between():
            assert self._succession is not None
            wait_s = max(min(timeout_s, self._succession.left_s()), 0.0)
            self._readable.poll(math.ceil(wait_s * 1000) / 1000)
            self._advance()
            return timeout_s > 0
        try:
            return self._session.read(timeout_s)
        except LeadDied as error:
            self._lose(error)
            return True

    def _lose(self, error: LeadDied) -> None:
        """Begins to replace a lead that died. Raises LeadDied when there will be no other."""
        if self._succession is None or self.fileno() < 0:
            raise error
        try:
            if isinstance(error, SessionOver):
                raise error
            self._lost += self._session.lose(error.message)
        except SessionOver as over:
            self._succession.give_up(over.message)
        self.page.close()
        self._succession.begin(error)
        self._advance()

    def _advance(self) -> None:
        """Does what can be done at once for the next life."""
        assert self._succession is not None
        attached = self._succession.step()
        if attached is not None:
            self._begin(attached)
            self._events += [BlocksReturned(handle) for handle in self._lost]
            self._lost.clear()

    def _between(self) -> bool:
        return self._succession is not None and self._succession.under_way

    def _watch(self, fd: int) -> None:
        """Watches this descriptor only."""
        with suppress(OSError, ValueError):
            self._readable.unregister(self._watched)
        self._watched = fd
        if fd >= 0:
            self._readable.register(fd, select.EPOLLIN)


def _between_leads() -> Unavailable:
    what = "the lead of this engine died, and the next one is being started"
    return Unavailable(Reason.ENGINE_LOST, what, retry_delay_s=RETRY_DELAY_S)
