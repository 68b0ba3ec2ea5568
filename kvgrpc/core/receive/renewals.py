"""Renewing the leases of pulls that wait or read: at every third of the TTL, many in one call."""

from kvgrpc.core.actions import SendRenew
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import Move, Stage
from kvgrpc.core.state.pull import Pull
from kvgrpc.core.tables.timers import Timer

INTERVAL_MIN_S = 0.05
"""However short a TTL a peer states, it gets no more renewals than that."""
ROWS_MAX = 4_096
"""Rows of one call: grants of the greatest length fit into a message."""
BATCH_S = 1.0
"""Renewals that are due within this time go in one call; for short TTLs a tenth of the TTL, so that none is late."""


class Renewals:
    """Renewals of all pulls."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def start(self, pull: Pull) -> None:
        """A pull's access is open: the lease has its TTL, or less, from now on."""
        assert pull.opened is not None
        self._plan(pull, min(pull.opened.ttl_s, pull.opened.remaining_s))

    def due(self, pull: Pull) -> None:
        """Renews this pull's lease, and with it those of the same peer that are due soon."""
        now = self._state.now
        rows: list[tuple[str, bytes]] = []
        reading: list[bytes] = []
        for other in self._state.moves.of_peer(pull.peer):
            if other.opened is None or other.stage is Stage.ENDED:
                continue
            if other.next_renewal <= now + min(BATCH_S, other.opened.ttl_s / 10):
                rows.append((other.transfer_id, other.token))
                reads = isinstance(other, Pull) and other.opened_without_blocks and other.stage is not Stage.OPEN
                reading.append(other.access_id if reads else b"")
                self._plan(other, other.opened.ttl_s)
        most = min(self._state.limits.renewals_per_call, ROWS_MAX)
        for at in range(0, len(rows), most):
            told = tuple(access_id for access_id in reading[at : at + most] if access_id)
            self._state.emit(SendRenew(pull.peer, tuple(rows[at : at + most]), told))

    def due_by(self, pull: Pull, when: float) -> None:
        """Its next renewal is no later than that."""
        if when < pull.next_renewal:
            pull.next_renewal = when
            self._state.timers.set(Timer.RENEW, pull.name, when)

    def _plan(self, pull: Move, left_s: float) -> None:
        pull.next_renewal = self._state.now + max(left_s / 3, INTERVAL_MIN_S)
        self._state.timers.set(Timer.RENEW, pull.name, pull.next_renewal)
