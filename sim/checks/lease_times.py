"""Checks the life of leases: a renewal shortens none, revives none and passes no cap, and none outlives its time."""

from functools import lru_cache

from kvgrpc.core.actions import Renewed
from kvgrpc.core.events import LeaseRef, RenewLeases
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.transfers import Direction
from kvgrpc.core.values import grants
from kvgrpc.errors import KVGrpcError
from sim.checks.waits import WaitAudit
from sim.rules import SLACK_S, Rule, broken


class LeaseTimes:
    """The leases of one lead, seen through `state`."""

    def __init__(self, state: NodeState, waits: WaitAudit) -> None:
        self._state = state
        self._waits = waits
        self._asked: dict[int, tuple[tuple[str, float], ...]] = {}
        """Leases of each unanswered RenewLeases, with their deadlines; 0 for a lease that was over."""

    def asks(self, event: RenewLeases) -> None:
        """Takes note of a renewal. One that is passed on says nothing of leases here."""
        if event.source is not None:
            return
        self._asked[event.call.id] = tuple(map(self._deadline, event.leases))

    def refused(self, call_id: int) -> None:
        """Takes note that a call is refused."""
        self._asked.pop(call_id, None)

    def renewed(self, call_id: int, answer: Renewed) -> None:
        """Checks an answered renewal: each lease was live, and ends no earlier than before and no later than its
        cap.
        """
        now = self._state.now
        asked = self._asked.pop(call_id, ())
        for (lease_id, deadline), (left_s, refused, state) in zip(asked, answer.rows, strict=True):
            if refused is None and state is None:
                self._waits.renewed(lease_id, now + left_s)
            if refused is not None or state is None:
                continue
            lease = self._state.send.leases.find(lease_id)
            if deadline <= now or lease is None:
                broken(Rule.R8, f"{lease_id} is renewed, but it is over", lease_id)
            if lease.live and lease.deadline < deadline:
                broken(Rule.R8, f"a renewal shortens {lease_id} by {deadline - lease.deadline:.3f} s", lease_id)
            if left_s > lease.cap - now + SLACK_S:
                broken(Rule.R8, f"{lease_id} is renewed past its cap", lease_id)

    def check(self) -> None:
        """Checks that no lease lives after its time."""
        now = self._state.now
        for lease in self._state.send.leases:
            if not now < lease.deadline <= lease.cap:
                broken(Rule.R8, f"{lease.id} lives after its time", lease.id)

    def touched(self, lease_id: str) -> None:
        """Checks a lease that is used: it is live, or over."""
        lease = self._state.send.leases.find(lease_id)
        if lease is not None and lease.live and self._state.now >= lease.deadline:
            broken(Rule.R8, f"{lease_id} is used after its time", lease_id)

    def _deadline(self, ref: LeaseRef) -> tuple[str, float]:
        """Returns a lease and its deadline, 0 if the lease is over. A key without a lease names the push that waits for
        parts.
        """
        lease_id = ref.lease_id
        if ref.key:
            sends = [found for found in self._state.transfers.with_key(ref.key) if found.direction is Direction.SEND]
            leases = [self._state.send.leases.find(found.lease_id) for found in sends]
            live = [lease.id for lease in leases if lease is not None and lease.live]
            lease_id = next(iter(live or [found.id for found in sends if not found.over]), "")
        if ref.token:
            claims = claims_of(ref.token)
            lease_id = "" if claims is None else claims.lease_id
        lease = self._state.send.leases.find(lease_id)
        return lease_id, lease.deadline if lease is not None and lease.live else 0.0


@lru_cache(maxsize=1024)
def claims_of(token: bytes) -> grants.Claims | None:
    """Returns the claims of a grant, or None if the token is no grant."""
    try:
        return grants.read_claims(token)
    except KVGrpcError:
        return None
