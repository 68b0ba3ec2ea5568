"""Waiting for the first part of a push, and what the source's engine says about it.

A destination that registers before the first part waits for the registration timeout, because the source may be
computing. An engine that expects pushes is told of the registration and says whether it knows the request. If the
engine never gets the request, because its API refused it or its router sent it elsewhere, the destination waits only
for the announce wait. It then computes the prompt itself.
"""

from kvgrpc.core.actions import PushExpected, PushWantedNews
from kvgrpc.core.events import FinishedBlocks
from kvgrpc.core.send.handed_over import registered
from kvgrpc.core.send.push_ends import PushEnds
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.push import SourcePush
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Failure, Side, State
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import NextStep, Reason


class ExpectedPushes:
    """Deadlines of pushes that have no part yet."""

    def __init__(self, state: NodeState, ends: PushEnds) -> None:
        self._state = state
        self._ends = ends

    def begun(self, push: SourcePush) -> None:
        """Starts the wait of a push that began with a part or a registration."""
        self._await(push, self._state.limits.registration_timeout_s)

    def registered(self, push: SourcePush) -> None:
        """Asks an engine that expects pushes about one that began with a registration."""
        if self._state.life.expects_pushes:
            self._await(push, self._state.limits.announce_wait_s)
            self._state.tell(ENGINE, PushWantedNews(push.key))

    def awaited(self, event: FinishedBlocks) -> bool:
        """Returns whether a destination waits for blocks that are handed over to readers."""
        push = self._state.send.pushes.with_key(event.key) if event.takes_registrations else None
        return push is not None and push.parts is None and not push.part_epoch

    def expected(self, event: FinishedBlocks) -> None:
        """Handles FinishedBlocks (`expected`): the engine knows the request."""
        check_transfer_key(event.key)
        push = registered(self._state, event.key, event.call.principal)
        if push is not None and push.parts is None and not event.validate_only:
            push.expected = True
            self._await(push, self._state.limits.registration_timeout_s)
        self._state.reply(event.call.id, PushExpected())

    def due(self, transfer_id: str) -> None:
        """Fails a push for which no destination registered, or no part came, in time."""
        push = self._state.send.pushes.find(transfer_id)
        assert push is not None
        message = "no destination came, or not all parts"
        if push.trouble:
            message += f"; the last destination failed: {push.trouble}"
        failure = Failure(Reason.REGISTRATION_TIMEOUT, message, push.phase, Side.SOURCE, next=NextStep.RECOMPUTE)
        self._ends.end(push, State.FAILED, failure)

    def _await(self, push: SourcePush, for_s: float) -> None:
        due = min(self._state.now + for_s, push.cap)
        self._state.timers.set(Timer.RENDEZVOUS, push.transfer_id, due)
