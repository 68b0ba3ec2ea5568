"""The ranks of an engine, as its lead commands them: in the lead's own process, or in workers of a session."""

from typing import Protocol

from kvgrpc.core import actions
from kvgrpc.core.actions import Operation
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.pieces import Pieces


class Rank(Protocol):
    """One rank. Every command returns at once; its result is fed to the node as an event."""

    def offer(self, key: str, peer: str) -> None: ...

    def map_peer(self, peer: str, endpoint: RankEndpoint, attempt: int) -> None: ...

    def unmap_peer(self, peer: str, *, watch: bool, gone: bool) -> None: ...

    def post(self, post: actions.Post) -> None: ...

    def expect(self, access: str, open_: bool, operation: Operation) -> None: ...

    def await_end(self, peer: str) -> None: ...

    def rekey(self) -> None: ...

    def sum(self, name: str, pieces: Pieces) -> None: ...

    def copy_out(self, name: str, pieces: Pieces) -> None: ...

    def send(self, action: actions.Send) -> None: ...

    def answer_send(self, action: actions.AnswerSend) -> None: ...


class Ranks:
    """The RankPort of a lead: hands each command to its rank. `ranks` is replaced with every incarnation. `unaided`:
    the data paths over which peers read without help of the ranks.
    """

    def __init__(self, unaided: frozenset[str]) -> None:
        self.ranks: dict[int, Rank] = {}
        self._unaided = unaided

    def offer(self, action: actions.MakeOffer) -> None:
        self.ranks[action.rank].offer(action.key, action.peer)

    def map_peer(self, action: actions.MapPeer) -> None:
        self.ranks[action.rank].map_peer(action.peer, action.endpoint, action.attempt)

    def unmap_peer(self, action: actions.UnmapPeer) -> None:
        rank = self.ranks.get(action.rank)
        if rank is not None:
            rank.unmap_peer(action.peer, watch=action.watch, gone=action.gone)

    def post(self, action: actions.Post) -> None:
        self.ranks[action.rank].post(action)

    def expect(self, action: actions.Expect) -> None:
        if action.paths and not action.writes and self._unaided.issuperset(action.paths):
            return  # each read would wake every rank twice, and make ranks with other paths poll for it
        operation = Operation.WRITE if action.writes else Operation.READ
        for rank in self.ranks.values():
            rank.expect(action.access, action.open, operation)

    def await_end(self, action: actions.AwaitEnd) -> None:
        rank = self.ranks.get(action.rank)
        if rank is not None:
            rank.await_end(action.peer)

    def rekey(self, action: actions.Rekey) -> None:
        self.ranks[action.rank].rekey()

    def sum(self, action: actions.ComputeChecksums) -> None:
        self.ranks[action.rank].sum(action.name, action.pieces)

    def copy_out(self, action: actions.CopyOut) -> None:
        self.ranks[action.rank].copy_out(action.name, action.pieces)

    def send(self, action: actions.Send) -> None:
        self.ranks[action.rank].send(action)

    def answer_send(self, action: actions.AnswerSend) -> None:
        rank = self.ranks.get(action.rank)
        if rank is not None:
            rank.answer_send(action)
