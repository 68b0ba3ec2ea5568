"""Bugs of a lead that trusts its peers: only worlds with a liar show them. As in `bugs`."""

from dataclasses import replace
from typing import Any

from kvgrpc.core.accesses import Verdict
from kvgrpc.core.events import SettleAnswered
from kvgrpc.core.grants import read_claims
from kvgrpc.core.ids import peer_key
from kvgrpc.core.moves import Stage


def settles_for_all(settle_row: Any) -> Any:
    """Whoever settles an access is its owner."""
    return lambda self, peer, row: settle_row(self, _owner(self, peer, row.access_id), row)


def closes_for_all(close_row: Any) -> Any:
    """Whoever closes one is."""
    return lambda self, call, peer, row: close_row(self, call, _owner(self, peer, row.access_id), row)


def widens_for_all(parts_ready: Any) -> Any:
    """Whoever has parts for one is."""
    return lambda self, event, peer: parts_ready(self, event, _owner(self, peer, event.access_id))


def sums_for_all(ask: Any) -> Any:
    """Whoever wants the sums of what is read under one is."""
    return lambda self, event, peer: ask(self, event, _owner(self, peer, event.access_id))


def _owner(part: Any, peer: Any, access_id: bytes) -> Any:
    access = part._state.accesses.get(access_id)
    return peer if access is None else part._state.peers.get(access.peer, peer)


def dead_or_alive(caller: Any) -> Any:
    """A life that was replaced, or taken for dead, is heard as ever."""

    def heard(self: Any, engine_id: str, incarnation: int) -> Any:
        return self.peers.get(peer_key(engine_id, incarnation)) or caller(self, engine_id, incarnation)

    return heard


def unsigned(verify: Any) -> Any:
    """What a grant says is true."""
    return lambda token, *_: read_claims(token)


def any_epoch(check: Any) -> Any:
    """Parts of an earlier epoch replace those of a later one."""

    def checked(self: Any, access: Any) -> Any:
        landing = self._landing(access)
        epoch, landing.part_epoch = landing.part_epoch, -1
        try:
            return check(self, access)
        finally:
            landing.part_epoch = epoch

    return checked


def any_generation(opened: Any) -> Any:
    """Blocks are of the memory as it is known, whatever their source says."""

    def known(self: Any, move: Any, answer: Any) -> None:
        generation = self._state.peers[move.peer].description.memory_generation
        opened(self, move, replace(answer, memory_generation=generation))

    return known


def valid_for_all(settle_answered: Any) -> Any:
    """What a peer says of one access it says of all."""

    def answered(self: Any, event: Any) -> None:
        move = self._table.of_access(event.access_id)
        settle_answered(self, event)
        if move is None or not isinstance(event.result, Verdict):
            return
        for other in self._table.of_peer(move.peer):
            if other.stage is Stage.SETTLING:
                settle_answered(self, SettleAnswered(other.access_id, event.result))

    return answered
