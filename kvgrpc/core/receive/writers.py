"""Accesses under which sources may write into this engine's blocks, until that is proved to be over."""

from kvgrpc.core.actions import Expect
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.reservation import ReservationMove, Writer
from kvgrpc.core.tables.peers import Peer


def add_writer(state: NodeState, reservation: ReservationMove, access_id: bytes, peer: Peer) -> None:
    """Notes that a source may write under an access. Ranks are told too: they outlive a lead that dies."""
    reservation.writers[access_id] = Writer(peer.key, peer.asks)
    state.receive.open_writes[access_id] = reservation
    state.emit(Expect(_name(access_id), open=True, writes=True))


def drop_writer(state: NodeState, access_id: bytes) -> None:
    """Notes that nothing is written under an access any more."""
    reservation = state.receive.open_writes.pop(access_id, None)
    if reservation is not None:
        del reservation.writers[access_id]
        state.emit(Expect(_name(access_id), open=False, writes=True))


def _name(access_id: bytes) -> str:
    return f"w-{access_id.hex()}"
