"""What one lead has said, checked as it is said: each call answered once, each transfer ended once and in time."""

from collections.abc import Callable

from kvgrpc.core.actions import Answer, Expect
from kvgrpc.core.limits import Limits
from kvgrpc.core.transfers import DISPOSITIONS, STATES, Direction, Disposition, State, Transfer
from kvgrpc.errors import KVGrpcError

SLACK_S = 1e-6
"""For the rounding of virtual time."""


class Ledger:
    """The accounts of one lead over all its lives."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls: dict[int, Callable[[Answer | KVGrpcError], None]] = {}
        self._last_call = 0
        self._transfers: dict[str, Transfer] = {}
        self._expected: set[str] = set()
        self.ends: dict[tuple[Direction, State], int] = {}
        """How many transfers ended how."""
        self.failures: dict[str, int] = {}
        """How many failed for which reason."""

    def life_began(self) -> None:
        """A new life: the old one has ended all that it had; what stays in quarantine is forgotten with it."""
        assert all(transfer.over for transfer in self._transfers.values()), "a transfer outlives its life"
        assert not self._expected, "reads are expected of a life that is over"
        self._transfers.clear()

    def crashed(self) -> None:
        """Nobody answers any more."""
        self._calls.clear()
        self._transfers.clear()
        self._expected.clear()

    def called(self, give: Callable[[Answer | KVGrpcError], None]) -> int:
        """A call that must be answered once; its number."""
        self._last_call += 1
        self._calls[self._last_call] = give
        return self._last_call

    def answered(self, call_id: int, answer: Answer | KVGrpcError) -> None:
        """Its answer."""
        assert call_id in self._calls, f"call {call_id} is answered twice"
        self._calls.pop(call_id)(answer)

    def expected(self, action: Expect) -> None:
        """Reads of a peer begin or end."""
        assert action.open != (action.access in self._expected), f"{action.access} is opened or closed twice"
        (self._expected.add if action.open else self._expected.discard)(action.access)

    def changed(self, new: Transfer, now: float) -> None:
        """A transfer changed."""
        old = self._transfers.get(new.id)
        self._transfers[new.id] = new
        if old is not None:
            assert new.seq > old.seq
            assert new.state is old.state or new.state in STATES[old.state]
            assert new.memory is old.memory or new.memory in DISPOSITIONS[old.memory]
            assert not old.over or (new.failure, new.ended) == (old.failure, old.ended), "an end was changed"
        if not new.over or (old is not None and old.over):
            return
        assert new.ended is not None
        assert new.ended <= now
        age_s = new.ended - new.created
        assert age_s <= self._bound_s(new) + SLACK_S, f"{new.id} ended after {age_s:.3f} s"
        assert (new.failure is None) == (new.state is State.SUCCEEDED)
        self.ends[new.direction, new.state] = self.ends.get((new.direction, new.state), 0) + 1
        if new.failure is not None:
            self.failures[new.failure.reason] = self.failures.get(new.failure.reason, 0) + 1

    def check_idle(self) -> None:
        """Asserts that everything came to its end."""
        assert not self._calls, f"{len(self._calls)} calls were never answered"
        unfinished = [t for t in self._transfers.values() if not t.over or t.memory is not Disposition.RETURNED]
        assert not unfinished, f"{unfinished[0].id} is {unfinished[0].state}, its memory {unfinished[0].memory}"
        assert not self._expected, f"reads are still expected: {self._expected}"

    def _bound_s(self, transfer: Transfer) -> float:
        limits = self._limits
        if transfer.direction is Direction.SEND:
            registered_first = transfer.phases[:1] and transfer.phases[0].name == "rendezvous"
            return limits.lease_cap_s + (limits.registration_timeout_s if registered_first else 0.0)
        waits = 2 * limits.queue_timeout_s + limits.lease_cap_s
        return waits + limits.transfer_timeout_s + limits.settle_timeout_s
