"""Checks what one lead says: each call is answered once and in time, each transfer ends once and in time, and the
engine is told of every end and every return, once.
"""

from collections.abc import Callable

from kvgrpc.core.access.post_sends import POST_S
from kvgrpc.core.actions import Answer, BlocksReturnedNews, EngineNews, Expect, FailedNews, ReceivedNews
from kvgrpc.core.events import (
    ChecksumBlocks,
    ConnectPeer,
    Event,
    HandshakeReceived,
    OpenAccess,
    PostSend,
    ReleaseQuarantine,
)
from kvgrpc.core.pool.quarantine import ANSWER_S
from kvgrpc.core.tables.transfers import DISPOSITIONS, STATES, Direction, Disposition, State, Transfer
from kvgrpc.core.values.limits import Limits, bytes_timeout
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import KVGrpcError
from sim.rules import SLACK_S, Rule, broken

NEVER = float("inf")

Give = Callable[[Answer | KVGrpcError], None]


class LeadAccounts:
    """The accounts of one lead over all its lives. Times are on its clock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._answer_s = {
            OpenAccess: limits.open_wait_s,
            ConnectPeer: limits.connect_timeout_s,
            HandshakeReceived: limits.connect_timeout_s,
            ChecksumBlocks: limits.transfer_timeout_s,
            PostSend: POST_S,
            ReleaseQuarantine: limits.transfer_timeout_s + ANSWER_S,
        }
        """Maximum time until an answer, by kind of call, in seconds. All other calls are answered at once."""
        self._calls: dict[int, tuple[Give, float]] = {}
        """Receiver of each call's answer, and the deadline for the answer."""
        self._last_call = 0
        self._transfers: dict[str, Transfer] = {}
        self._unfinished: dict[str, Transfer] = {}
        self._untold: dict[str, str] = {}
        """Ends and returns of which the engine must be told before the event is over."""
        self._expected: set[str] = set()
        """Accesses under which peers may read."""
        self._writes: set[str] = set()
        """Accesses under which peers may write."""
        self.ends: dict[tuple[Direction, State], int] = {}
        """Number of transfers by direction and final state."""
        self.failures: dict[str, int] = {}
        """Number of failures by reason."""

    def life_began(self) -> None:
        """Starts a new life. The old one must have ended all transfers; its quarantine is forgotten with it."""
        if self._unfinished:
            broken(Rule.R3, "a transfer outlives its life", next(iter(self._unfinished)))
        if self._expected:
            broken(Rule.END, "reads are expected of a life that is over", *sorted(self._expected))
        self._transfers.clear()
        self._writes.clear()

    def crashed(self) -> None:
        """Forgets everything: a crashed lead answers no call any more."""
        self._calls.clear()
        self._transfers.clear()
        self._unfinished.clear()
        self._untold.clear()
        self._expected.clear()
        self._writes.clear()

    @property
    def writes(self) -> frozenset[str]:
        """Accesses under which peers may write, as far as the lead knows."""
        return frozenset(self._writes)

    def called(self, give: Give) -> int:
        """Registers a call that must be answered once, and returns its number."""
        self._last_call += 1
        self._calls[self._last_call] = give, NEVER
        return self._last_call

    def waits(self, call_id: int, kind: type[Event], now: float) -> None:
        """Sets the deadline of a call's answer by its kind."""
        give, _ = self._calls[call_id]
        self._calls[call_id] = give, now + self._answer_s.get(kind, 0.0) + SLACK_S

    def goes_on(self, now: float) -> None:
        """Extends the deadlines of a lead that was stopped: only now does it learn what its ranks have done and ask for
        more.
        """
        soon = now + ANSWER_S + SLACK_S
        self._calls = {number: (give, max(until, soon)) for number, (give, until) in self._calls.items()}

    def answered(self, call_id: int, answer: Answer | KVGrpcError) -> None:
        """Passes on the answer of a call. Raises Violated for a second one."""
        if call_id not in self._calls:
            broken(Rule.R5, f"call {call_id} is answered twice")
        self._calls.pop(call_id)[0](answer)

    def expected(self, action: Expect) -> None:
        """Takes note that a peer's reads or writes begin or end. Writes may outlast a life."""
        known = self._writes if action.writes else self._expected
        if action.open == (action.access in known):
            broken(Rule.R2, f"{action.access} is opened or closed twice", action.access)
        (known.add if action.open else known.discard)(action.access)

    def changed(self, new: Transfer, now: float, *, attached: bool = False) -> None:
        """Checks a changed transfer. `attached` means that there is an engine to tell."""
        old = self._transfers.get(new.id)
        self._transfers[new.id] = new
        self._check_change(old, new)
        tell = attached and new.owner == ENGINE
        returned = new.memory is Disposition.RETURNED and (old is None or old.memory is not Disposition.RETURNED)
        if tell and returned and (new.direction is Direction.SEND or new.state is not State.SUCCEEDED):
            self._untold[f"return of {new.id}"] = new.id
        if not new.over:
            self._unfinished[new.id] = new
        elif old is None or not old.over:
            self._unfinished.pop(new.id, None)
            self._ended(new, now)
            if tell and (new.direction is Direction.RECEIVE or new.state is not State.SUCCEEDED):
                self._untold[f"end of {new.id}"] = new.id

    def told(self, news: EngineNews) -> None:
        """Checks that the engine may be told this."""
        if isinstance(news, ReceivedNews | FailedNews):
            what = f"end of {news.transfer_id}"
        elif isinstance(news, BlocksReturnedNews) and news.transfer_id:
            what = f"return of {news.transfer_id}"
            if f"end of {news.transfer_id}" in self._untold:
                broken(Rule.R5, f"the engine is told of the {what}, and not before of its end", news.transfer_id)
        else:
            return
        if self._untold.pop(what, None) is None:
            broken(Rule.R5, f"the engine is told of the {what}, which it was told before, or is none", news.transfer_id)

    def check_told(self) -> None:
        """Checks that the engine was told of everything that happened in this event."""
        if self._untold:
            what, transfer_id = next(iter(self._untold.items()))
            broken(Rule.R5, f"the engine is not told of the {what}", transfer_id)

    def check_waits(self, now: float) -> None:
        """Checks that nothing waits longer than it may."""
        for number, (_, until) in self._calls.items():
            if now > until:
                broken(Rule.R7, f"call {number} is not answered {now - until:.3f} s after it had to be")
        for transfer in self._unfinished.values():
            if now - transfer.created > self._bound_s(transfer) + SLACK_S:
                broken(Rule.R7, f"{transfer.id} has not ended for {now - transfer.created:.3f} s", transfer.id)

    def check_idle(self) -> None:
        """Checks that everything has ended."""
        if self._calls:
            broken(Rule.R7, f"{len(self._calls)} calls were never answered")
        for t in self._transfers.values():
            if not t.over or t.memory is not Disposition.RETURNED:
                broken(Rule.END, f"{t.id} is {t.state}, its memory {t.memory}", t.id)
        if self._expected:
            broken(Rule.END, f"reads are still expected: {sorted(self._expected)}", *sorted(self._expected))
        if self._writes:
            broken(Rule.END, f"writes are still expected: {sorted(self._writes)}", *sorted(self._writes))

    def _check_change(self, old: Transfer | None, new: Transfer) -> None:
        if old is None:
            return
        if new.seq <= old.seq:
            broken(Rule.R3, f"{new.id} has an older number than before", new.id)
        if new.state is not old.state and new.state not in STATES[old.state]:
            broken(Rule.R3, f"{new.id} is {new.state} after it was {old.state}", new.id)
        if new.memory is not old.memory and new.memory not in DISPOSITIONS[old.memory]:
            broken(Rule.R1, f"the memory of {new.id} is {new.memory} after it was {old.memory}", new.id)
        if old.over and (new.failure, new.ended) != (old.failure, old.ended):
            broken(Rule.R3, f"the end of {new.id} was changed", new.id)

    def _ended(self, new: Transfer, now: float) -> None:
        if new.ended is None or new.ended > now:
            broken(Rule.R3, f"{new.id} is over and ends at {new.ended}", new.id)
        age_s = new.ended - new.created
        if age_s > self._bound_s(new) + SLACK_S:
            broken(Rule.R3, f"{new.id} ended after {age_s:.3f} s", new.id)
        if (new.failure is None) != (new.state is State.SUCCEEDED):
            broken(Rule.R3, f"{new.id} is {new.state} with the failure {new.failure}", new.id)
        self.ends[new.direction, new.state] = self.ends.get((new.direction, new.state), 0) + 1
        if new.failure is not None:
            self.failures[new.failure.reason] = self.failures.get(new.failure.reason, 0) + 1

    def _bound_s(self, transfer: Transfer) -> float:
        limits = self._limits
        if transfer.direction is Direction.SEND:
            registered_first = transfer.phases[:1] and transfer.phases[0].name == "rendezvous"
            return limits.lease_cap_s + (limits.registration_timeout_s if registered_first else 0.0)
        waits = 2 * limits.queue_timeout_s + limits.lease_cap_s
        return waits + bytes_timeout(transfer.nbytes, limits) + limits.settle_timeout_s
