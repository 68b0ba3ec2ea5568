"""Weak claims: leases with waiting readers, which a request older than all of these readers may take.

A claim is weak until its reader says that it reads. Such a reader has no blocks to read into yet, and may wait for
blocks of an engine that waits for these. A lease that only renewals keep firm is also weakly claimed. No claim yields
during the firm time of its lease, or during the default firm time after it was opened, because its reader may get
blocks at any moment. A reader is as old as it says, but never older than the request whose blocks it reads.
"""

from collections.abc import Iterable, Iterator

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.values.request_times import RequestTime


class WeakClaims:
    """The weak claims on all live leases."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def reading(self, access_ids: Iterable[bytes]) -> None:
        """Ends weak claims whose readers read by now. Such claims yield to nobody."""
        for access_id in access_ids:
            access = self._state.access.rows.get(access_id)
            if access is not None:
                access.waits_for_blocks = False

    def younger(self, asking: RequestTime) -> list[Lease]:
        """Returns the leases that yield to that request, those of the youngest readers first."""
        found = [(claimed, lease) for lease in self._state.send.leases if (claimed := self._yields(lease)) is not None]
        younger = [(claimed, lease) for claimed, lease in found if claimed > asking]
        return [lease for _, lease in sorted(younger, key=lambda pair: pair[0], reverse=True)]

    def waiting(self) -> Iterator[tuple[Lease, Access]]:
        """Yields each live lease with each of its readers that waits for its own blocks."""
        for lease in self._state.send.leases:
            for access_id in lease.accesses:
                if (access := self._state.access.rows[access_id]).waits_for_blocks:
                    yield lease, access

    def time_of(self, lease: Lease, access: Access) -> RequestTime:
        """Returns the time at which the request of a reader began."""
        opening = access.opening
        return RequestTime(max(opening.request_time_us, lease.request_time_us), opening.request_id)

    def _yields(self, lease: Lease) -> RequestTime | None:
        """Returns the oldest request that weakly claims the lease. Returns None when it yields to nobody or is soft."""
        state = self._state
        if lease.waiting or not lease.request_time_us:
            return None
        if lease.pushed and ((push := state.send.pushes.find(lease.transfer_id)) is None or push.claimed):
            return None
        if lease.kept_until > state.now or lease.id in state.send.soft_leases:
            return None
        readers = [state.access.rows[access_id] for access_id in lease.accesses]
        opened_before = state.now - state.limits.firm_ttl_s
        if any(not access.waits_for_blocks or access.since > opened_before for access in readers):
            return None
        claims = (self.time_of(lease, access) for access in readers)
        return min(claims, default=RequestTime(lease.request_time_us, lease.request_id))
