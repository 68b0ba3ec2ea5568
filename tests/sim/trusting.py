"""Planted bugs of a lead that trusts its peers; only worlds with a liar show them. See `bugs`."""

from dataclasses import replace
from typing import Any

from kvgrpc.core.events import SettleAnswered
from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.values.grants import read_claims
from kvgrpc.core.values.ids import peer_key
from kvgrpc.errors import KVGrpcError


def settles_for_all(settle_row: Any) -> Any:
    """Any peer may settle an access as if it owned it."""
    return lambda self, peer, row: settle_row(self, _owner(self, peer, row.access_id), row)


def closes_for_all(close_row: Any) -> Any:
    """Any peer may close an access as if it owned it."""
    return lambda self, call, peer, row: close_row(self, call, _owner(self, peer, row.access_id), row)


def widens_for_all(parts_ready: Any) -> Any:
    """Any peer may report parts for an access as if it owned it."""
    return lambda self, event, peer: parts_ready(self, event, _owner(self, peer, event.access_id))


def sums_for_all(ask: Any) -> Any:
    """Any peer may ask for the checksums of an access as if it owned it."""

    def asked(self: Any, event: Any) -> None:
        peer = self._state.peers.caller(event.engine_id, event.incarnation, event.call.proof)
        owner = _owner(self, peer, event.access_id)
        known, call = owner.description, replace(event.call, proof=owner.asks[0])
        ask(self, replace(event, call=call, engine_id=known.engine_id, incarnation=known.incarnation))

    return asked


def _owner(part: Any, peer: Any, access_id: bytes) -> Any:
    access = part._state.access.rows.get(access_id)
    return peer if access is None else part._state.peers.lives.get(access.peer, peer)


def dead_or_alive(caller: Any) -> Any:
    """A life that was replaced or declared dead is still heard."""

    def heard(self: Any, engine_id: str, incarnation: int, proof: bytes) -> Any:
        return self.lives.get(peer_key(engine_id, incarnation)) or caller(self, engine_id, incarnation, proof)

    return heard


def by_its_name(caller: Any) -> Any:
    """A caller passes for the life that it names, without a proof."""

    def heard(self: Any, engine_id: str, incarnation: int, proof: bytes) -> Any:
        peer = self.lives.get(peer_key(engine_id, incarnation))
        return caller(self, engine_id, incarnation, peer.asks[0] if peer else proof)

    return heard


def introduced_by_name(introduced: Any) -> Any:
    """A handshake passes for the life that it names, without a proof."""
    return lambda known, event: introduced(known, replace(event, proofs=known.asks if known else ()))


def alive_by_name(streaming: Any) -> Any:
    """A liveness stream passes for the life that it names, without a proof."""

    def heard(self: Any, event: Any) -> None:
        peer = self._state.peers.lives.get(event.peer)
        streaming(self, replace(event, proof=peer.asks[0]) if peer else event)

    return heard


def unsigned(verify: Any) -> Any:
    """The claims of a grant are believed without a check of its signature."""
    return lambda token, *_: read_claims(token)


def any_epoch(check: Any) -> Any:
    """Parts of an earlier epoch replace those of a later one."""

    def checked(self: Any, access: Any) -> Any:
        reservation = self._reservation_of(access)
        epoch, reservation.part_epoch = reservation.part_epoch, -1
        try:
            return check(self, access)
        finally:
            reservation.part_epoch = epoch

    return checked


def any_generation(opened: Any) -> Any:
    """Opened blocks count as blocks of the known memory generation, whatever their source says."""

    def known(self: Any, move: Any, answer: Any) -> None:
        generation = self._state.peers.lives[move.peer].description.memory_generation
        opened(self, move, replace(answer, memory_generation=generation))

    return known


def valid_for_all(settle_answered: Any) -> Any:
    """A peer's verdict on one access counts for all accesses at that peer."""

    def answered(self: Any, event: Any) -> None:
        move = self._state.moves.of_access(event.access_id)
        settle_answered(self, event)
        if move is None or not isinstance(event.result, Verdict):
            return
        for other in self._state.moves.of_peer(move.peer):
            if other.stage is MoveStage.SETTLING:
                settle_answered(self, SettleAnswered(other.access_id, event.result))

    return answered


def any_life_at_rest(take_proofs: Any) -> Any:
    """Any life of a source's engine may report a write at rest, whether or not it shows a proof."""

    def taken(self: Any, event: Any, at_rest: list[bytes]) -> None:
        take_proofs(self, event, at_rest)
        for access_id in at_rest:
            reservation = self._state.receive.open_writes.get(access_id)
            if reservation is None or reservation.stage is not MoveStage.ENDED:
                continue
            if engine_of(reservation.writers[access_id].life) == event.engine_id:
                self._reservations._ends.proved(access_id, reservation)

    return taken


def engine_of(life: str) -> str:
    """Returns the id of the engine that a life belongs to."""
    return life.rpartition("@")[0]


def any_life_delivers(check: Any) -> Any:
    """A source may continue, in a higher epoch, a push that a life of another engine began. (A new life of the same
    engine ends the push when it introduces itself.)
    """

    def checked(self: Any, access: Any) -> Any:
        reservation = self._reservation_of(access)
        peer, reservation.peer = reservation.peer, access.peer
        try:
            return check(self, access)
        finally:
            reservation.peer = peer

    return checked


def absent_agree(answered: Any) -> Any:
    """Checksums that the source does not send count as equal."""

    def heard(self: Any, event: Any) -> None:
        move = self._move_of_comparison(event.name)
        if move is None or not isinstance(event.result, KVGrpcError):
            answered(self, event)
            return
        move.comparison = None
        if move.left is None and not move.busy:
            self.course(move).settle(move)

    return heard


def shorter_will_do(both: Any) -> Any:
    """If the number of checksums is wrong, only those that exist on both sides are compared."""

    def cut(self: Any) -> Any:
        here, there = both(self)
        pairs = [(mine[: len(theirs)], theirs[: len(mine)]) for mine, theirs in zip(here, there, strict=False)]
        return [mine for mine, _ in pairs], [theirs for _, theirs in pairs]

    return cut
