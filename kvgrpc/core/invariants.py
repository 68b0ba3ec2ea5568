"""Invariants that tie the tables of a node together."""

from collections.abc import Hashable

from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import AccessState
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Direction, Disposition
from kvgrpc.core.values.grants import AccessKind


def check(state: NodeState) -> None:
    """Asserts what holds between any two events. For tests and simulators."""
    state.pool.pins.check()
    wanted = {(lease.id, PinKind.LEASE) for lease in state.send.leases}
    reads = [a for a in state.access.rows.values() if a.kind is AccessKind.READ]
    wanted |= {(a.owner, PinKind.ACCESS) for a in reads if a.state is AccessState.OPEN}
    wanted |= {pin for move in state.moves if (pin := move.pinned(state.pool.pins)) is not None}
    assert {(pin.owner, pin.kind) for pin in state.pool.pins} == wanted, "pins without a reason, or missing"
    for lease in state.send.leases:
        assert state.now < lease.deadline <= lease.cap, f"{lease.id} outlives its time"
        assert all(state.access.rows[id_].state is AccessState.OPEN for id_ in lease.accesses)
        assert all(state.access.rows[id_].state is AccessState.WAITING for id_ in lease.waiting)
    found = [(offer.lease_id, offer.tenant) for offer in state.send.offers]
    assert found == [(lease.id, lease.tenant) for lease in state.send.leases if lease.findable], "an index of others"
    state.send.offers.check()
    firmness = Firmness(state)
    for lease in state.send.soft_leases.oldest():
        assert lease.live, f"{lease.id} is soft and over"
        assert firmness.soft_in_s(lease) == 0, f"{lease.id} is soft, and firm or claimed"
    for transfer in state.transfers.unfinished():
        pinned = transfer.direction is Direction.SEND or transfer.memory is Disposition.HELD
        assert pinned, f"{transfer.id} is not over and holds nothing"
    check_ledger(state)


def check_ledger(state: NodeState) -> None:
    """Asserts that the ledger has what is kept, at its weight. Requests and tensors are not known here."""
    ledger = state.ledger
    ledger.check_sums()
    calls = {call.id: call for rows in state.access.openings.rows.values() for call, _ in rows}
    kept: dict[RowKind, dict[Hashable, int]] = {
        RowKind.LEASE: state.send.leases.kept_bytes,
        RowKind.TRANSFER: state.transfers.kept_bytes,
        RowKind.MOVE: state.moves.kept_bytes,
        RowKind.PUSH: state.send.pushes.kept_bytes,
        RowKind.PARTS: {
            row.name: row.parts.kept_bytes for row in state.receive.targets.values() if row.parts is not None
        },
        RowKind.ACCESS: {access.id: access.kept_bytes for access in state.access.rows.values()},
        RowKind.ALLOCATION: state.pool.allocator.kept_bytes,
        RowKind.KEY: state.keys.kept_bytes,
    }
    for kind, rows in kept.items():
        assert ledger.rows(kind) == rows, f"the ledger has other weights: {kind.value}"
    assert ledger.rows(RowKind.OPENING).keys() == calls.keys(), "the ledger has other calls that wait"
    remembered = {
        RowKind.ENDED_LEASE: state.send.leases.ended_bytes,
        RowKind.PAST_TRANSFER: state.transfers.past_bytes,
        RowKind.TOMBSTONE: state.tombstones.nbytes,
        RowKind.CLOSE: state.moves.closes.nbytes,
    }
    for kind, nbytes in remembered.items():
        assert ledger.by_kind[kind] == nbytes, f"the ledger has another weight: {kind.value}"
