"""Checks that a lead helps itself if too much of its memory is in quarantine, and that the re-key it starts ends.

Too much is more than the budget, or anything if the engine cannot set blocks aside. The memory has the grace to come to
rest by itself. Then the lead registers its memory again, but not before the interval since the last time is over, and
not only for blocks that the last time did not help.
"""

from kvgrpc.core.actions import Action, Rekey
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.pins import PinKind
from sim.rules import SLACK_S, Rule, broken

NEVER = float("inf")


class QuarantineAudit:
    """The quarantine of one lead in one life of its process, seen through `state`. Times are on its clock."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._too_much_since = NEVER
        self._begun = NEVER
        """Time at which the current re-key began."""
        self._told = False
        """True once the ranks know of the re-key."""
        self._next_at = 0.0
        """End of the interval since the last re-key."""
        self._tried: frozenset[str] = frozenset()
        """Owners of what was still in quarantine after the last re-key."""

    def look(self, actions: list[Action]) -> None:
        """Checks the quarantine after an event."""
        state = self._state
        if state.pool.rekeying:
            self._goes_on(actions)
        elif self._begun < NEVER:
            self._ended()
        if state.pool.rekeying or not self._too_much():
            self._too_much_since = NEVER
            return
        self._too_much_since = min(self._too_much_since, state.now)
        self._check_begun()

    def life_began(self) -> None:
        """Starts a new life, whose memory is all new."""
        self._too_much_since = self._begun = NEVER
        self._next_at = 0.0
        self._tried = frozenset()

    def _goes_on(self, actions: list[Action]) -> None:
        now = self._state.now
        if self._begun == NEVER:
            self._begun, self._told = now, False
        self._told = self._told or any(isinstance(action, Rekey) for action in actions)
        waited_s = now - self._begun - self._state.limits.transfer_timeout_s
        if not self._told and waited_s > SLACK_S:
            broken(Rule.R7, f"a re-key waits {waited_s:.3f} s too long for what moves")

    def _ended(self) -> None:
        self._begun = NEVER
        self._next_at = self._state.now + self._state.limits.rekey_interval_s
        self._tried = frozenset(self._owners())

    def _check_begun(self) -> None:
        state = self._state
        grace_s = state.limits.peer_grace_s
        fresh = [since for owner, since in self._owners().items() if owner not in self._tried]
        if not fresh:
            return
        late_s = state.now - max(self._too_much_since + grace_s, min(fresh) + grace_s, self._next_at)
        if late_s > SLACK_S:
            broken(
                Rule.R7,
                f"too much memory is in quarantine, {late_s:.3f} s after a re-key had to begin",
                *self._owners(),
            )

    def _too_much(self) -> bool:
        state = self._state
        if not any(state.pool.pins.quarantined):
            return False
        pool = state.life.engine.pool
        counts = [0] * len(pool.groups)
        """Number of quarantined blocks of each space."""
        for pin in state.pool.pins:
            for space, ids in zip(pool.spaces, pin.blocks, strict=True):
                counts[space] += len(ids) if pin.kind is PinKind.QUARANTINE else 0
        share = state.limits.quarantine_share if state.life.sets_aside else 0.0
        return any(counts[space] > share * group.blocks for space, group in zip(pool.spaces, pool.groups, strict=True))

    def _owners(self) -> dict[str, float]:
        """Returns the owners of blocks in quarantine, and since when."""
        return {pin.owner: pin.since for pin in self._state.pool.pins if pin.kind is PinKind.QUARANTINE}
