"""Checks that only reclaimable leases are reclaimed: unclaimed, or claimed only by younger requests that wait for
blocks; with their firm time over, and their blocks at rest.

Claims are counted here from the accesses and registrations that exist and from what their readers said, not from the
lead's own view of them.
"""

from kvgrpc.core.actions import Action, Openings, Reclaimed, Reply
from kvgrpc.core.events import CloseAccess, Event, OpenAccess, Opened, ReclaimBlocks, RenewLeases, SettleAccess
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import Access, AccessState
from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.ids import peer_key
from sim.rules import SLACK_S, Rule, broken

CLAIMS = (AccessState.WAITING, AccessState.OPEN)


class ReclaimAudit:
    """The leases of one lead."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._claimed: dict[str, str] | None = None
        """While ReclaimBlocks is handled, claimed leases and who claims them; None means that the event is not
        checked.
        """
        self._closing: list[Lease] = []
        """Leases with an access that is being closed."""
        self._let_go: dict[str, float] = {}
        """Time at which the last access on a lease was closed."""
        self._reading: set[bytes] = set()
        """Accesses that calls have said are being read."""
        self._opened_to_read: set[tuple[str, bytes]] = set()
        """Pairs (life, access that it has opened with blocks to read into). A liar names accesses of others."""

    def life_began(self) -> None:
        """Forgets the last life, whose leases are over."""
        self._let_go.clear()
        self._reading.clear()
        self._opened_to_read.clear()

    def hears(self, event: Event, now: float) -> None:
        """Takes note of an event before the node handles it. The event is skipped if a timer is due, which acts
        first.
        """
        due = self._state.timers.next_deadline()
        quiet = due is None or due > now
        self._claimed = self._claims(event, now) if isinstance(event, ReclaimBlocks) and quiet else None
        self._closing = []
        if isinstance(event, RenewLeases):
            self._reading.update(event.reading)
        elif isinstance(event, OpenAccess):
            life = peer_key(event.engine_id, event.incarnation)
            self._opened_to_read.update((life, row.access_id) for row in event.openings if not row.waits_for_blocks)
        if isinstance(event, CloseAccess | SettleAccess):
            rows = event.closings if isinstance(event, CloseAccess) else event.settlings
            found = (self._state.access.rows.get(row.access_id) for row in rows)
            claims = [access for access in found if access is not None and _claims(access)]
            closing = (self._state.send.leases.find(access.lease_id) for access in claims)
            self._closing = [lease for lease in closing if lease is not None]

    def says(self, actions: list[Action]) -> None:
        """Checks the node's actions."""
        for lease in self._closing:
            if lease.live and not any(_claims(access) for access in self._accesses_on(lease)):
                self._let_go[lease.id] = self._state.now
        for action in actions:
            if not isinstance(action, Reply):
                continue
            if isinstance(action.answer, Reclaimed):
                self._check(action.answer)
            elif isinstance(action.answer, Openings):
                self._check_opened(action.answer)

    def _check(self, answer: Reclaimed) -> None:
        state = self._state
        for row in answer.leases:
            lease = state.send.leases.find(row.lease_id)
            if self._claimed is not None and row.lease_id in self._claimed:
                broken(Rule.R2, f"{row.lease_id} is reclaimed under {self._claimed[row.lease_id]}", row.lease_id)
            if lease is None:
                continue  # forgotten for newer ones
            since = max(lease.granted, self._let_go.get(lease.id, 0.0))
            if state.now < since + lease.firm_ttl_s - SLACK_S:
                broken(
                    Rule.R8, f"{lease.id} is reclaimed {state.now - since:.3f} s after its firm time began", lease.id
                )
        for group, ids in enumerate(answer.freed):
            if state.pool.pins.pinned_mask(group)[ids].any():
                broken(Rule.R1, f"blocks of group {group} are said to be free and are pinned")

    def _check_opened(self, answer: Openings) -> None:
        for row in answer.rows:
            lease = self._state.send.leases.find(row.lease_id) if isinstance(row, Opened) and row.lease_id else None
            if lease is not None and lease.state is LeaseState.RECLAIMED:
                broken(Rule.R2, f"{lease.id} was reclaimed and is read", lease.id)

    def _claims(self, event: ReclaimBlocks, now: float) -> dict[str, str]:
        state = self._state
        claims = [access for access in state.access.rows.values() if _claims(access)]
        claimed = {a.lease_id: f"access {a.id.hex()}" for a in claims if not self._yields(a, event, now)}
        for push in state.send.pushes:
            if push.live:
                claimed[push.lease_id] = f"registration {push.live[0].name}"
            elif push.posting:
                claimed[push.lease_id] = "our own postings"
        return claimed

    def _yields(self, access: Access, event: ReclaimBlocks, now: float) -> bool:
        lease, opening = self._state.send.leases.find(access.lease_id), access.opening
        if lease is None or event.by is None or access.state is not AccessState.OPEN:
            return False
        if access.id in self._reading or (access.peer, access.id) in self._opened_to_read:
            return False
        younger = (max(opening.request_time_us, lease.request_time_us), opening.request_id) > event.by
        return younger and now >= access.since + self._state.limits.firm_ttl_s - SLACK_S

    def _accesses_on(self, lease: Lease) -> list[Access]:
        return [access for access in self._state.access.rows.values() if access.lease_id == lease.id]


def _claims(access: Access) -> bool:
    return access.kind is AccessKind.READ and access.state in CLAIMS
