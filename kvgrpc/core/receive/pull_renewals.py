"""Renews the leases of pulls that wait or read: every third of the TTL, many in one call."""

from kvgrpc.core.actions import SendRenew
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import Move, MoveStage
from kvgrpc.core.state.pull import PullMove
from kvgrpc.core.tables.timers import Timer

INTERVAL_MIN_S = 0.05
"""Minimum interval of renewals, in seconds, however short a TTL the peer states."""
ROWS_MAX = 4_096
"""Maximum rows of one call: grants of the greatest length fit into a message."""
BATCH_S = 1.0
"""Renewals due within this time, in seconds, go in one call; for short TTLs within 10 % of the TTL: none is late."""


class PullRenewals:
    """Renewals of all pulls."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def start(self, pull: PullMove) -> None:
        """Plans the first renewal of a pull whose access is open. Its lease may have less than the TTL left."""
        assert pull.opened is not None
        self._plan(pull, min(pull.opened.ttl_s, pull.opened.remaining_s))

    def due(self, pull: PullMove) -> None:
        """Renews this pull's lease, and the leases at the same peer that are due soon."""
        now = self._state.now
        rows: list[tuple[str, bytes]] = []
        reading: list[bytes] = []
        for other in self._state.moves.of_peer(pull.peer):
            if other.opened is None or other.stage is MoveStage.ENDED:
                continue
            if other.next_renewal <= now + min(BATCH_S, other.opened.ttl_s / 10):
                rows.append((other.transfer_id, other.token))
                reads = (
                    isinstance(other, PullMove) and other.opened_without_blocks and other.stage is not MoveStage.OPEN
                )
                reading.append(other.access_id if reads else b"")
                self._plan(other, other.opened.ttl_s)
        most = min(self._state.limits.renewals_per_call, ROWS_MAX)
        for at in range(0, len(rows), most):
            told = tuple(access_id for access_id in reading[at : at + most] if access_id)
            self._state.emit(SendRenew(pull.peer, tuple(rows[at : at + most]), told))

    def due_by(self, pull: PullMove, when: float) -> None:
        """Moves a pull's next renewal to this time, if it is planned for later."""
        if when < pull.next_renewal:
            pull.next_renewal = when
            self._state.timers.set(Timer.RENEW, pull.name, when)

    def _plan(self, pull: Move, left_s: float) -> None:
        pull.next_renewal = self._state.now + max(left_s / 3, INTERVAL_MIN_S)
        self._state.timers.set(Timer.RENEW, pull.name, pull.next_renewal)
