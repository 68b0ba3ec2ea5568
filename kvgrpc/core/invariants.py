"""What ties the tables of a node together."""

from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import AccessState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Direction, Disposition
from kvgrpc.core.values.grants import Access as AccessKind


def check(state: NodeState) -> None:
    """Asserts what holds between any two events. For tests and simulators."""
    state.pins.check()
    wanted = {(lease.id, PinKind.LEASE) for lease in state.leases}
    reads = [a for a in state.accesses.values() if a.kind is AccessKind.READ]
    wanted |= {(a.owner, PinKind.ACCESS) for a in reads if a.state is AccessState.OPEN}
    wanted |= {pin for move in state.moves if (pin := move.pinned(state.pins)) is not None}
    assert {(pin.owner, pin.kind) for pin in state.pins} == wanted, "pins without a reason, or missing"
    for lease in state.leases:
        assert state.now < lease.deadline <= lease.cap, f"{lease.id} outlives its time"
        assert all(state.accesses[id_].state is AccessState.OPEN for id_ in lease.accesses)
        assert all(state.accesses[id_].state is AccessState.WAITING for id_ in lease.waiting)
    firmness = Firmness(state)
    for lease in state.soft_leases.oldest():
        assert lease.live, f"{lease.id} is soft and over"
        assert firmness.soft_in_s(lease) == 0, f"{lease.id} is soft, and firm or claimed"
    for transfer in state.transfers.unfinished():
        pinned = transfer.direction is Direction.SEND or transfer.memory is Disposition.HELD
        assert pinned, f"{transfer.id} is not over and holds nothing"
