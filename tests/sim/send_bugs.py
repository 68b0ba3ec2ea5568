"""Bugs of data paths by which the source's rank has to send: only worlds with them show these. As in `bugs`."""

from dataclasses import replace
from typing import Any

from kvgrpc.core.events import PostingEnded, PostSendAnswered, SendWanted
from kvgrpc.core.tables.accesses import AccessState


def sent_is_there(hear: Any) -> Any:
    """What a source's rank has begun to send has arrived."""
    asked: dict[tuple[Any, ...], str] = {}

    def heard(self: Any, event: Any) -> None:
        hear(self, event)
        if isinstance(event, SendWanted):
            asked[id(self), event.rank, event.peer, _number(event.ask)] = event.posting_id
        if isinstance(event, PostSendAnswered) and event.answer.sequence and not event.answer.error:
            posting_id = asked.get((id(self), event.rank, event.peer, _number(event.answer)), "")
            if self.state.moves.of_posting(posting_id) is not None:
                self._moves.posting_ended(PostingEnded(posting_id, True, 0))

    return heard


def _number(of: Any) -> tuple[int, int, int]:
    return of.source_rank, of.epoch, of.sequence


def refused_for_sure(answered: Any) -> Any:
    """A source that has not answered has refused, and the number goes to the next send."""

    def heard(self: Any, event: Any) -> None:
        answered(self, replace(event, answer=replace(event.answer, known=True)))

    return heard


def any_access(check_granted: Any) -> Any:
    """What one peer may read any may have sent."""

    def checked(self: Any, peer: Any, event: Any) -> None:
        access = self._state.accesses.get(event.access_id)
        check_granted(self, peer if access is None else self._state.peers.get(access.peer, peer), event)

    return checked


def outdated(check_granted: Any) -> Any:
    """What a peer was allowed to read once it may have sent."""

    def checked(self: Any, peer: Any, event: Any) -> None:
        access = self._state.accesses.get(event.access_id)
        if access is None or access.state is AccessState.OPEN:
            check_granted(self, peer, event)

    return checked
