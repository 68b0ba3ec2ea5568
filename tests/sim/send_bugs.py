"""Planted bugs of data paths on which the source's rank has to send; only worlds with them show these. See `bugs`."""

from dataclasses import replace
from typing import Any

from kvgrpc.core.events import PostingEnded, PostSendAnswered, SendWanted
from kvgrpc.core.tables.accesses import AccessState


def sent_is_there(handle: Any) -> Any:
    """A send counts as arrived as soon as the source's rank has begun it."""
    asked: dict[tuple[Any, ...], str] = {}

    def handled(self: Any, event: Any, now: float) -> Any:
        todo = handle(self, event, now)
        if isinstance(event, SendWanted):
            asked[id(self), event.rank, event.peer, _number(event.ask)] = event.posting_id
        if isinstance(event, PostSendAnswered) and event.answer.sequence and not event.answer.error:
            posting_id = asked.get((id(self), event.rank, event.peer, _number(event.answer)), "")
            if self.state.moves.of_posting(posting_id) is not None:
                self._moves.posting_ended(PostingEnded(posting_id, True, 0))
        todo += self.state.actions
        self.state.actions.clear()
        return todo

    return handled


def _number(of: Any) -> tuple[int, int, int]:
    return of.source_rank, of.epoch, of.sequence


def refused_for_sure(answered: Any) -> Any:
    """A source that has not answered counts as having refused, and its sequence number is used for the next send."""

    def heard(self: Any, event: Any) -> None:
        answered(self, replace(event, answer=replace(event.answer, known=True)))

    return heard


def any_access(check_granted: Any) -> Any:
    """Any peer may have blocks sent that one peer may read."""

    def checked(self: Any, peer: Any, event: Any) -> None:
        access = self._state.access.rows.get(event.access_id)
        check_granted(self, peer if access is None else self._state.peers.lives.get(access.peer, peer), event)

    return checked


def outdated(check_granted: Any) -> Any:
    """A peer may still have blocks sent after its access is no longer open."""

    def checked(self: Any, peer: Any, event: Any) -> None:
        access = self._state.access.rows.get(event.access_id)
        if access is None or access.state is AccessState.OPEN:
            check_granted(self, peer, event)

    return checked
