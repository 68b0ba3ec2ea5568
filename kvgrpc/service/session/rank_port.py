"""The ranks of an engine, as its lead commands them: in the lead's own process, or in workers of a session."""

from typing import Protocol

from kvgrpc.core.actions import AnswerSend, AwaitEnd, Expect, RankAction, UnmapPeer

MAY_BE_GONE = UnmapPeer | AwaitEnd | AnswerSend
"""Commands that have nothing to do for a rank of an earlier life."""


class CommandedRank(Protocol):
    """One rank."""

    def perform(self, action: RankAction) -> None:
        """Begins a command, and returns at once. The result is fed to the node as an event."""
        ...


class Ranks:
    """The RankPort of a lead: hands each command to its rank. `ranks` is replaced with every incarnation. `unaided`:
    the data paths over which peers read without help of the ranks.
    """

    def __init__(self, unaided: frozenset[str]) -> None:
        self.ranks: dict[int, CommandedRank] = {}
        self._unaided = unaided

    def perform(self, action: RankAction) -> None:
        """Hands a command to its rank, or an Expect to all."""
        if isinstance(action, Expect):
            self._expect(action)
        elif action.rank in self.ranks or not isinstance(action, MAY_BE_GONE):
            self.ranks[action.rank].perform(action)

    def _expect(self, action: Expect) -> None:
        if action.paths and not action.writes and self._unaided.issuperset(action.paths):
            return  # each read would wake every rank twice, and make ranks with other paths poll for it
        for rank in self.ranks.values():
            rank.perform(action)
